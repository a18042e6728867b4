"""Global weights -> class-only accuracy overall, for each domain, and of the worst domain."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import torch

from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.client.trainer import quiet, silent_trainer
from jdfl_lightning.core.tensors import Tensors

Counts = dict[str, tuple[int, int]]
"""Domain -> number of held-out images classified correctly, and number of all."""


@dataclass(frozen=True)
class Scores:
    """Accuracies on the union of the held-out images, from 0 to 1; NaN where there was no image."""

    overall: float
    domains: dict[str, float]

    @classmethod
    def unknown(cls, domains: Sequence[str]) -> Scores:
        """Return the scores of a model that was not evaluated: NaN."""
        return cls(float("nan"), {name: float("nan") for name in domains})

    @classmethod
    def of(cls, counts: Counts) -> Scores:
        """Return the accuracies of counts, in single precision like torchmetrics.

        >>> Scores.of({"photo": (3, 4), "sketch": (1, 4)})
        Scores(overall=0.5, domains={'photo': 0.75, 'sketch': 0.25})
        """
        correct, seen = torch.tensor(list(counts.values())).float().unbind(dim=1)
        each = (correct / seen).tolist()
        return cls(float(correct.sum() / seen.sum()), dict(zip(counts, each, strict=True)))

    @property
    def worst(self) -> float:
        """Accuracy of the worst domain; NaN if not all were evaluated."""
        return float("nan") if math.isnan(self.overall) else min(self.domains.values())

    def as_metrics(self) -> dict[str, float]:
        """Return the scores under the names they are logged with."""
        each = {f"test/acc/{name}": value for name, value in self.domains.items()}
        return {"test/acc": self.overall, "test/acc_worst": self.worst, **each}


@dataclass(frozen=True)
class Evaluation:
    """The scores of some models, by name, and the seconds the evaluation took."""

    scores: dict[str, Scores]
    seconds: float


def evaluate(workspace: Workspace, models: Mapping[str, Tensors], buffers: Tensors) -> Evaluation:
    """Test models that share their buffers on every domain's held-out images."""
    start = time.perf_counter()
    scores = {name: Scores.of(count(workspace, weights, buffers)) for name, weights in models.items()}
    return Evaluation(scores, time.perf_counter() - start)


class _TakeDown(pl.Callback):
    """Records the counts of a module before it logs them as accuracies."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the counts; Lightning calls callbacks before the module."""
        assert isinstance(pl_module, JointModule)
        right, seen = pl_module.test_accuracy.counts.tolist()
        self.counts = list(zip(right, seen, strict=True))


def count(workspace: Workspace, weights: Tensors, buffers: Tensors) -> Counts:
    """Test a model on the held-out images of this process."""
    module, taken = workspace.module(weights, buffers), _TakeDown()
    with quiet():
        trainer = silent_trainer(workspace.experiment.trainer, callbacks=[taken])
        trainer.test(module, workspace.data.test_dataloader(), verbose=False)
    return dict(zip(workspace.data.domain_names, taken.counts, strict=True))
