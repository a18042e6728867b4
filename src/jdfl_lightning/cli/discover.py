"""The command `discover`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console

from jdfl_lightning.cli.program import PROGRAM
from jdfl_lightning.ui.starting import starting


def discover(settings: Sequence[str]) -> int:
    """run Phase 1 alone and show the pseudo-domains; `fit --discovery` reuses them"""
    with starting(settings):
        from jdfl_lightning.config import parse_experiment, split_options
        from jdfl_lightning.core.memory import reuse_memory
        from jdfl_lightning.report.discovery import discovery_tables
        from jdfl_lightning.studies import run as studies
        from jdfl_lightning.supervision import Graded
        from jdfl_lightning.ui.display import open_display
        from jdfl_lightning.ui.tables import show_tables

        reuse_memory()
        experiment = parse_experiment(f"{PROGRAM} discover", settings)
    console = Console()
    with open_display(console) as display:
        found = studies.discover(experiment, display)
    rule = experiment.supervision if isinstance(experiment.supervision, Graded) else Graded()
    show_tables(console, discovery_tables(found, rule.alpha, rule.tau))
    again = shlex.join([PROGRAM, "fit", *split_options(settings, {"run_dir"})[1], "--discovery", str(found.folder)])
    console.print(f"reuse it with: {again}", highlight=False, markup=False, soft_wrap=True)
    return 0
