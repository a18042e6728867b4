"""What a federated optimizer is: a server half and a client half, both without state of their own.

Everything an algorithm remembers goes in and comes out as a `Record`; nothing that a resumed run would need hides in
an object. An algorithm lives in one file that holds both halves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from jdfl_lightning.messages import FitResult, FitTask
from jdfl_lightning.tensors import Record, Tensors


class LocalUpdate(pl.Callback):
    """An algorithm's client half, alive for one `Trainer.fit`. As it stands: plain local SGD.

    Args:
        task: what the server sent.
        state: what this client kept from its last participation.
    """

    def __init__(self, task: FitTask, state: Record) -> None:
        self.task = task
        self.state = state
        self._loss_sum: Tensor | float = 0.0
        self._num_seen = 0

    def correct(self, params: Tensors) -> None:
        """Change the gradients in place; called once for each optimizer step, after unscaling, before clipping."""

    def loss(self, task_loss: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Return what the training step minimises."""
        return task_loss

    def report(self, weights: Tensors, num_steps: int) -> tuple[Record, Record]:
        """Return (upload, new state) after a fit that ended at these weights."""
        return {}, self.state

    @property
    def mean_loss(self) -> float:
        """Mean training loss over all samples of the fit."""
        return float(self._loss_sum) / max(self._num_seen, 1)

    def on_before_optimizer_step(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        optimizer: Optimizer,
    ) -> None:
        """Call `correct` with the trainable parameters."""
        if type(self).correct is not LocalUpdate.correct:
            self.correct({name: param for name, param in pl_module.named_parameters() if param.requires_grad})

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Add up the loss without waiting for the device."""
        size = len(batch[1])
        self._loss_sum = self._loss_sum + outputs["loss"].detach().double() * size
        self._num_seen += size


@dataclass(frozen=True)
class Algorithm(ABC):
    """A federated optimizer's hyper-parameters and server half."""

    weighting: Literal["samples", "uniform"] = "samples"
    """Weight of a client in averages: its number of samples, or the same for all."""

    def init_server(self, weights: Tensors) -> Record:
        """Return the server's record before the first round."""
        return {}

    def init_client(self, weights: Tensors) -> Record:
        """Return a client's state before its first participation."""
        return {}

    def broadcast(self, server: Record) -> Record:
        """Return what of the server's record goes to the clients."""
        return server

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        """Return the client half for one fit."""
        return LocalUpdate(task, state)

    @abstractmethod
    def aggregate(
        self, weights: Tensors, server: Record, results: Iterable[FitResult], num_clients: int
    ) -> tuple[Tensors, Record]:
        """Return the new weights and server record.

        Args:
            weights: theta, as it was sent out.
            server: the server's record.
            results: the participants' answers in the order of their ids, each to be used as it comes and let go.
            num_clients: N, participants or not.
        """

    def client_weight(self, result: FitResult) -> float:
        """Return the weight of a participant in an average over participants."""
        return float(result.num_examples) if self.weighting == "samples" else 1.0
