"""Ditto: FedAvg, and beside it a personal model at every client that is pulled to the global one (Li et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch.optim import SGD

from jdfl_lightning.algorithms.base import SECOND, LocalUpdate
from jdfl_lightning.algorithms.fedavg import FedAvg
from jdfl_lightning.algorithms.fedprox import ProximalUpdate
from jdfl_lightning.core.errors import require
from jdfl_lightning.core.messages import FitTask
from jdfl_lightning.core.tensors import Record, Tensors

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


@dataclass(frozen=True)
class Ditto(FedAvg):
    """Server and clients are FedAvg's; a client also takes steps on f_i(v_i) + mu/2 ||v_i - theta||^2, and keeps v_i.

    The personal model v_i starts as the first theta that the client is sent. It trains for as many epochs as the
    client's copy of the global model, and never leaves the client.
    """

    mu: float = 0.1
    """Strength of the pull to the global model, 0 or more; 0 is local training alone. The paper's lambda."""

    has_second_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.mu < math.inf, "--algorithm.mu", "0 or more, and finite", self.mu)

    def check_settings(self, experiment: Experiment) -> None:
        """Refuse a pull that local SGD cannot follow: beyond 2 (1 + momentum) / lr its steps grow without bound."""
        super().check_settings(experiment)
        optimizer = experiment.local_optimizer
        if optimizer.load() is SGD:
            lr, momentum = float(optimizer.argument("lr")), float(optimizer.argument("momentum"))
            limit = 2 * (1 + momentum) / lr
            require(self.mu < limit, "--algorithm.mu", f"below {limit:g}, 2 (1 + momentum) / lr,", self.mu)

    def init_client(self, weights: Tensors) -> Record:
        """The personal model starts as the model that was sent."""
        return {SECOND[0]: weights}

    def state_groups(self, weights: Tensors) -> Iterable[str]:
        """A client reports nothing of its personal model, not even its norm."""
        return ()

    def second(self, task: FitTask, state: Record) -> LocalUpdate:
        """Return the client side of the personal model's fit."""
        return ProximalUpdate(task, {}, self.mu)
