"""The command `fit`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from jdfl_lightning.cli.program import PROGRAM
from jdfl_lightning.ui.starting import starting


def fit(settings: Sequence[str]) -> int:
    """run a federated training and leave a run folder (weights, metrics, curves)"""
    with starting(settings):
        from jdfl_lightning.config import parse_experiment
        from jdfl_lightning.core.memory import reuse_memory
        from jdfl_lightning.report.details import details_tables
        from jdfl_lightning.report.run import run_table
        from jdfl_lightning.storage.details import read_details
        from jdfl_lightning.studies import run as studies
        from jdfl_lightning.ui.display import open_display
        from jdfl_lightning.ui.tables import show_tables

        reuse_memory()
        experiment = parse_experiment(f"{PROGRAM} fit", settings)
    console = Console()
    with open_display(console) as display:
        run = studies.fit(experiment, display)
    details = read_details(run.folder)
    show_tables(console, [run_table(run), *([] if details is None else details_tables(details))])
    console.print(f"run folder: {run.folder}", highlight=False, soft_wrap=True)
    return 0
