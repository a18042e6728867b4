"""The commands `runs list`, `runs show`, `runs compare` and `runs rm`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console


def list_all(runs: list[Path] = [], json: bool = False) -> int:  # noqa: B006 - nothing changes it
    """list runs with their state, settings, accuracy and size

    Args:
        runs: Run folders, or folders that contain some; runs/ if not given.
        json: Print JSON, a list of objects.
    """
    from dataclasses import asdict

    from jdfl_lightning.core.output import as_json
    from jdfl_lightning.report.listing import list_runs, list_table
    from jdfl_lightning.ui.tables import show_tables

    found = list_runs(runs)
    if json:
        print(as_json([asdict(run) for run in found]))
    elif not found:
        print("no runs")
    else:
        show_tables(Console(), [list_table(found)])
        for run in found:
            if run.problem:
                print(f"{run.folder}: {run.problem}")
    return 0


def show(runs: list[Path], json: bool = False) -> int:
    """show runs: accuracies, discovery and all settings

    Args:
        runs: Run folders.
        json: Print JSON, a list of objects.
    """
    from jdfl_lightning.core.output import as_json
    from jdfl_lightning.report.listing import list_table, run_record, settings_table, summarize
    from jdfl_lightning.report.run import run_table
    from jdfl_lightning.storage.folder import read_run
    from jdfl_lightning.ui.tables import show_tables

    found = [read_run(folder) for folder in runs]
    if json:
        print(as_json([run_record(run) for run in found]))
        return 0
    for run in found:
        summary = summarize(run.folder)
        show_tables(Console(), [list_table([summary]), run_table(run), settings_table(run.config, "settings")])
        if run.stop is not None:
            print(f"stopped after round {run.stop.round}: {run.stop}")
    return 0


def compare(runs: list[Path], json: bool = False) -> int:
    """compare runs side by side: the settings in which they differ, and their accuracies; writes nothing

    Args:
        runs: Run folders, or folders that contain some.
        json: Print JSON, an object with runs and settings.
    """
    from dataclasses import asdict

    from jdfl_lightning.core.output import as_json
    from jdfl_lightning.report.collect import find_run_folders
    from jdfl_lightning.report.listing import compare_table, differences, summarize
    from jdfl_lightning.storage.folder import read_run
    from jdfl_lightning.ui.tables import show_tables

    found = [read_run(folder) for folder in find_run_folders(runs)]
    if json:
        print(as_json({"runs": [asdict(summarize(run.folder)) for run in found], "settings": differences(found)}))
    else:
        show_tables(Console(), [compare_table(found)])
    return 0


def rm(runs: list[Path], yes: bool = False) -> int:
    """delete run folders, after asking

    Args:
        runs: Run folders themselves; a folder that is not a run, is in use or holds other files is refused.
        yes: Delete without asking.
    """
    from rich.filesize import decimal

    from jdfl_lightning.core.errors import InputError
    from jdfl_lightning.report.listing import summarize
    from jdfl_lightning.storage.removal import check_removable, remove_runs

    runs = list(dict.fromkeys(runs))
    for folder in runs:
        check_removable(folder)
    if not yes:
        if not sys.stdin.isatty():
            raise InputError("Expected --yes true, as there is no terminal to ask at. Nothing was deleted.")
        size = decimal(sum(summarize(folder).bytes for folder in runs))
        print(*runs, sep="\n")
        answer = input(f"delete {len(runs)} run{'s' * (len(runs) > 1)} ({size})? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 0
    remove_runs(runs)
    print(f"deleted: {', '.join(map(str, runs))}")
    return 0
