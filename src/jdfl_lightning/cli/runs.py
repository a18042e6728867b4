"""Commands that look at run folders: `runs list`, `runs show`, `runs compare`, `runs rm`, `report` and `watch`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jdfl_lightning.cli.program import starting
from jdfl_lightning.core.errors import InputError, require
from jdfl_lightning.core.files import as_json
from jdfl_lightning.core.lists import Fractions, Names
from jdfl_lightning.ui.tables import show_tables

if TYPE_CHECKING:
    from jdfl_lightning.report.write import Report
    from jdfl_lightning.ui.loggers import WandbRounds


def list_all(runs: list[Path] = [], json: bool = False) -> int:  # noqa: B006 - nothing changes it
    """list runs with their state, settings, accuracy and size

    Args:
        runs: Run folders, or folders that contain some; runs/ if not given.
        json: Print JSON, a list of objects.
    """
    from jdfl_lightning.report.collect import find_run_folders
    from jdfl_lightning.report.listing import list_table, summarize
    from jdfl_lightning.storage.names import RUNS

    folders = find_run_folders(runs or [Path(RUNS)]) if runs or Path(RUNS).is_dir() else []
    found = sorted(map(summarize, folders), key=lambda run: run.changed)  # those written last at the end
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
    from jdfl_lightning.report.listing import list_table, run_record, settings_table, summarize
    from jdfl_lightning.report.run import run_table
    from jdfl_lightning.storage.folder import read_run

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
    from jdfl_lightning.report.collect import find_run_folders
    from jdfl_lightning.report.listing import compare_table, differences, summarize
    from jdfl_lightning.storage.folder import read_run

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

    from jdfl_lightning.report.listing import summarize
    from jdfl_lightning.storage.folder import check_removable, remove_runs

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


def report(
    runs: list[Path],
    output: Path = Path("report"),
    target: Fractions = Fractions(""),
    formats: Names | None = None,
    wandb: bool = False,
) -> int:
    """compare runs: tables and figures of accuracy, gain, domains and cost, beside the paper's values

    Args:
        runs: Run folders, or folders that contain some.
        output: Where the report goes: new, empty, or with an earlier report, which is replaced.
        target: Say the rounds and bytes to reach these accuracies, such as 0.7,0.8; none for each algorithm's base.
        formats: Formats of the figures besides PNG, such as pdf,svg; null for none.
        wandb: Put table and figures on Weights & Biases too.
    """
    with starting():
        from jdfl_lightning.report.write import write_report

    written = write_report(runs, output, target, formats or ())
    if wandb:
        upload(written)
    tell(written)
    return 0


def tell(report: Report) -> None:
    """Show a report's comparison, and say where the report is."""
    from jdfl_lightning.report.tables import on_screen

    show_tables(Console(), [on_screen(title, table) for title, table in report.comparison])
    print(f"runs compared: {report.num_runs}, left out: {len(report.left_out)}; see {report.page}")


def upload(report: Report, like: WandbRounds | None = None) -> None:
    """Put a report's table and pictures on Weights & Biases, as a run named ``report``.

    Args:
        report: the report; W&B's own files go to its folder.
        like: a logger whose project, entity and group it shares.
    """
    from jdfl_lightning.ui.loggers import WandbRounds, log_picture

    like = like or WandbRounds()
    logger = WandbRounds(like.project, like.entity, "report", like.group, like.tags, like.offline)
    try:
        logger.start(report.folder, "report")
    except Exception as error:  # wandb's own, pydantic's, or the operating system's
        raise InputError(f"Expected --wandb to start but Weights & Biases refused: {error}") from error
    logger.log_table("report", list(report.results), report.results.values.tolist())
    for picture in report.pictures:
        log_picture(logger, picture.stem, picture)
    logger.finalize("success")


def watch(runs: list[Path], port: int = 0) -> int:
    """serve a page with a run's curves and discovery, on this machine alone, while it trains; Ctrl-C ends it

    Args:
        runs: The run folder.
        port: Port of the page; 0 for any that is free.
    """
    from jdfl_lightning.studies.watch import WatchServer

    require(len(runs) == 1, "RUNS", "one run folder", len(runs))
    with WatchServer(runs[0], port) as server:
        print(f"{server.url} shows {runs[0]}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
