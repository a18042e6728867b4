"""RobustFedAvg: an average that a few bad models cannot corrupt (Yin et al., 2018)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from jdfl_lightning.algorithms.fedavg import FedAvg
from jdfl_lightning.core.errors import require
from jdfl_lightning.core.messages import FitResult, RoundContext
from jdfl_lightning.core.tensors import Record, Tensors


@dataclass(frozen=True)
class RobustFedAvg(FedAvg):
    """theta <- coordinate-wise median, or mean without the extremes, of the participants with equal weights.

    The server holds all models of a round, as a median cannot be computed from a running sum.
    """

    rule: Literal["median", "trimmed_mean"] = "median"
    """median, or trimmed_mean: the mean without the smallest and the largest values of each coordinate."""
    trim: float = 0.1
    """Share of the participants that trimmed_mean leaves out at either end, in [0, 0.5); at least one of 3 or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.trim < 0.5, "--algorithm.trim", "at least 0 and below 0.5", self.trim)

    def aggregate(
        self, weights: Tensors, server: Record, results: Iterable[FitResult], context: RoundContext
    ) -> tuple[Tensors, Record]:
        """Take the median or trimmed mean of every coordinate."""
        models = [result.weights for result in results]
        return {name: self._middle(torch.stack([model[name] for model in models])) for name in weights}, server

    def _middle(self, values: Tensor) -> Tensor:
        count = len(values)
        numbers = values.float() if values.element_size() < 4 else values  # NumPy has no bfloat16; nothing is rounded
        ordered = torch.from_numpy(np.sort(numbers.numpy(), axis=0))  # several times as fast as torch's
        middle = (count - 1) // 2
        least = min(1, middle) if self.trim else 0
        cut = middle if self.rule == "median" else min(middle, max(least, int(self.trim * count + 1e-9)))
        return ordered[cut : count - cut].double().mean(dim=0).to(values.dtype)
