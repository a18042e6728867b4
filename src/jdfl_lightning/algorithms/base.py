"""The interface of a federated optimizer: a server side and a client side, both stateless.

All state of an algorithm is passed in and returned as a `Record`, so that a run can be resumed. An algorithm is one
file with both sides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from jdfl_lightning.core.errors import PublicError, require, require_types
from jdfl_lightning.core.messages import FitResult, FitTask, RoundContext
from jdfl_lightning.core.seeding import sample_clients
from jdfl_lightning.core.tensors import Record, Tensors, grads, norm, pull

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


SECOND = ("personal", "personal_buffers")
"""Groups of a client's state with its second model: parameters, and running statistics."""


class LocalUpdate(pl.Callback):
    """The client side of an algorithm, for one `Trainer.fit`. This base class is plain local SGD.

    Args:
        task: what the server sent.
        state: what this client kept from its last participation.
    """

    needs_plain_sgd: ClassVar[bool] = False
    """Whether the formulas hold only for SGD without momentum."""
    stacks: ClassVar[bool] = True
    """Whether `begin` and `report` also serve K clients, the first dimension, at once; a subclass says it itself."""

    def __init__(self, task: FitTask, state: Record) -> None:
        self.task = task
        self.state = state
        self.weight: float | Tensor = task.weight
        """w_i; of K clients at once (K,)."""
        self.num_steps = 0
        """K, optimizer steps taken; a gradient scaler may skip some."""
        self.lr_sums: dict[str, Any] = {}
        """For each parameter, the sum of its learning rates over these steps: K * lr, if the rate is constant."""
        self.anchors: list[Tensor] = []
        """Set by `begin`: for each parameter, the point that `correct` pulls it to; none if it does not."""
        self.strength = 0.0
        """How strongly `correct` pulls the parameters to their anchors."""
        self.shift: list[Tensor] = []
        """Set by `begin`: for each parameter, what `correct` adds to its gradient; none if it adds nothing."""
        self._params: Tensors = {}
        self._private: Tensors = {}
        """The trainable parameters that the client keeps; no algorithm corrects them."""
        self._names: dict[int, str] = {}
        self._loss_sum: Tensor | float = 0.0
        self._num_seen = 0

    def begin(self, params: Tensors) -> None:
        """Prepare what `correct` needs, on the device of the parameters; called once, before the first step."""

    def correct(self, params: Tensors) -> None:
        """Change the gradients in place; called once for each optimizer step, after unscaling, before clipping.

        Here: add ``strength * (parameter - anchor) + shift``, which `VectorBackend` does for all clients at once.
        """
        if self.anchors:
            pull(params, self.anchors, self.strength)
        if self.shift:
            torch._foreach_add_(grads(params), self.shift)

    def loss(self, task_loss: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Return the loss that the training step minimises."""
        return task_loss

    @staticmethod
    def losses(
        updates: Sequence[Any], task_losses: Tensor, features: Tensor, labels: Tensor, present: Tensor
    ) -> Tensor:
        """Return the losses of several clients' steps, as `loss` does for one; called by `VectorBackend`.

        Args:
            updates: the clients' sides of the algorithm, K of them.
            task_losses: (K,).
            features: (K, B, F).
            labels: (K, B).
            present: whether a place holds a sample (K, B): the first ones of a row.
        """
        each = zip(updates, task_losses.unbind(), present.sum(dim=1).tolist(), strict=True)
        return torch.stack(
            [own.loss(loss, features[k, :size], labels[k, :size]) for k, (own, loss, size) in enumerate(each)]
        )

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        """Return (upload, new state) after a fit that ended at these weights."""
        return {}, self.state

    @property
    def mean_loss(self) -> float:
        """Mean training loss over all samples of the fit."""
        return float(self._loss_sum) / max(self._num_seen, 1)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Call `begin` with the trainable parameters that are sent."""
        private = getattr(pl_module, "private", ())
        known = getattr(pl_module, "live", None)  # to walk through a network takes long
        trained = known[0] if known else {n: p for n, p in pl_module.named_parameters() if p.requires_grad}
        sent = self.task.weights.keys() - {*private}  # a target rule or a regularizer may have parameters too
        self._params = {name: param for name, param in trained.items() if name in sent}
        self._private = {name: param for name, param in trained.items() if name in private}
        self._names = {id(param): name for name, param in self._params.items()}
        self.lr_sums = dict.fromkeys(self._params, 0.0)
        for optimizer in trainer.optimizers:
            if self.needs_plain_sgd and not _is_plain_sgd(optimizer):
                name = type(optimizer).__name__
                raise PublicError(f"Expected plain SGD, as the algorithm's formulas assume, but the model uses {name}.")
            optimizer.register_step_post_hook(self._count_step)
        self.begin(self._params)
        corrects = self.anchors or self.shift or type(self).correct is not LocalUpdate.correct or self.needs_plain_sgd
        if corrects and len(trainer.optimizers) > 1:
            raise PublicError(
                f"Expected one optimizer, as {type(self).__name__} corrects all gradients before its step, but the "
                f"model has {len(trainer.optimizers)}."
            )

    def _count_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        ours = [(param, group["lr"]) for group in optimizer.param_groups for param in group["params"]]
        self.count_step({self._names[id(param)]: float(rate) for param, rate in ours if id(param) in self._names})

    def count_step(self, rates: Mapping[str, float]) -> None:
        """Count a step of the optimizer, with the learning rate of each parameter."""
        self.num_steps += 1
        for name, rate in rates.items():
            self.lr_sums[name] += rate

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Call `correct`; a parameter without a gradient gets a gradient of zero first."""
        for param in self._params.values():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        if self._params:
            with torch.no_grad():
                self.correct(self._params)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sum the loss without synchronising the device."""
        if not outputs:  # the model has skipped the batch
            return
        size = len(batch[1])
        batches = trainer.accumulate_grad_batches  # Lightning divides the loss by this
        self.count_loss(outputs["loss"].detach().float() * (size * batches), size)

    def count_loss(self, total: Tensor | float, samples: int) -> None:
        """Add the sum of the losses of some samples to those of the fit."""
        self._loss_sum = self._loss_sum + total
        self._num_seen += samples


def _is_plain_sgd(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups)


@dataclass(frozen=True)
class Algorithm(ABC):
    """A federated optimizer's hyper-parameters and server side."""

    weighting: Literal["samples", "uniform"] = "samples"
    """Weight of a client: its number of samples, or the same for all."""

    allows_momentum: ClassVar[bool] = True
    """Whether clients may use momentum or another optimizer than SGD: it may amplify this algorithm's corrections."""
    has_schedule: ClassVar[bool] = False
    """Whether a round depends on the total number of rounds, so that a run cannot be extended."""
    allows_discovery: ClassVar[bool] = True
    """Whether the server may see every client's update in Phase 1."""
    allows_buffers: ClassVar[bool] = True
    """Whether clients may send more than trained weights: running statistics, frozen parameters."""
    tells_weights: ClassVar[bool] = True
    """Whether the server sends a client its w_i, its share of all images; else it sends 1."""
    may_be_empty: ClassVar[bool] = False
    """Whether a round without any answer is aggregated instead of repeated."""
    keeps_best: ClassVar[bool] = True
    """Whether a run keeps the weights of its best round besides those of its last."""
    by_domain: ClassVar[bool] = False
    """Whether the server has a model for each pseudo-domain (`model_of`), for which it needs Phase 1."""
    has_second_model: ClassVar[bool] = False
    """Whether a client trains a second model of its own (`second`)."""
    allows_stack: ClassVar[bool] = True
    """Whether `VectorBackend` can train its clients together."""

    def __post_init__(self) -> None:
        require_types(self, "--algorithm.")

    def check_settings(self, experiment: Experiment) -> None:
        """Raise an `InputError` if a run's settings do not work with this algorithm; called when they are made."""
        name, optimizer, supervision = type(self).__name__, experiment.local_optimizer, experiment.supervision
        momentum = optimizer.argument("momentum")
        why = "which its formulas assume"
        require(
            self.allows_momentum or optimizer.load() is SGD, "--optimizer", f"SGD with {name}, {why},", optimizer.name
        )
        sound = self.allows_momentum or momentum == 0
        require(sound, "--momentum", f"0 with {name}, whose correction it would amplify,", momentum)
        sound = self.allows_discovery or not experiment.needs_discovery
        why = "as discovery looks at every client's update"
        require(sound, "--supervision", f"base with {name}, {why},", supervision.name)

    def check_run(self, experiment: Experiment, buffers: Tensors) -> None:
        """Raise an `InputError` if a run cannot begin; called when its network is known, before it has a folder.

        Args:
            experiment: the run's settings.
            buffers: the network's tensors besides the trained weights.
        """
        without = f"without running statistics, other buffers and frozen parameters with {type(self).__name__}"
        require(self.allows_buffers or not buffers, "--backbone", without, experiment.backbone)

    def init_server(self, weights: Tensors) -> Record:
        """Return the server's record before the first round."""
        return {}

    def init_models(self, weights: Tensors, buffers: Tensors, num_domains: int) -> Record:
        """Return what the server's record has besides at the start if it has a model for each pseudo-domain."""
        return {}

    def init_client(self, weights: Tensors) -> Record:
        """Return a client's state before its first participation."""
        return {}

    def state_groups(self, weights: Tensors) -> Iterable[str]:
        """Return the names of the groups in a client's state after a fit; only their norms may be reported by a site.

        Args:
            weights: tensors without values (device ``meta``).
        """
        return self.init_client(weights)

    def broadcast(self, server: Record) -> Record:
        """Return the part of the server's record that is sent to clients."""
        return server

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        """Return the client side for one fit."""
        return LocalUpdate(task, state)

    def second(self, task: FitTask, state: Record) -> LocalUpdate | None:
        """Return the client side of the fit of a client's second model, which follows the first fit; None if none.

        The model is in the groups `SECOND` of the client's state; it begins as the model that was sent.
        """
        return None

    def model_of(self, weights: Tensors, buffers: Tensors, server: Record, domain: int) -> tuple[Tensors, Tensors]:
        """Return the weights and buffers that a client of a pseudo-domain is sent."""
        return weights, buffers

    def sample(self, server: Record, context: RoundContext) -> list[int]:
        """Return the ids of the clients that take part in a round, sorted."""
        return sample_clients(context.num_clients, context.asked, context.seed, context.number, context.attempt)

    def upload_form(self, weights: Tensors, server: Record, num_classes: int) -> Record:
        """Declare what a client uploads besides its weights: names, shapes and types; values do not matter.

        An answer with any other upload is refused. All arguments are tensors without values (device ``meta``), and the
        returned tensors may be too.

        Args:
            weights: have the shapes and the type of the update (weights after a fit minus weights before it).
            server: the record sent to clients (`broadcast`).
            num_classes: C; the head has M x C outputs.
        """
        return {}

    def reason_unusable(self, upload: Record) -> str | None:
        """Return why an upload of the declared form and finite values is impossible; None if it is not."""
        return None

    @abstractmethod
    def aggregate(
        self, weights: Tensors, server: Record, results: Iterable[FitResult], context: RoundContext
    ) -> tuple[Tensors, Record]:
        """Return the new weights and server record.

        Args:
            weights: theta, as sent to the clients.
            server: the server's record.
            results: the participants' answers in the order of their ids; use each as it comes and keep none.
            context: the round's number, the number of all clients, and so on.
        """

    def metrics(self, server: Record, context: RoundContext) -> dict[str, float]:
        """Return numbers to log after a round, by name: the norms of the server's record."""
        return {f"norm/server/{group}": norm(tensors) for group, tensors in server.items()}

    def other_models(self, weights: Tensors, server: Record) -> dict[str, Tensors]:
        """Return further models to evaluate after a round, by name."""
        return {}
