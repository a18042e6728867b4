"""Random: a pseudo-domain drawn for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from jdfl_lightning.core.errors import require
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import RandomTargets, TargetRule
from jdfl_lightning.supervision.base import Supervision


@dataclass(frozen=True)
class Random(Supervision):
    """Mass phi on a pseudo-domain drawn for each sample and epoch, the rest spread evenly over the others."""

    phi: float = 1.0
    """Mass on the drawn pseudo-domain, in [0, 1]."""

    short: ClassVar[str] = "random"
    colour: ClassVar[str] = "#009e73"
    needs_own_domain: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.phi <= 1, "--supervision.phi", "between 0 and 1", self.phi)

    def table(self, centroids: Tensor) -> Tensor:
        """Return phi on the diagonal and the rest spread evenly."""
        return RandomTargets(len(centroids), self.phi).table

    def rule(self, sent: Tensors, domain: int) -> TargetRule:
        """Return a rule that draws a row for each sample."""
        return TargetRule(sent["table"], draw=True)
