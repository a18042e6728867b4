"""The command `diagnose`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from jdfl_lightning.cli.program import PROGRAM
from jdfl_lightning.core.lists import Numbers
from jdfl_lightning.ui.starting import starting


def diagnose(
    settings: Sequence[str],
    seeds: Numbers = Numbers("0,1,2"),
    batch_sizes: Numbers = Numbers("16,32,64"),
    max_epochs: int = 5,
) -> int:
    """try Phase 1 over E_0, batch sizes, layers and seeds: ARI and how reliably M is found

    Args:
        settings: of a run.
        seeds: Seeds to try.
        batch_sizes: Batch sizes to try.
        max_epochs: E_0 is tried from 1 to this.
    """
    with starting(settings):
        from jdfl_lightning.config import parse_experiment
        from jdfl_lightning.core.memory import reuse_memory
        from jdfl_lightning.report.diagnosis import diagnosis_tables
        from jdfl_lightning.studies.diagnose import Sweep
        from jdfl_lightning.studies.diagnose import diagnose as sweep_over
        from jdfl_lightning.ui.display import open_display
        from jdfl_lightning.ui.tables import show_tables

        reuse_memory()
        experiment = parse_experiment(f"{PROGRAM} diagnose", settings)
    console = Console()
    with open_display(console) as display:
        folder = sweep_over(experiment, Sweep(seeds, batch_sizes, max_epochs), display).folder
    show_tables(console, diagnosis_tables(folder))
    console.print(f"folder: {folder}", highlight=False, soft_wrap=True)
    return 0
