"""Classes by max and by sum: accuracy and calibration of finished runs, with the last round's weights.

    python benchmarks/digits_table.py --supervisions hard graded random --seeds 0 1 2 --out runs/scores
    python benchmarks/class_scores.py runs/scores

Runs that differ in the seed alone are a row. Other probabilities than the sum of joint ones could be had from a softmax
over the largest logits of each class; they are compared as well.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.nn.functional import nll_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from jdfl_lightning.config import parse_experiment
from jdfl_lightning.joint import class_probabilities, class_scores, predict_class
from jdfl_lightning.models import eval_mode
from jdfl_lightning.server.phase1 import prepare
from jdfl_lightning.storage.names import CURVES
from jdfl_lightning.storage.trust import CONFIG
from jdfl_lightning.storage.weights import load_model
from jdfl_lightning.ui.display import Display

BINS = 15


def evaluate_round(folder: Path) -> tuple[str, dict[str, float]]:
    """Return the supervision of a run, and its numbers."""
    experiment = parse_experiment("class_scores", ["--config", str(folder / CONFIG), "--logger", "false"])
    site = prepare(experiment, Display())
    model = load_model(folder, "last")
    module, classes = site.module(model.weights, model.buffers), len(model.header.class_names)
    with torch.no_grad(), eval_mode(module):
        parts = [(module(images), labels) for images, labels, _ in experiment.data.test_dataloader()]
    logits, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    by_max, by_sum = (predict_class(logits, classes, score) for score in ("max", "sum"))
    numbers = {
        "accuracy, max (%)": 100 * (by_max == labels).float().mean(),
        "accuracy, sum (%)": 100 * (by_sum == labels).float().mean(),
        "other class (%)": 100 * (by_max != by_sum).float().mean(),
    }
    for name, probabilities in (
        ("softmax of max", class_scores(logits, classes).softmax(1)),
        ("sum", class_probabilities(logits, classes)),
    ):
        error = multiclass_calibration_error(probabilities, labels, classes, n_bins=BINS, norm="l1")
        numbers[f"calibration error, {name} (%)"] = 100 * error
        numbers[f"log loss, {name}"] = nll_loss(probabilities.log(), labels)
    return experiment.supervision, {name: float(number) for name, number in numbers.items()}


def main() -> None:
    """Evaluate the runs and print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of run folders")
    options = parser.parse_args()
    rows: dict[str, list[Mapping[str, float]]] = {}
    for file in sorted(options.runs.glob(f"*/{CURVES}")):  # a finished run has its curves
        supervision, numbers = evaluate_round(file.parent)
        rows.setdefault(supervision, []).append(numbers)
    names = list(next(iter(rows.values()))[0])
    print(f"| | seeds | {' | '.join(names)} |\n|{'---|' * (len(names) + 2)}")
    for supervision, runs in rows.items():
        means = [statistics.mean(run[name] for run in runs) for name in names]
        print(f"| {supervision} | {len(runs)} | {' | '.join(f'{mean:.2f}' for mean in means)} |")


if __name__ == "__main__":
    main()
