"""`fit` and `discover`, as Python users and the commands call them."""

from __future__ import annotations

from jdfl_lightning.config import Experiment
from jdfl_lightning.server import run as server
from jdfl_lightning.studies.run import Discovery, Run
from jdfl_lightning.ui.display import Display, progress_display


def fit(experiment: Experiment, progress: bool | Display = True) -> Run:
    """Run Joint Domain-Class Federated Learning, or resume a run, and leave a run folder.

    Args:
        experiment: the settings.
        progress: whether progress is shown: live on a terminal or in a notebook, as plain lines elsewhere. Or a
            display of your own.

    Returns:
        The finished run, read back from its folder.
    """
    with progress_display(progress) as display:
        return Run.read(server.fit(experiment, display).folder)


def discover(experiment: Experiment, progress: bool | Display = True) -> Discovery:
    """Run Phase 1 alone and leave a folder that a run can reuse, by its setting `discovery`.

    Args:
        experiment: the settings; those of the rounds do not matter.
        progress: whether progress is shown, as in `fit`.

    Returns:
        The pseudo-domains and their folder.
    """
    with progress_display(progress) as display:
        return Discovery.read(server.discover(experiment, display))
