"""Many small clients at once: their networks are stacked, and a step is one operation over all of them.

The steps are those of `fit_client`: the same batches, targets, corrections and rates. Sums run in another order, as one
product of stacked matrices replaces many products, so that weights agree to rounding and not to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from jdfl_lightning.algorithms import LocalUpdate
from jdfl_lightning.client.fit import LocalFit, Workspace
from jdfl_lightning.client.loop import has_known_hooks
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.client.stacked import (
    StackedBatches,
    StackedClient,
    have_plain_losses,
    losses_one_by_one,
    losses_together,
)
from jdfl_lightning.core.errors import InputError, last_line, require
from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.tensors import Tensors, zeros_like

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


def fit_stack(workspace: Workspace, fits: Sequence[LocalFit]) -> list[Tensors]:
    """Train clients together.

    Args:
        workspace: this process's data and module.
        fits: the clients' fits, all of one round.

    Returns:
        The trained parameters of each, in the order of the fits.
    """
    num_steps = [fit.epochs * len(fit.loader) for fit in fits]
    order = sorted(range(len(fits)), key=lambda place: -num_steps[place])  # those that still train come first
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
        clients.append(StackedClient(fit, params, module, num_steps[order[place]], _order(fit)))
        clients[-1].hook("on_train_start")
    optimizer, head_lr = workspace.experiment.local_optimizer, workspace.experiment.head_lr
    rates = _rates(optimizer, values, members[0].lr_factor, head_lr)
    momentum, decay = float(optimizer.argument("momentum")), float(optimizer.argument("weight_decay"))
    sent = workspace.sent(values)
    told = {name: rates[name] for name in sent}
    corrects = type(members[0].update).correct is not LocalUpdate.correct and bool(sent)
    alike = have_plain_losses(members)
    losses = torch.zeros(len(members))
    for step in range(clients[0].num_steps):
        active = [client for client in clients if step < client.num_steps]
        size = len(active)
        batches = StackedBatches.take(active)
        live = {name: value[:size].detach().requires_grad_() for name, value in values.items()}
        found, loss = _gradients(module, batches, live, step, alike)
        losses[:size] += loss.float() * torch.tensor(batches.sizes)
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
    for client, weights, total in zip(clients, trained, losses.tolist(), strict=True):
        if not client.has("on_train_batch_end", LocalUpdate):
            client.fit.update.count_loss(total, client.fit.epochs * len(client.fit.loader.indices))
        terms = client.fit.terms.values()
        if terms or client.has("on_train_end"):
            module = workspace.module(weights, client.fit.buffers).train()
            client.hook("on_train_end", module=module)
            for term in terms:
                term.finish(module.backbone, module.head, client.fit.loader)
    return [weights for _, weights in sorted(zip(order, trained, strict=True), key=lambda pair: pair[0])]


def _order(fit: LocalFit) -> Iterator[Tensor]:
    for _ in range(fit.epochs):
        yield from fit.loader.order()


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
    below = {n.removeprefix("backbone."): value for n, value in params.items() if n.startswith("backbone.")}
    if below:
        features = vmap(lambda own, batch: functional_call(module.backbone, own, (batch,)))(below, images)
    else:  # the same for all
        features = module.backbone(images.flatten(0, 1)).unflatten(0, images.shape[:2])
    return features, torch.bmm(features, params["head.weight"].mT) + params["head.bias"].unsqueeze(1)


def _gradients(
    module: JointModule, batches: StackedBatches, live: Tensors, step: int, alike: bool
) -> tuple[Tensors, Tensor]:
    """Return the stacked gradients of the clients' losses on their batches, and these losses.

    Args:
        module: the network.
        batches: the batches.
        live: the stacked parameters.
        step: number of the step.
        alike: whether no client's loss is changed by its algorithm.
    """
    for place, client in enumerate(batches.clients):
        if client.has("on_train_batch_start"):
            client.hook("on_train_batch_start", batches.of(place), step)
    features, logits = _forward(module, live, batches.inputs)
    losses = losses_together(batches, logits) if alike else losses_one_by_one(module, batches, features, logits)
    found = torch.autograd.grad(losses.sum(), list(live.values()))
    losses = losses.detach()
    for place, client in enumerate(batches.clients):
        if client.has("on_train_batch_end", LocalUpdate):
            client.hook("on_train_batch_end", {"loss": losses[place]}, batches.of(place), step)
    return dict(zip(live, found, strict=True)), losses
