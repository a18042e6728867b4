"""The command `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


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
