"""What a federated optimizer is: a server half and a client half, both without state of their own.

Everything an algorithm remembers goes in and comes out as a `Record`; nothing that a resumed run would need hides in
an object. An algorithm lives in one file that holds both halves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from jdfl_lightning.core.errors import require, require_types
from jdfl_lightning.core.messages import FitResult, FitTask, RoundContext
from jdfl_lightning.core.seeding import sample_clients
from jdfl_lightning.core.tensors import Record, Tensors, norm

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


class LocalUpdate(pl.Callback):
    """An algorithm's client half, alive for one `Trainer.fit`. As it stands: plain local SGD.

    Args:
        task: what the server sent.
        state: what this client kept from its last participation.
    """

    def __init__(self, task: FitTask, state: Record) -> None:
        self.task = task
        self.state = state
        self.num_steps = 0
        """K, optimizer steps really taken; a gradient scaler skips some."""
        self.lr_sum = 0.0
        """Sum of the learning rates of these steps: K * lr, if the rate is constant."""
        self._params: Tensors = {}
        self._loss_sum: Tensor | float = 0.0
        self._num_seen = 0

    def begin(self, params: Tensors) -> None:
        """Make ready what `correct` needs, where the parameters are; called once, before the first step."""

    def correct(self, params: Tensors) -> None:
        """Change the gradients in place; called once for each optimizer step, after unscaling, before clipping."""

    def loss(self, task_loss: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Return what the training step minimises."""
        return task_loss

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        """Return (upload, new state) after a fit that ended at these weights."""
        return {}, self.state

    @property
    def mean_loss(self) -> float:
        """Mean training loss over all samples of the fit."""
        return float(self._loss_sum) / max(self._num_seen, 1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Call `begin` with the trainable parameters."""
        self._params = {name: param for name, param in pl_module.named_parameters() if param.requires_grad}
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._count_step)
        self.begin(self._params)

    def _count_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.num_steps += 1
        self.lr_sum += optimizer.param_groups[0]["lr"]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Call `correct`; a parameter that the loss does not reach has a gradient of zero, whatever the algorithm."""
        for param in self._params.values():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        with torch.no_grad():
            self.correct(self._params)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add up the loss without waiting for the device."""
        size = len(batch[1])
        self._loss_sum = self._loss_sum + outputs["loss"].detach().float() * size
        self._num_seen += size


@dataclass(frozen=True)
class Algorithm(ABC):
    """A federated optimizer's hyper-parameters and server half."""

    weighting: Literal["samples", "uniform"] = "samples"
    """Weight of a client: its number of samples, or the same for all."""

    allows_momentum: ClassVar[bool] = True
    """Whether local momentum is sound with this algorithm's corrections."""
    has_schedule: ClassVar[bool] = False
    """Whether a round depends on how many there will be, so that a run cannot be made longer afterwards."""
    allows_discovery: ClassVar[bool] = True
    """Whether Phase 1 may look at every client's update."""
    allows_buffers: ClassVar[bool] = True
    """Whether clients may send more of their network than trained weights: running statistics, frozen parameters."""
    tells_weights: ClassVar[bool] = True
    """Whether a client is told w_i, its share of all images; else every one is told 1."""
    may_be_empty: ClassVar[bool] = False
    """Whether a round that nobody answers is aggregated, instead of void and repeated."""
    keeps_best: ClassVar[bool] = True
    """Whether a run keeps the weights of its best round beside those of its last."""

    def __post_init__(self) -> None:
        require_types(self, "--algorithm.")

    def check_settings(self, experiment: Experiment) -> None:
        """Raise an `InputError` if a run's settings are not sound with this algorithm; called when they are made."""
        name, momentum, supervision = type(self).__name__, experiment.momentum, experiment.supervision
        sound = self.allows_momentum or momentum == 0
        require(sound, "--momentum", f"0 with {name}, whose correction it would amplify,", momentum)
        sound = self.allows_discovery or supervision == "base"
        why = "as discovery looks at every client's update"
        require(sound, "--supervision", f"base with {name}, {why},", supervision)

    def check_run(self, experiment: Experiment, buffers: Tensors) -> None:
        """Raise an `InputError` if a run cannot begin; called when its network is known, before it has a folder.

        Args:
            experiment: the run's settings.
            buffers: what the network has beside trained weights.
        """
        without = f"without running statistics, other buffers and frozen parameters with {type(self).__name__}"
        require(self.allows_buffers or not buffers, "--backbone", without, experiment.backbone)

    def init_server(self, weights: Tensors) -> Record:
        """Return the server's record before the first round."""
        return {}

    def init_client(self, weights: Tensors) -> Record:
        """Return a client's state before its first participation."""
        return {}

    def state_groups(self, weights: Tensors) -> Iterable[str]:
        """Return the names of the groups in a client's state after a fit: a site may tell their norms, and no others.

        Args:
            weights: tensors without values (device ``meta``).
        """
        return self.init_client(weights)

    def broadcast(self, server: Record) -> Record:
        """Return what of the server's record goes to the clients."""
        return server

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        """Return the client half for one fit."""
        return LocalUpdate(task, state)

    def sample(self, server: Record, context: RoundContext) -> list[int]:
        """Return the ids of the clients that take part in a round, sorted."""
        return sample_clients(context.num_clients, context.asked, context.seed, context.number, context.attempt)

    def upload_form(self, weights: Tensors, server: Record, num_classes: int) -> Record:
        """Declare what a client uploads beside its weights: the names, shapes and types; values do not matter.

        An answer with any other upload is refused. All arguments are tensors without values (device ``meta``), and so
        may be what is returned.

        Args:
            weights: as the difference of the weights after a fit and before it: their shapes, and its type.
            server: what the clients were sent (`broadcast`).
            num_classes: C; the head has M x C outputs.
        """
        return {}

    def reason_unusable(self, upload: Record) -> str | None:
        """Return what is impossible about an upload of the declared form and finite values; nothing if all is well."""
        return None

    @abstractmethod
    def aggregate(
        self, weights: Tensors, server: Record, results: Iterable[FitResult], context: RoundContext
    ) -> tuple[Tensors, Record]:
        """Return the new weights and server record.

        Args:
            weights: theta, as it was sent out.
            server: the server's record.
            results: the participants' answers in the order of their ids, each to be used as it comes and let go.
            context: the round's number, the number of all clients, and so on.
        """

    def metrics(self, server: Record, context: RoundContext) -> dict[str, float]:
        """Return numbers to log after a round, by name: the norms of the server's record."""
        return {f"norm/server/{group}": norm(tensors) for group, tensors in server.items()}

    def other_models(self, weights: Tensors, server: Record) -> dict[str, Tensors]:
        """Return further models that are worth evaluating after a round, by name."""
        return {}
