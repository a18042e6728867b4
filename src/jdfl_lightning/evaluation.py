"""Global weights -> class-only accuracy overall, for each domain, and of the worst domain."""

from __future__ import annotations

from dataclasses import dataclass

from jdfl_lightning.client import Site
from jdfl_lightning.tensors import Tensors
from jdfl_lightning.trainer import quiet, silent_trainer


@dataclass(frozen=True)
class Scores:
    """Accuracies on the union of the held-out images, as shares of 1."""

    overall: float
    domains: dict[str, float]

    @property
    def worst(self) -> float:
        """Accuracy of the worst domain."""
        return min(self.domains.values())

    def as_metrics(self) -> dict[str, float]:
        """Return the scores under the names that they are logged by."""
        each = {f"test/acc/{name}": value for name, value in self.domains.items()}
        return {"test/acc": self.overall, "test/acc_worst": self.worst, **each}


def evaluate(site: Site, weights: Tensors, buffers: Tensors) -> Scores:
    """Test a model on every domain's held-out images."""
    module = site.module(weights, buffers)
    with quiet():
        trainer = silent_trainer(site.experiment.trainer)
        trainer.test(module, site.data.test_dataloader(), verbose=False)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Scores(values["test/acc"], {name: values[f"test/acc/{name}"] for name in site.data.domain_names})
