"""Graded: mass shared with similar pseudo-domains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from jdfl_lightning.core.errors import require
from jdfl_lightning.joint import GradedTargets
from jdfl_lightning.supervision.base import Supervision


@dataclass(frozen=True)
class Graded(Supervision):
    """Mass alpha on the client's own pseudo-domain, the rest shared with similar ones (graded invariance)."""

    alpha: float | None = None
    """Mass on the own pseudo-domain, in (0, 1]; null for 0.55 if M <= 5 and 0.45 if more."""
    tau: float = 0.1
    """Temperature over the cosine similarities of the centroids, above 0."""

    short: ClassVar[str] = "graded"
    colour: ClassVar[str] = "#0072b2"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha is None or 0 < self.alpha <= 1, "--supervision.alpha", "above 0 and at most 1", self.alpha)
        require(self.tau > 0, "--supervision.tau", "positive", self.tau)

    def table(self, centroids: Tensor) -> Tensor:
        """Return the graded weights of the centroids as they are now."""
        return GradedTargets(centroids, self.alpha, self.tau).table
