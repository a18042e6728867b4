"""Phase 1 at a client: train briefly, on its classes or on a task that no class label enters, and send the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from jdfl_lightning.algorithms.base import LocalUpdate
from jdfl_lightning.clustering.sketch import sketch
from jdfl_lightning.clustering.updates import unit, update_vector
from jdfl_lightning.core.messages import FitTask
from jdfl_lightning.core.tensors import Record, Tensors, snapshot, sub
from jdfl_lightning.data.loader import BatchLoader


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


_ANGLES = 4


def turn(images: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Turn the images of a batch by 0, 90, 180 and 270 degrees in turn; return them and their angles as labels.

    Every angle is as frequent as any other, to one image, whatever the classes of the images are.

    Args:
        images: square (B, 3, H, H).
        num_classes: outputs of the head; fewer than four leave the last angles out.

    >>> turned, labels = turn(torch.tensor([[[[1, 2], [3, 4]]]] * 5), num_classes=10)
    >>> turned.flatten(1).tolist()
    [[1, 2, 3, 4], [2, 4, 1, 3], [4, 3, 2, 1], [3, 1, 4, 2], [1, 2, 3, 4]]
    >>> labels.tolist(), turn(turned, num_classes=2)[1].tolist()
    ([0, 1, 2, 3, 0], [0, 1, 0, 1, 0])
    """
    count = min(_ANGLES, num_classes)
    turned = images.clone()
    for angle in range(1, count):
        turned[angle::count] = images[angle::count].rot90(angle, (2, 3))
    return turned, torch.arange(len(images)) % count


class TurnedBatches(BatchLoader):
    """A client's batches with turned images and their angles as labels.

    Args:
        loader: the client's batches.
        num_classes: outputs of the head.
    """

    def __init__(self, loader: BatchLoader, num_classes: int) -> None:
        vars(self).update(vars(loader))
        self.num_classes = num_classes

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch of some of the images, turned."""
        images, _, domains = super().take(chosen)
        return *turn(images, self.num_classes), domains
