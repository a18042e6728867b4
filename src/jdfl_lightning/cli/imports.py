"""Where a user's own modules are found: in the working folder, and beside the configs named on the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jdfl_lightning.storage.trust import own_settings


def add_own_modules(args: Sequence[str]) -> None:
    """Put the working folder and the folders of configs at the end of ``sys.path``, for classes that settings name.

    Nothing is added if the command uses a run folder that this user did not make: a file beside it could have the name
    of a module that some library tries to import. ``--trust true`` adds them nevertheless.

    Args:
        args: the arguments of a command.
    """
    from jdfl_lightning.config import given_values, joined

    args = joined(args)
    named = [*given_values(args, "run"), *given_values(args, "resume")]
    runs = [Path(run) for run in named if run not in ("auto", "null")]
    try:
        folders = [run.parent.parent if run.is_file() else run for run in runs]  # a checkpoint names its run
    except OSError:  # no name of a file, which the command reports
        return
    trust = "".join(given_values(args, "trust")[-1:]).lower() == "true"
    if not trust and not all(map(own_settings, folders)):
        return
    configs = [Path(config).parent for config in given_values(args, "config") if Path(config).is_file()]
    for folder in (*configs, Path.cwd()):
        if str(folder.absolute()) not in sys.path:
            sys.path.append(str(folder.absolute()))
