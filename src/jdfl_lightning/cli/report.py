"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jdfl_lightning.core.lists import Fractions, Names
from jdfl_lightning.ui.starting import starting

if TYPE_CHECKING:
    from jdfl_lightning.report.write import Report
    from jdfl_lightning.ui.loggers import WandbRounds


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
    from jdfl_lightning.report.screen import comparison_tables
    from jdfl_lightning.ui.tables import show_tables

    show_tables(Console(), comparison_tables(report))
    print(f"runs compared: {report.num_runs}, left out: {len(report.left_out)}; see {report.page}")


def upload(report: Report, like: WandbRounds | None = None) -> None:
    """Put a report on Weights & Biases."""
    from jdfl_lightning.ui.loggers import upload_report

    upload_report(report.folder, list(report.results), report.results.values.tolist(), report.pictures, like)
