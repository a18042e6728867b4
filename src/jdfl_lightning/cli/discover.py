"""The command `discover`."""

from __future__ import annotations

from collections.abc import Sequence


def discover(settings: Sequence[str]) -> int:
    """run Phase 1 alone and show the pseudo-domains; `fit --discovery` reuses them"""
    from rich.console import Console

    from jdfl_lightning.cli.program import PROGRAM
    from jdfl_lightning.config import parse_experiment
    from jdfl_lightning.core.memory import reuse_memory
    from jdfl_lightning.report.discovery import discovery_tables
    from jdfl_lightning.server import run as server
    from jdfl_lightning.storage.discoveries import read_discovery
    from jdfl_lightning.ui.display import open_display

    reuse_memory()
    experiment = parse_experiment(f"{PROGRAM} discover", settings)
    console = Console()
    with open_display(console) as display:
        folder = server.discover(experiment, display)
    for table in discovery_tables(read_discovery(folder), experiment.alpha, experiment.tau):
        console.print(table)
    console.print(f"reuse it with: {PROGRAM} fit --discovery {folder}", highlight=False, soft_wrap=True)
    return 0
