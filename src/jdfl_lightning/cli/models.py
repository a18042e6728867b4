"""Commands that use the model of a run: `test`, `predict` and `export`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console

from jdfl_lightning.cli.program import BAD_INPUT, FAILED, PROGRAM, starting
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.files import as_json
from jdfl_lightning.ui.display import open_display
from jdfl_lightning.ui.tables import show_tables


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


def predict(
    run: Path,
    images: list[Path],
    weights: Literal["best", "last"] | None = None,
    score: Literal["max", "sum"] | None = None,
    output: Path | None = None,
    trust: bool = False,
) -> int:
    """write a CSV with class, probability and winning pseudo-domain of images

    Args:
        run: Folder of the run, or of a model that export wrote for a hub.
        images: Image files, or folders of them.
        weights: Which of the run's weights to use; null for best, or last if the run keeps no best, as a private one.
        score: Predict a class by its largest output, or by the sum of its probabilities; null for the run's way.
        output: Where the CSV goes; standard output if not given.
        trust: Import whatever classes the run folder names, even if you did not make it here.
    """
    from jdfl_lightning.studies.hub import load_folder
    from jdfl_lightning.studies.inference import list_images, predictions, write_predictions

    unreadable: list[str] = []
    found = predictions(load_folder(run, weights, trust), list_images(images), unreadable, score)
    if output is None:
        write_predictions(found, sys.stdout)
    else:
        with _open_output(output) as out:
            write_predictions(found, out)
    for line in unreadable:
        print(f"{PROGRAM}: {line}", file=sys.stderr)
    return BAD_INPUT if unreadable else 0


def _open_output(file: Path) -> TextIO:
    try:
        return file.open("w", newline="")
    except OSError as error:
        raise InputError(f"Expected --output to be writable but got {file}: {error}.") from error


def export(
    run: Path,
    format: Literal["onnx", "torch", "lightning", "hub"] = "onnx",
    output: Path | None = None,
    weights: Literal["best", "last"] | None = None,
    trust: bool = False,
) -> int:
    """write the network of a run for use elsewhere, with its preprocessing and class names

    Args:
        run: Folder of the run.
        format: onnx; torch, a program of torch.export; lightning, a checkpoint; hub, a folder with a model card.
        output: The new file, or folder for hub; null for model.onnx, model.pt2, model.ckpt or model.
        weights: Which of the run's weights to use; null for best, or last if the run keeps no best, as a private one.
        trust: Import whatever classes the run folder names, even if you did not make it here.
    """
    from jdfl_lightning.studies.export import export as write

    print(write(run, format, output, weights, trust))
    return 0
