"""The command `test`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Literal


def evaluate(
    run: Path,
    score: Literal["max", "sum"] | None = None,
    data__root: str | None = None,
    trust: bool = False,
) -> int:
    """evaluate the saved weights of a run again

    Args:
        run: Folder of the run.
        score: Predict a class by its largest output, or by the sum of its probabilities; null for the run's way.
        data__root: Folder of the images, if they have moved since the run.
        trust: Import whatever classes the run folder names, even if you did not make it here.
    """
    from rich.console import Console

    from jdfl_lightning.cli.program import FAILED, PROGRAM
    from jdfl_lightning.config import parse_experiment, usable_settings
    from jdfl_lightning.core.errors import InputError
    from jdfl_lightning.report.run import accuracy_table
    from jdfl_lightning.storage.folder import read_run
    from jdfl_lightning.studies.inference import test_run
    from jdfl_lightning.ui.display import open_display

    found = read_run(run)
    others = [] if data__root is None else [f"--data.root={data__root}"]
    others += [] if score is None else [f"--score={score}"]
    settings = usable_settings(run, trust)
    saved = {name: value for name, value in settings.items() if name not in ("logger", "backend")}
    experiment = parse_experiment(f"{PROGRAM} test", others, saved)
    console = Console()
    with open_display(console) as display:
        scores = test_run(experiment, run, display)
    if missing := set(found.domains) ^ set(experiment.data.domain_names):
        raise InputError(f"Expected the domains of the run in --data.root but these differ: {', '.join(missing)}.")
    rows = {which: {"round": known["round"]} | scores[which].as_metrics() for which, known in found.ends.items()}
    console.print(accuracy_table(f"class-only accuracy (%), score {experiment.score}", rows))
    if experiment.score != found.config.get("score", "max"):  # other numbers are what was asked for
        return 0
    logged = {which: row for which, row in found.ends.items() if not math.isnan(row["test/acc"])}  # it was evaluated
    differing = [which for which in logged if any(logged[which][name] != rows[which][name] for name in rows[which])]
    if differing:
        print(f"not what metrics.csv says of: {', '.join(differing)}", file=sys.stderr)
        return FAILED
    return 0
