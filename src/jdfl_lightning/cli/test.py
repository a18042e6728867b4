"""The command `test`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Literal

from rich.console import Console

from jdfl_lightning.cli.program import FAILED
from jdfl_lightning.core.output import as_json
from jdfl_lightning.ui.starting import starting


def evaluate(
    run: Path,
    score: Literal["max", "sum"] | None = None,
    data__root: str | None = None,
    trust: bool = False,
    json: bool = False,
) -> int:
    """evaluate the saved weights of a run again, and write evaluation.json and the confusion matrix

    Args:
        run: Folder of the run.
        score: Predict a class by its largest output, or by the sum of its probabilities; null for the run's way.
        data__root: Folder of the images, if they have moved since the run.
        trust: Import whatever classes the run folder names, even if you did not make it here.
        json: Print JSON instead of tables: the accuracies of all saved weights, and evaluation.json.
    """
    with starting():
        from jdfl_lightning.report.details import details_tables
        from jdfl_lightning.report.run import accuracy_table
        from jdfl_lightning.server.closing import examine_model, write_details
        from jdfl_lightning.storage.details import read_details
        from jdfl_lightning.storage.folder import read_run
        from jdfl_lightning.storage.weights import kept_weights, load_model
        from jdfl_lightning.studies import inference
        from jdfl_lightning.ui.display import open_display
        from jdfl_lightning.ui.tables import show_tables

    console = Console(stderr=json)
    with open_display(console) as display:
        workspace, tested = inference.tested(run, score, data__root, trust, display)
        kept = kept_weights(run)
        details = examine_model(workspace, kept, load_model(run, kept))
    rows = {row.pop("weights"): row for row in tested}
    found = read_run(run)
    usual = found.config.get("score", "max").replace("own", "max")  # own: of clients' own models alone
    as_usual = score in (None, usual)  # else other numbers are what was asked for
    logged = {which: row for which, row in found.ends.items() if not math.isnan(row["test/acc"])}  # it was evaluated
    differing = [which for which in logged if any(logged[which][name] != rows[which][name] for name in rows[which])]
    if json:
        same = not differing if as_usual else None
        print(as_json({"run": run, "weights": rows, "same_as_metrics": same, "evaluation": details}))
    else:
        title = f"class-only accuracy (%), score {score or usual}"
        show_tables(console, [accuracy_table(title, rows), *details_tables(details)])
    if as_usual and differing:
        print(f"not what metrics.csv says of: {', '.join(differing)}", file=sys.stderr)
        return FAILED
    if as_usual:
        personal = (read_details(run) or {}).get("personal")  # clients' own models are evaluated by `fit` alone
        write_details(workspace, run, details | ({} if personal is None else {"personal": personal}))
    return 0
