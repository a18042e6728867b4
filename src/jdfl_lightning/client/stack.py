"""Many small clients at once: their networks are stacked, and a step is one operation over all of them.

The steps are those of `fit_client`: the same batches, targets, corrections and rates. Sums run in another order, as one
product of stacked matrices replaces many products, so that weights agree to rounding and not to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from jdfl_lightning.algorithms import LocalUpdate
from jdfl_lightning.client.fit import LocalFit, Workspace
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.client.stacked import (
    BatchPlan,
    StackedBatches,
    StackedClient,
    StackedCorrection,
    StackedTargets,
    stacked_losses,
)
from jdfl_lightning.client.together import report_together, rows_of, stacked_update
from jdfl_lightning.core.errors import InputError, last_line, require
from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.tensors import Tensors, digest_tensors, zeros_like
from jdfl_lightning.models import Backbone

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
    known = [
        (layer, {n: b if b is None else b.clone() for n, b in layer._buffers.items()}) for layer in module.modules()
    ]
    images = next(iter(workspace.data.test_dataloader()))[0][:2]
    before = digest_tensors(dict(module.named_buffers()))
    stacked = {name: tensor.expand(2, *tensor.shape) for name, tensor in weights.items()}
    wanted = "Expected a network whose copies can be stacked with VectorBackend (no BatchNorm, no dropout)"
    try:
        _forward(module, stacked, images[:, None])
        changed = digest_tensors(dict(module.named_buffers())) != before
    except Exception as error:  # what cannot be vectorised raises different errors
        raise InputError(f"{wanted} but {experiment.backbone} cannot be: {last_line(str(error))}") from error
    finally:
        for layer, own in known:  # what was tried leaves nothing in it
            layer._buffers.update(own)
    if changed:
        raise InputError(f"{wanted} but {experiment.backbone} changes its buffers in training.")


def fit_stack(workspace: Workspace, fits: Sequence[LocalFit]) -> list[Tensors]:
    """Train clients together.

    Args:
        workspace: this process's data and module.
        fits: the clients' fits, all of one round; they get the algorithm's reports if it makes them for all at once.

    Returns:
        The trained parameters of each, in the order of the fits.
    """
    order = sorted(range(len(fits)), key=lambda place: -fits[place].num_steps)  # those that still train come first
    members = [fits[place] for place in order]
    updates = [fit.update for fit in members]
    module = workspace.module(members[0].weights, members[0].buffers).train()
    values = {name: torch.stack([fit.weights[name] for fit in members]) for name in members[0].weights}
    sent = workspace.sent(values)
    together = stacked_update(updates)
    kinds = {type(update) for update in updates}
    own_correct = bool(sent) and (len(kinds) > 1 or any(kind.correct is not LocalUpdate.correct for kind in kinds))
    gradients = zeros_like(values) if own_correct else {}
    clients: list[StackedClient] = []
    views: list[dict[str, Tensor | None]] = []
    for place, fit in enumerate(members):
        params = {} if together else {name: value[place].requires_grad_() for name, value in values.items()}
        for name, stacked in gradients.items():
            params[name].grad = stacked[place]
        views.append({name: params[name].grad for name in gradients})
        clients.append(StackedClient(fit, params, module))
        if together is None:
            clients[-1].hook("on_train_start")
        else:
            fit.update.lr_sums = dict.fromkeys(sent, 0.0)
    if together is not None:
        together.begin(sent)
    plan = BatchPlan(members)
    targets = StackedTargets(members, plan)
    correction = None if own_correct else StackedCorrection(updates, sent, together)
    steps = _Steps(workspace.experiment.local_optimizer, values, members[0].lr_factor, workspace.experiment.head_lr)
    told = {name: steps.rates[name] for name in sent}
    losses = torch.zeros(len(members))
    for step in range(members[0].num_steps):
        active = [client for client in clients if step < client.fit.num_steps]
        batches = plan.take(step, active)
        live = {name: value[: len(active)].detach().requires_grad_() for name, value in values.items()}
        changes, loss = _gradients(module, batches, targets, live)
        losses[: len(active)] += loss.float() * batches.sizes
        with torch.no_grad():
            if correction is None:
                for name, gradient in changes.items():
                    gradients[name][: len(active)] = gradient
                for place, client in enumerate(active):
                    client.fit.update.correct(workspace.sent(client.params))
                    if any(client.params[n].grad is not views[place][n] for n in gradients):
                        raise InputError("its algorithm replaces gradients, which it has to change in place")
                changes = {name: stacked[: len(active)] for name, stacked in gradients.items()}
            for name, value in values.items():
                own = value[: len(active)]
                change = changes[name] if correction is None else correction.apply(name, changes[name], own)
                steps.take(name, own, change)
        for client in active:
            client.fit.update.count_step(told)
    targets.finish()
    trained = [own[""] for own in rows_of({"": values}, len(members))]
    if together is None:  # a client's own report may keep its weights, which are not to share memory with others
        trained = [{name: row.clone() for name, row in own.items()} for own in trained]
    same_backbone = not workspace.private and not any(name.startswith("backbone.") for name in values)
    for client, weights, total in zip(clients, trained, losses.tolist(), strict=True):
        if not client.has("on_train_batch_end", LocalUpdate):
            client.fit.update.count_loss(total, client.fit.epochs * len(client.fit.loader.indices))
        terms = client.fit.terms.values()
        if terms or client.has("on_train_end"):
            if terms or not same_backbone:  # an algorithm looks at the network below the head alone
                module = workspace.module(weights, client.fit.buffers).train()
            client.hook("on_train_end", module=module)
            for term in terms:
                term.finish(module.backbone, module.head, client.fit.loader)
    if together is not None:
        for fit, report in zip(members, report_together(together, sent, updates), strict=True):
            fit.report = report
    return [weights for _, weights in sorted(zip(order, trained, strict=True), key=lambda pair: pair[0])]


class _Steps:
    """Steps of SGD on stacked parameters, as torch's optimizer takes them.

    Args:
        optimizer: SGD with its arguments.
        names: of the parameters.
        factor: of the learning rate in this round.
        head_lr: of the learning rate of the head.
    """

    def __init__(self, optimizer: Part, names: Iterable[str], factor: float, head_lr: float) -> None:
        lr = float(optimizer.argument("lr"))
        self.rates = {name: lr * ((head_lr if name.startswith("head.") else 1.0) * factor) for name in names}
        """The learning rate of each parameter, as `JointModule.configure_optimizers` sets it."""
        self._momentum, self._decay = (float(optimizer.argument(name)) for name in ("momentum", "weight_decay"))
        self._velocities: Tensors = {}

    def take(self, name: str, value: Tensor, gradient: Tensor) -> None:
        """Change the values of a parameter, of the clients that still train, by a step."""
        if self._decay:
            gradient = gradient.add(value, alpha=self._decay)
        if self._momentum:
            known = self._velocities.get(name)
            gradient = gradient.clone() if known is None else known[: len(value)].mul_(self._momentum).add_(gradient)
            self._velocities[name] = gradient
        value.add_(gradient, alpha=-self.rates[name])


def _forward(module: JointModule, params: Mapping[str, Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """Return features (K, B, F) and logits (K, B, M*C) of stacked parameters and images (K, B, ...)."""
    features = _run(module.backbone, _below("backbone", params), images)
    return features, _linear(params["head.weight"], params["head.bias"], features)


def _below(name: str, params: Mapping[str, Tensor]) -> Tensors:
    """Return the parameters of a part of the network, by their names in it."""
    return {key.removeprefix(f"{name}."): value for key, value in params.items() if key.startswith(f"{name}.")}


def _run(layer: nn.Module, params: Tensors, inputs: Tensor) -> Tensor:
    """Return the outputs of stacked copies of a layer, which differ in their trained parameters (K, B, ...)."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    if type(layer) is nn.Linear and not hooked and params.keys() == {"weight", "bias"} and inputs.ndim == 3:
        return _linear(params["weight"], params["bias"], inputs)
    if not hooked and _is_chain(layer) and (params or not isinstance(layer, Backbone)):
        for name, part in layer._modules.items():
            assert part is not None
            inputs = _run(part, _below(name, params), inputs)
        return inputs
    outputs: Tensor
    if params:
        outputs = vmap(lambda own, batch: functional_call(layer, own, (batch,)))(params, inputs)
    elif isinstance(layer, Backbone):  # it has no trained parameters: the same for all
        outputs = layer(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])
    else:
        outputs = vmap(layer)(inputs)  # refuses what would draw random numbers
    return outputs


def _is_chain(layer: nn.Module) -> bool:
    """Return whether a layer calls its parts one after the other, and none of them shares parameters with another."""
    if type(layer) not in (nn.Sequential, Backbone):
        return False
    return len(list(layer.parameters())) == len(list(layer.named_parameters(remove_duplicate=False)))


def _linear(weight: Tensor, bias: Tensor, inputs: Tensor) -> Tensor:
    """Return the outputs of stacked linear layers; the gradient of the weights has their layout and needs no copy."""
    return torch.bmm(weight, inputs.mT).mT + bias.unsqueeze(1)


def _gradients(
    module: JointModule, batches: StackedBatches, targets: StackedTargets, live: Tensors
) -> tuple[Tensors, Tensor]:
    """Return the stacked gradients of the clients' losses on their batches, and these losses.

    Args:
        module: the network.
        batches: the batches.
        targets: the clients' targets.
        live: the stacked parameters.
    """
    for place, client in enumerate(batches.clients):
        if client.has("on_train_batch_start"):
            client.hook("on_train_batch_start", batches.of(place), batches.step)
    features, logits = _forward(module, live, batches.inputs)
    losses = stacked_losses(module, batches, targets, features, logits)
    found = torch.autograd.grad(losses.sum(), list(live.values()), allow_unused=True, materialize_grads=True)
    losses = losses.detach()
    for place, client in enumerate(batches.clients):
        if client.has("on_train_batch_end", LocalUpdate):
            client.hook("on_train_batch_end", {"loss": losses[place]}, batches.of(place), batches.step)
    return dict(zip(live, found, strict=True)), losses
