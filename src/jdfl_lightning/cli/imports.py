"""Where a user's own modules are found: in the working folder, and beside the configs named on the command line."""

from __future__ import annotations

import argparse
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
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--trust", default="")
    for option in ("--run", "--resume"):
        parser.add_argument(option, action="append", dest="runs", default=[])
    try:
        given, _ = parser.parse_known_args(list(args))
    except argparse.ArgumentError:  # a missing value, which the command reports
        return
    runs = [Path(run) for run in given.runs if isinstance(run, str) and run not in ("auto", "null")]
    try:
        folders = [run.parent.parent if run.is_file() else run for run in runs]  # a checkpoint names its run
    except OSError:  # no name of a file, which the command reports
        return
    if given.trust.lower() != "true" and not all(map(own_settings, folders)):
        return
    configs = [Path(config).parent for config in given.config if Path(config).is_file()]
    for folder in (*configs, Path.cwd()):
        if str(folder.absolute()) not in sys.path:
            sys.path.append(str(folder.absolute()))
