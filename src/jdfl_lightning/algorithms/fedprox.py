"""FedProx: FedAvg with a proximal term towards the server's model (Li et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jdfl_lightning.algorithms.base import LocalUpdate
from jdfl_lightning.algorithms.fedavg import FedAvg
from jdfl_lightning.core.errors import require
from jdfl_lightning.core.messages import FitTask
from jdfl_lightning.core.tensors import Record, Tensors, placed


@dataclass(frozen=True)
class FedProx(FedAvg):
    """Adds mu (theta_i - theta) to a client's gradient; the server is FedAvg's."""

    mu: float = 0.01
    """Strength of the proximal term, 0 or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.mu >= 0, "--algorithm.mu", "0 or more", self.mu)

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        """Return the client side for one fit."""
        return ProximalUpdate(task, state, self.mu)


class ProximalUpdate(LocalUpdate):
    """Local SGD on f_i(theta_i) + mu/2 ||theta_i - theta||^2."""

    stacks: ClassVar[bool] = True

    def __init__(self, task: FitTask, state: Record, mu: float) -> None:
        super().__init__(task, state)
        self.strength = mu

    def begin(self, params: Tensors) -> None:
        """Prepare the anchor theta, so that mu (theta_i - theta) is added."""
        self.anchors = placed(self.task.weights, params)
