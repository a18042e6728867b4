"""Hard: all mass on the client's own pseudo-domain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from jdfl_lightning.joint import HardTargets
from jdfl_lightning.supervision.base import Supervision


@dataclass(frozen=True)
class Hard(Supervision):
    """All mass on the client's own pseudo-domain: the paper's expanded head with one-hot labels."""

    short: ClassVar[str] = "hard"
    colour: ClassVar[str] = "#e69f00"

    def table(self, centroids: Tensor) -> Tensor:
        """Return the identity."""
        return HardTargets(len(centroids)).table
