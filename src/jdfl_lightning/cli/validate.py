"""The command `validate`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from jdfl_lightning.cli.program import PROGRAM
from jdfl_lightning.ui.starting import starting


def validate(settings: Sequence[str], json: bool = False) -> int:
    """check settings and data as fit does, and estimate memory, bytes and time of a round; trains nothing

    Args:
        settings: of a run.
        json: Print JSON: the data, and the estimates with how each was obtained.
    """
    with starting(settings):
        from dataclasses import asdict

        from jdfl_lightning.config import parse_experiment
        from jdfl_lightning.core.memory import reuse_memory
        from jdfl_lightning.core.output import as_json
        from jdfl_lightning.data.summary import data_table
        from jdfl_lightning.report.listing import estimates_table
        from jdfl_lightning.studies import validation
        from jdfl_lightning.ui.display import open_display
        from jdfl_lightning.ui.tables import show_tables

        reuse_memory()
        experiment = parse_experiment(f"{PROGRAM} validate", settings)
    console = Console(stderr=json)
    with open_display(console) as display:
        found = validation.validate(experiment, display)
    if json:
        print(as_json({"valid": True, **asdict(found)}))
    else:
        estimates = {name: (e.value, e.unit, e.how) for name, e in found.estimates.items()}
        show_tables(console, [data_table(found.data), estimates_table(estimates)])
        print("the settings and the data can be used")
    return 0
