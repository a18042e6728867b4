"""Global weights -> class-only accuracy overall, for each domain, and of the worst domain."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jdfl_lightning.client import Site
from jdfl_lightning.tensors import Tensors
from jdfl_lightning.trainer import quiet, silent_trainer


@dataclass(frozen=True)
class Scores:
    """Accuracies on the union of the held-out images, as shares of 1."""

    overall: float
    domains: dict[str, float]

    @classmethod
    def unknown(cls, domains: Sequence[str]) -> Scores:
        """Return the scores of a model that nobody has judged: NaN."""
        return cls(float("nan"), {name: float("nan") for name in domains})

    @property
    def worst(self) -> float:
        """Accuracy of the worst domain."""
        return min(self.domains.values())

    def as_metrics(self) -> dict[str, float]:
        """Return the scores under the names that they are logged by."""
        each = {f"test/acc/{name}": value for name, value in self.domains.items()}
        return {"test/acc": self.overall, "test/acc_worst": self.worst, **each}


@dataclass(frozen=True)
class Evaluation:
    """The scores of some models, by name, and the seconds that it took."""

    scores: dict[str, Scores]
    seconds: float


def evaluate(site: Site, models: Mapping[str, Tensors], buffers: Tensors) -> Evaluation:
    """Test models that share their buffers on every domain's held-out images."""
    start = time.perf_counter()
    scores = {name: _test(site, weights, buffers) for name, weights in models.items()}
    return Evaluation(scores, time.perf_counter() - start)


def _test(site: Site, weights: Tensors, buffers: Tensors) -> Scores:
    module = site.module(weights, buffers)
    with quiet():
        trainer = silent_trainer(site.experiment.trainer)
        trainer.test(module, site.data.test_dataloader(), verbose=False)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Scores(values["test/acc"], {name: values[f"test/acc/{name}"] for name in site.data.domain_names})
