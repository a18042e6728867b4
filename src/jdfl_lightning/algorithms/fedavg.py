"""FedAvg: the participants' models, averaged by their numbers of samples (McMahan et al., 2017)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jdfl_lightning.algorithms.base import Algorithm
from jdfl_lightning.messages import FitResult
from jdfl_lightning.tensors import Record, Tensors, weighted_mean


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """theta <- sum_S n_i theta_i / sum_S n_i."""

    def aggregate(
        self,
        weights: Tensors,
        server: Record,
        results: Iterable[FitResult],
        num_clients: int,
    ) -> tuple[Tensors, Record]:
        """Average the participants' weights."""
        return weighted_mean((self.client_weight(result), result.weights) for result in results), server
