"""FedAvg: the participants' models, averaged by their numbers of samples (McMahan et al., 2017)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jdfl_lightning.algorithms.base import Algorithm
from jdfl_lightning.core.messages import FitResult, RoundContext
from jdfl_lightning.core.tensors import Record, RunningSum, Tensors


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """theta <- sum_S n_i theta_i / sum_S n_i."""

    def aggregate(
        self, weights: Tensors, server: Record, results: Iterable[FitResult], context: RoundContext
    ) -> tuple[Tensors, Record]:
        """Average the participants' weights."""
        models = RunningSum()
        for result in results:
            models.add(result.weights, self.share(result))
        return models.mean(), server

    def share(self, result: FitResult) -> float:
        """Return a participant's weight in the average."""
        return float(result.num_examples) if self.weighting == "samples" else 1.0
