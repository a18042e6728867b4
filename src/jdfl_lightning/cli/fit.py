"""The command `fit`."""

from __future__ import annotations

from collections.abc import Sequence


def fit(settings: Sequence[str]) -> int:
    """run a federated training and leave a run folder (weights, metrics, curves)"""
    from rich.console import Console

    from jdfl_lightning.cli.program import PROGRAM
    from jdfl_lightning.config import parse_experiment
    from jdfl_lightning.core.memory import reuse_memory
    from jdfl_lightning.report.details import details_tables
    from jdfl_lightning.report.run import run_table
    from jdfl_lightning.storage.details import read_details
    from jdfl_lightning.studies import training
    from jdfl_lightning.ui.display import open_display

    reuse_memory()
    experiment = parse_experiment(f"{PROGRAM} fit", settings)
    console = Console()
    with open_display(console) as display:
        run = training.fit(experiment, display)
    console.print(run_table(run))
    details = read_details(run.folder)
    for table in [] if details is None else details_tables(details):
        console.print(table)
    console.print(f"run folder: {run.folder}", highlight=False, soft_wrap=True)
    return 0
