"""The command `predict`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, TextIO


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
    from jdfl_lightning.cli.program import BAD_INPUT, PROGRAM
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
    from jdfl_lightning.core.errors import InputError

    try:
        return file.open("w", newline="")
    except OSError as error:
        raise InputError(f"Expected --output to be writable but got {file}: {error}.") from error
