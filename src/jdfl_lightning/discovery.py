"""Phase 1 at a client: a brief local training, and what of it is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from jdfl_lightning.algorithms.base import LocalUpdate
from jdfl_lightning.messages import FitTask
from jdfl_lightning.sketch import sketch
from jdfl_lightning.tensors import Record, Tensors, flatten, snapshot, sub


def unit(vector: Tensor) -> Tensor:
    """Return a vector at length 1; one of zeros stays what it is.

    >>> unit(torch.tensor([3.0, 4.0])), unit(torch.zeros(1))
    (tensor([0.6000, 0.8000]), tensor([0.]))
    """
    exact = vector.double()
    scaled: Tensor = exact / exact.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return scaled.float()


def update_vector(before: Tensors, after: Tensors, names: Sequence[str]) -> Tensor:
    r"""Return :math:`\bar u = u / \|u\|_2` with :math:`u = \mathrm{vec}(\tilde\theta[P] - \theta_0[P])`.

    >>> update_vector({"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}, ["w"])
    tensor([0.6000, 0.8000])
    """
    return unit(flatten(sub({name: after[name] for name in names}, before)))


def flaw(update: Tensor) -> str | None:
    """Return why an update vector cannot be used; nothing if it can.

    >>> flaw(torch.tensor([0.6, 0.8])), flaw(torch.zeros(2))
    (None, 'its update is zero')
    """
    if not torch.isfinite(update).all():
        return "its update is not finite: lower --lr or set --trainer.gradient_clip_val"
    return None if update.any() else "its update is zero"


class DiscoveryProbe(LocalUpdate):
    """The client half of Phase 1: train plainly, then send the normalised update of the chosen layers alone.

    Args:
        task: what the server sent.
        names: the parameters P to look at.
        sketch_dim: send a sketch of this length instead of the whole vector.
    """

    def __init__(self, task: FitTask, names: Sequence[str], sketch_dim: int | None = None) -> None:
        super().__init__(task, {})
        self.names, self.sketch_dim = list(names), sketch_dim

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Do nothing: Phase 1 tells no loss, so that any module and any batches will do."""

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        """Upload the update vector; a client keeps nothing from Phase 1."""
        vector = update_vector(self.task.weights, weights, self.names)
        if self.sketch_dim is not None:
            vector = unit(sketch(vector, self.sketch_dim, self.task.seed))
        return {"update": {"u": vector}}, {}


class EpochProbe(LocalUpdate):
    """A probe that answers for every number of epochs at once: sends the update of the chosen layers after each.

    Args:
        task: what the server sent.
        names: the parameters to look at.
    """

    def __init__(self, task: FitTask, names: Sequence[str]) -> None:
        super().__init__(task, {})
        self.names = list(names)
        self._updates: Record = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take down how far the parameters have come."""
        now = snapshot({name: self._params[name] for name in self.names})
        self._updates[str(len(self._updates) + 1)] = sub(now, self.task.weights)

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        """Upload the updates by epoch, neither normalised nor joined."""
        return self._updates, {}


@dataclass(frozen=True)
class Updates:
    """What the clients sent in Phase 1."""

    clients: list[int]
    """Ids of the clients whose update can be used."""
    vectors: Tensor
    """Their normalised updates, or sketches of them (clients, D)."""
    left_out: dict[int, str] = field(default_factory=dict)
    """Clients that were asked and gave nothing of use, and why."""
    bytes_down: int = 0
    bytes_up: int = 0
