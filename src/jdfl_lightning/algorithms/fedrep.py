"""FedRep: a shared body and private heads, trained in turn (Collins et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import lightning.pytorch as pl

from jdfl_lightning.algorithms.base import LocalUpdate
from jdfl_lightning.algorithms.fedavg import FedAvg
from jdfl_lightning.core.errors import require
from jdfl_lightning.core.messages import FitTask
from jdfl_lightning.core.tensors import Record, Tensors

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


@dataclass(frozen=True)
class FedRep(FedAvg):
    """A fit trains what is private (the head) with the rest fixed, then the rest (the body) with the head fixed.

    The server is FedAvg's, for the body alone. Of E local epochs the last `body_epochs` are the body's.
    """

    body_epochs: int = 1
    """Epochs at the end of a fit that train the body; all before them train the head."""

    allows_stack: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.body_epochs > 0, "--algorithm.body_epochs", "positive", self.body_epochs)

    def check_settings(self, experiment: Experiment) -> None:
        """Refuse settings that leave nothing for one of the two."""
        super().check_settings(experiment)
        named = bool(experiment.private)
        require(named, "--private", 'the names of the head with FedRep, such as "head.*",', experiment.private)
        room = experiment.epochs > self.body_epochs or experiment.trainer.fast_dev_run
        why = f"above --algorithm.body_epochs, {self.body_epochs}, so that the head has epochs too,"
        require(room, "--epochs", why, experiment.epochs)

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        """Return the client side for one fit."""
        return AlternatingUpdate(task, state, self.body_epochs)


class AlternatingUpdate(LocalUpdate):
    """Local SGD on the private parameters, then on those that are sent."""

    def __init__(self, task: FitTask, state: Record, body_epochs: int) -> None:
        super().__init__(task, state)
        self.body_epochs = body_epochs
        self._epochs_left = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note how many epochs the fit has."""
        super().on_train_start(trainer, pl_module)
        self._epochs_left = trainer.max_epochs or 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count the epoch."""
        self._epochs_left -= 1

    def correct(self, params: Tensors) -> None:
        """Take the gradients of the part that is fixed away: the optimizer skips it, with its momentum and decay."""
        body = self._epochs_left <= self.body_epochs
        for param in (self._private if body else params).values():
            param.grad = None
