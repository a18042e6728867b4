"""Phase 1 at a client: train briefly, send the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from jdfl_lightning.algorithms.base import LocalUpdate
from jdfl_lightning.clustering.sketch import sketch
from jdfl_lightning.clustering.updates import unit, update_vector
from jdfl_lightning.core.messages import FitTask
from jdfl_lightning.core.tensors import Record, Tensors, snapshot, sub


class DiscoveryProbe(LocalUpdate):
    """The client side of Phase 1: train with the plain loss, then send the normalised update of the chosen layers.

    Args:
        task: what the server sent.
        names: the parameters P in the update vector.
        sketch_dim: send a sketch of this length instead of the whole vector.
    """

    def __init__(self, task: FitTask, names: Sequence[str], sketch_dim: int | None = None) -> None:
        super().__init__(task, {})
        self.names, self.sketch_dim = list(names), sketch_dim

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Do nothing: Phase 1 reports no loss, so any module and any batches work."""

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        """Upload the update vector; a client keeps nothing from Phase 1."""
        vector = update_vector(self.task.weights, weights, self.names)
        if self.sketch_dim is not None:
            vector = unit(sketch(vector, self.sketch_dim, self.task.seed))
        return {"update": {"u": vector}}, {}


class EpochProbe(LocalUpdate):
    """A probe that sends the update of the chosen layers after every epoch.

    Args:
        task: what the server sent.
        names: the parameters in the update.
    """

    def __init__(self, task: FitTask, names: Sequence[str]) -> None:
        super().__init__(task, {})
        self.names = list(names)
        self._updates: Record = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the update so far."""
        now = snapshot({name: self._params[name] for name in self.names})
        self._updates[str(len(self._updates) + 1)] = sub(now, self.task.weights)

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        """Upload the updates by epoch, neither normalised nor concatenated."""
        return self._updates, {}
