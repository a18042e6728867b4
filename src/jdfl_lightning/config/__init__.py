"""The settings of a run: `Experiment`, read from YAML files and command lines, and written back.

It configures all packages imported before it; these get their settings only as arguments.
"""

from jdfl_lightning.config.experiment import Experiment, free_settings
from jdfl_lightning.config.files import (
    as_dict,
    find_config,
    run_of,
    save_config,
    shipped_configs,
    usable_settings,
)
from jdfl_lightning.config.groups import Checkpointing, Clustering
from jdfl_lightning.config.parsing import load_experiment, make_parser, parse_command, parse_experiment
from jdfl_lightning.config.reading import given_values, joined, split_options

__all__ = [
    "Checkpointing",
    "Clustering",
    "Experiment",
    "as_dict",
    "find_config",
    "free_settings",
    "given_values",
    "joined",
    "load_experiment",
    "make_parser",
    "parse_command",
    "parse_experiment",
    "run_of",
    "save_config",
    "shipped_configs",
    "split_options",
    "usable_settings",
]
