"""Many small clients at once: their networks are stacked, and a step is one operation over all of them.

The steps are those of `fit_client`: the same batches, targets, corrections and rates. Sums run in another order, as one
product of stacked matrices replaces many products, so that weights agree to rounding and not to the bit.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import pad_sequence

from jdfl_lightning.algorithms import LocalUpdate
from jdfl_lightning.client.fit import LocalFit, Workspace
from jdfl_lightning.client.loop import has_known_hooks
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.core.errors import InputError, last_line, require
from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.tensors import Tensors, zeros_like
from jdfl_lightning.data.loader import BatchLoader
from jdfl_lightning.joint import PlainTargets, TargetRule
from jdfl_lightning.joint.loss import soft_target_kl
from jdfl_lightning.regularizers import Step

_OWN = "jdfl_lightning."
_SGD_ARGUMENTS = {"lr", "momentum", "weight_decay"}


def check_stackable(workspace: Workspace) -> None:
    """Raise an `InputError` that says why the clients of a run cannot be trained together, if they cannot."""
    experiment = workspace.experiment
    optimizer = experiment.local_optimizer
    plain = optimizer.load() is torch.optim.SGD and set(optimizer.init_args) <= _SGD_ARGUMENTS
    parts = experiment.regularizers
    name = type(experiment.algorithm).__name__
    reasons = {
        f"{name} trains parts of the network in turn": not experiment.algorithm.allows_stack,
        "--optimizer is not SGD with lr, momentum and weight_decay": not plain,
        "--lr_scheduler changes the rate within a fit": experiment.lr_scheduler is not None,
        "--model may do anything in a step": experiment.model is not None,
        "an option of --trainer is set, or it is not on a CPU": not experiment.trainer.are_plain,
        "--data.augment draws random numbers for one client after the other": bool(experiment.data.augment),
        "--regularizers has a class of your own": any(not type(part).__module__.startswith(_OWN) for part in parts),
    }
    for reason, holds in reasons.items():
        require(not holds, "--backend", f"LocalBackend or PoolBackend, as {reason},", "VectorBackend")
    weights, buffers = workspace.initial(1)
    module = workspace.module(weights, buffers).train()
    images = next(iter(workspace.data.test_dataloader()))[0][:2]
    try:
        _forward(module, {name: tensor.expand(2, *tensor.shape) for name, tensor in weights.items()}, images[:, None])
    except Exception as error:  # what cannot be vectorised raises different errors
        raise InputError(
            f"Expected a network whose copies can be stacked with VectorBackend (no BatchNorm, no dropout) but "
            f"{experiment.backbone} cannot be: {last_line(str(error))}"
        ) from error


def can_be_stacked(fit: LocalFit) -> bool:
    """Return whether a fit needs nothing between its steps: no hook of the user's, no report after every epoch."""
    return has_known_hooks(fit.update) and not fit.task.every_epoch


@dataclass
class _Client:
    """A client of the stack; it stands in for Trainer and module where an algorithm's hooks expect them."""

    fit: LocalFit
    params: Tensors
    """Views of its part of the stack, with gradients that are views too."""
    module: JointModule
    batches: Iterator[Sequence[Tensor]]
    accumulate_grad_batches: int = 1
    optimizers: tuple[()] = ()

    @property
    def train_dataloader(self) -> BatchLoader:
        """The client's batches."""
        return self.fit.loader

    @cached_property
    def backbone(self) -> nn.Module:
        """The network below the head, as it was before the fit; a hook on it is not called."""
        own = copy.copy(self.module.backbone)
        if self.module.private:
            own = copy.deepcopy(own)
            tensors = {**self.fit.weights, **self.fit.buffers}
            below = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}
            own.load_state_dict({name: below[name] for name in own.state_dict()})
        own._forward_pre_hooks = OrderedDict()
        return own

    @property
    def private(self) -> frozenset[str]:
        """Names of what the client keeps."""
        return self.module.private

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the client's own parameters."""
        yield from self.params.items()

    def hook(self, name: str, *details: Any, module: pl.LightningModule | None = None) -> None:
        """Call a hook of the algorithm, unless it does nothing."""
        if getattr(type(self.fit.update), name) is not getattr(pl.Callback, name):
            getattr(self.fit.update, name)(cast(Any, self), cast(Any, module or self), *details)


def fit_stack(workspace: Workspace, fits: Sequence[LocalFit]) -> list[Tensors]:
    """Train clients together.

    Args:
        workspace: this process's data and module.
        fits: the clients' fits, all of one round.

    Returns:
        The trained parameters of each, in the order of the fits.
    """
    order = sorted(range(len(fits)), key=lambda place: -_num_steps(fits[place]))  # those that still train come first
    members = [fits[place] for place in order]
    module = workspace.module(members[0].weights, members[0].buffers).train()
    values = {name: torch.stack([fit.weights[name] for fit in members]) for name in members[0].weights}
    gradients = zeros_like(values)
    velocities: Tensors = {}
    clients = []
    for place, fit in enumerate(members):
        params = {name: value[place].requires_grad_() for name, value in values.items()}
        for name, param in params.items():
            param.grad = gradients[name][place]
        clients.append(_Client(fit, params, module, _batches(fit)))
        clients[-1].hook("on_train_start")
    optimizer, head_lr = workspace.experiment.local_optimizer, workspace.experiment.head_lr
    rates = _rates(optimizer, values, members[0].lr_factor, head_lr)
    momentum, decay = float(optimizer.argument("momentum")), float(optimizer.argument("weight_decay"))
    sent = workspace.sent(values)
    told = {name: rates[name] for name in sent}
    corrects = type(members[0].update).correct is not LocalUpdate.correct and bool(sent)
    for step in range(_num_steps(members[0])):
        active = [client for client in clients if step < _num_steps(client.fit)]
        size = len(active)
        found = _gradients(module, active, {name: value[:size] for name, value in values.items()}, step)
        with torch.no_grad():
            for name, gradient in found.items():
                gradients[name][:size] = gradient
            if corrects:
                for client in active:
                    client.fit.update.correct(workspace.sent(client.params))
            for name, value in values.items():
                change = gradients[name][:size]
                if decay:
                    change = change.add(value[:size], alpha=decay)
                if momentum:
                    change = _add_velocity(velocities, name, change, momentum)
                value[:size].add_(change, alpha=-rates[name])
        for client in active:
            client.fit.update.count_step(told)
    trained = [{name: value[place].clone() for name, value in values.items()} for place in range(len(members))]
    for client, weights in zip(clients, trained, strict=True):
        terms = client.fit.terms.values()
        if terms or type(client.fit.update).on_train_end is not pl.Callback.on_train_end:
            module = workspace.module(weights, client.fit.buffers).train()
            client.hook("on_train_end", module=module)
            for term in terms:
                term.finish(module.backbone, module.head, client.fit.loader)
    return [trained[order.index(place)] for place in range(len(fits))]


def _num_steps(fit: LocalFit) -> int:
    return fit.epochs * len(fit.loader)


def _batches(fit: LocalFit) -> Iterator[Sequence[Tensor]]:
    for _ in range(fit.epochs):
        yield from fit.loader


def _rates(optimizer: Part, params: Mapping[str, Tensor], factor: float, head_lr: float) -> dict[str, float]:
    """Return the learning rate of each parameter, as `JointModule.configure_optimizers` sets it."""
    lr = float(optimizer.argument("lr"))
    return {name: lr * ((head_lr if name.startswith("head.") else 1.0) * factor) for name in params}


def _add_velocity(velocities: Tensors, name: str, gradient: Tensor, momentum: float) -> Tensor:
    """Return the velocity after a step: momentum times the one before it, plus the gradient."""
    if name not in velocities:
        velocities[name] = gradient.clone()
    else:
        velocities[name] = velocities[name][: len(gradient)].mul_(momentum).add_(gradient)
    return velocities[name]


def _forward(module: JointModule, params: Mapping[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """Return features (K, B, F) and logits (K, B, M*C) of stacked parameters and images (K, B, ...)."""

    def one(own: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, Tensor]:
        below = {n.removeprefix("backbone."): value for n, value in own.items() if n.startswith("backbone.")}
        features = functional_call(module.backbone, below, (batch,))
        return features, functional_call(module.head, {n: own[f"head.{n}"] for n in ("weight", "bias")}, (features,))

    features, logits = vmap(one)(dict(params), images)
    return features, logits


def _gradients(module: JointModule, active: Sequence[_Client], values: Tensors, step: int) -> Tensors:
    """Return the stacked gradients of the clients' losses on their next batches."""
    batches = [next(client.batches) for client in active]
    for client, batch in zip(active, batches, strict=True):
        client.hook("on_train_batch_start", batch, step)
    live = {name: value.detach().requires_grad_() for name, value in values.items()}
    features, logits = _forward(module, live, pad_sequence([batch[0] for batch in batches], batch_first=True))
    alike = all(_has_plain_loss(client.fit) for client in active)
    losses = (_losses_together if alike else _losses_one_by_one)(module, active, batches, features, logits)
    found = torch.autograd.grad(losses.sum(), list(live.values()))
    for client, batch, loss in zip(active, batches, losses.detach(), strict=True):
        client.hook("on_train_batch_end", {"loss": loss}, batch, step)
    return dict(zip(live, found, strict=True))


def _has_plain_loss(fit: LocalFit) -> bool:
    """Return whether a client's loss is that of a table of targets, unchanged by its algorithm."""
    plain = type(fit.update).loss is LocalUpdate.loss and not fit.terms
    return plain and (fit.targets is None or type(fit.targets) is TargetRule)


def _weights(client: _Client, batch: Sequence[Tensor], logits: Tensor | None = None) -> Tensor:
    rule = client.fit.targets if client.fit.targets is not None else PlainTargets()
    weights: Tensor = rule(batch[2], client.fit.generator, logits, batch[1])
    return weights


def _losses_together(
    module: JointModule,
    active: Sequence[_Client],
    batches: Sequence[Sequence[Tensor]],
    features: Tensor,
    logits: Tensor,
) -> Tensor:
    """Return the mean loss of every client's batch; rows that only fill up a batch have no mass and no loss."""
    pairs = zip(active, batches, strict=True)
    weights = pad_sequence([_weights(client, batch) for client, batch in pairs], batch_first=True)
    labels = pad_sequence([batch[1] for batch in batches], batch_first=True)
    each = soft_target_kl(logits.flatten(0, 1), weights.flatten(0, 1), labels.flatten()).view(labels.shape)
    return each.sum(dim=1) / torch.tensor([len(batch[1]) for batch in batches])


def _losses_one_by_one(
    module: JointModule,
    active: Sequence[_Client],
    batches: Sequence[Sequence[Tensor]],
    features: Tensor,
    logits: Tensor,
) -> Tensor:
    """Return the loss of every client's batch, as `JointModule.training_step` computes it."""
    losses = []
    for client, batch, all_features, all_logits in zip(
        active, batches, features.unbind(), logits.unbind(), strict=True
    ):
        labels, size = batch[1], len(batch[1])
        own, given = all_logits[:size], all_features[:size]
        weights = _weights(client, batch, own.detach())
        loss = client.fit.update.loss(module.task_loss(own, weights, labels), given, labels)
        for term in client.fit.terms.values():
            loss = loss + term(Step(module.head, own, given, labels, weights))
        losses.append(loss)
    return torch.stack(losses)
