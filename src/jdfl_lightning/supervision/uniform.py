"""Uniform: the mass spread evenly; a control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from jdfl_lightning.supervision.base import Supervision


@dataclass(frozen=True)
class Uniform(Supervision):
    """Mass 1/M on every pseudo-domain: the mean of random targets for any phi, without their noise.

    A control: with `head_init: tile` it follows the path of the baseline with `head_lr` 1/M.
    """

    short: ClassVar[str] = "uniform"
    colour: ClassVar[str] = "#cc79a7"
    needs_own_domain: ClassVar[bool] = False

    def table(self, centroids: Tensor) -> Tensor:
        """Return 1/M everywhere."""
        return torch.full((len(centroids),) * 2, 1 / len(centroids))
