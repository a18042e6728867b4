"""The settings of a run: `Experiment`, read from YAML files and command lines, and written back.

It configures all packages imported before it; these get their settings only as arguments.
"""

from jdfl_lightning.config.experiment import Experiment as Experiment
from jdfl_lightning.config.experiment import free_settings as free_settings
from jdfl_lightning.config.files import as_dict as as_dict
from jdfl_lightning.config.files import given_values as given_values
from jdfl_lightning.config.files import joined as joined
from jdfl_lightning.config.files import run_of as run_of
from jdfl_lightning.config.files import save_config as save_config
from jdfl_lightning.config.files import shipped_configs as shipped_configs
from jdfl_lightning.config.files import split_options as split_options
from jdfl_lightning.config.files import usable_settings as usable_settings
from jdfl_lightning.config.groups import Checkpointing as Checkpointing
from jdfl_lightning.config.groups import Clustering as Clustering
from jdfl_lightning.config.parsing import load_experiment as load_experiment
from jdfl_lightning.config.parsing import parse_command as parse_command
from jdfl_lightning.config.parsing import parse_experiment as parse_experiment
