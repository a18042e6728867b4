"""Plain: the baseline, without pseudo-domains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import PlainTargets, TargetRule
from jdfl_lightning.supervision.base import RoundInfo, Supervision


@dataclass(frozen=True)
class Plain(Supervision):
    """The federated optimizer alone: C outputs, ordinary class labels, no Phase 1."""

    short: ClassVar[str] = "base"
    colour: ClassVar[str] = "#4d4d4d"
    needs_discovery: ClassVar[bool] = False
    needs_own_domain: ClassVar[bool] = False

    def table(self, centroids: Tensor) -> Tensor:
        """Return the only weight."""
        return torch.ones(1, 1)

    def broadcast(self, record: Tensors, info: RoundInfo) -> Tensors:
        """Send nothing."""
        return {}

    def rule(self, sent: Tensors, domain: int) -> TargetRule:
        """Return ordinary class labels."""
        return PlainTargets()
