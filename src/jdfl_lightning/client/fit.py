"""fit_client: one client's local training, called by every backend; train: the training loop it shares with Phase 1."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch

from jdfl_lightning.algorithms.base import SECOND, LocalUpdate
from jdfl_lightning.client.build import build_module as build_module
from jdfl_lightning.client.build import initial_backbone as initial_backbone
from jdfl_lightning.client.loop import PlainLoop, needs_no_trainer
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.client.probe import DiscoveryProbe, EpochProbe, TurnedBatches
from jdfl_lightning.client.trainer import TrainerOptions, quiet, silent_trainer
from jdfl_lightning.client.workspace import Workspace as Workspace
from jdfl_lightning.core.errors import PublicError, plain
from jdfl_lightning.core.messages import DISCOVERY_ROUND, PRIVATE, SUPERVISION, FitResult, FitTask
from jdfl_lightning.core.seeding import isolated_randomness, torch_generator
from jdfl_lightning.core.tensors import Record, Tensors, norm, snapshot
from jdfl_lightning.data.loader import BatchLoader
from jdfl_lightning.joint import TargetRule
from jdfl_lightning.regularizers import Term


def train(
    module: pl.LightningModule,
    loader: Iterable[Any],
    update: LocalUpdate,
    epochs: int,
    options: TrainerOptions,
    max_steps: int = -1,
) -> tuple[Tensors, dict[str, float]]:
    """Train a module from its current weights, silently; all randomness is a function of the update's task.

    Args:
        module: any LightningModule.
        loader: its training batches.
        update: the algorithm's callback for this fit.
        epochs: passes through the loader.
        options: options of the Trainer.
        max_steps: end after this many steps; -1 for no limit.

    Returns:
        A copy of the trained parameters, and the numbers that the module logged, by name.
    """
    randomness = isolated_randomness(update.task.seed, "fit", *update.task.where)
    if isinstance(module, JointModule) and needs_no_trainer(module, update, options):
        with randomness:
            PlainLoop(module, loader, update, epochs).fit()
        return snapshot(module.trainable()), {}
    with quiet(), randomness:
        trainer = silent_trainer(options, epochs, [update, *(part.build() for part in options.callbacks)], max_steps)
        trainer.fit(module, loader)
    # Trainer has reference cycles, so it stays in memory until the garbage collector runs: free its large tensors now
    for optimizer in trainer.optimizers:
        optimizer.state.clear()
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if isinstance(module, JointModule):
        return snapshot(module.trainable()), logged
    return snapshot({name: param for name, param in module.named_parameters() if param.requires_grad}), logged


@dataclass
class LocalFit:
    """One client's fit: everything that decides it, made by `begin_fit`."""

    task: FitTask
    update: LocalUpdate
    """The algorithm's client side, or Phase 1's."""
    targets: TargetRule | None
    """The supervision's; None where labels are ordinary ones."""
    terms: dict[str, Term]
    """The regularizers', by the names of their groups in messages."""
    loader: BatchLoader
    epochs: int
    generator: torch.Generator
    """Source of the random targets."""
    lr_factor: float
    """Factor on the learning rate in this round."""
    weights: Tensors
    """All trainable parameters at the start: the server's and the client's own."""
    buffers: Tensors
    """The network's other tensors at the start."""
    report: tuple[Record, Record] | None = None
    """The algorithm's upload and new state, if they were made with those of other clients."""

    @property
    def num_steps(self) -> int:
        """Steps of the whole fit, if one is taken for each batch."""
        return self.epochs * len(self.loader)

    @property
    def discovering(self) -> bool:
        """Whether it belongs to Phase 1."""
        return self.task.round == DISCOVERY_ROUND


def begin_fit(workspace: Workspace, task: FitTask, state: Record) -> LocalFit:
    """Prepare one client's fit.

    Args:
        workspace: this process's data and module.
        task: what the server sent.
        state: what the client kept from its last participation.
    """
    experiment = workspace.experiment
    if len(workspace.data.partition.clients[task.client - workspace.first]) == 0:
        raise PublicError(
            f"Expected client {task.client} to train in round {task.round} but it has no image to take a step with: "
            "lower --data.num_clients."
        )
    own, others = state.get(PRIVATE, {}), {group: tensors for group, tensors in state.items() if group != PRIVATE}
    if task.round == DISCOVERY_ROUND:
        names = workspace.update_names()
        update: LocalUpdate = (
            EpochProbe(task, names)
            if task.every_epoch
            else DiscoveryProbe(task, names, experiment.clustering.sketch_dim)
        )
    else:
        update = experiment.algorithm.local(task, others)
    return prepare_fit(workspace, task, update, own)


def prepare_fit(workspace: Workspace, task: FitTask, update: LocalUpdate, own: Tensors, purpose: str = "") -> LocalFit:
    """Prepare a fit of a client with its loss, its batches and its random numbers.

    Args:
        workspace: this process's data and module.
        task: what the server sent.
        update: the client side of the fit.
        own: the client's private tensors.
        purpose: what the fit is for, if it is not the one that the server asked for: it has its own random numbers.
    """
    experiment, data, sent = workspace.experiment, workspace.data, task.learned
    discovering = task.round == DISCOVERY_ROUND
    terms: dict[str, Term] = {}
    rule, head = None, task.weights.get("head.weight")
    if discovering:
        epochs, batch_size = experiment.clustering.epochs, experiment.clustering.batch_size or experiment.batch_size
    else:
        joint = SUPERVISION in sent or (head is not None and head.shape[0] > len(data.class_names))
        if joint:  # else ordinary labels
            rule = workspace.rule(sent.get(SUPERVISION, {}), task.domain)
        terms = {name: part.term(sent.get(name, {})) for name, part in experiment.regularizers_by_name.items()}
        epochs, batch_size = experiment.epochs, experiment.batch_size
    shuffle, targets = (torch_generator(task.seed, purpose + what, *task.where) for what in ("shuffle", "targets"))
    number = task.client - workspace.first  # index among this process's clients
    loader = data.client_loader(number, max(task.domain, 0), batch_size, shuffle, augment=not discovering)
    if discovering and experiment.clustering.labels == "rotations":
        loader = TurnedBatches(loader, len(data.class_names))
    num_domains = 1 if rule is None else rule.num_domains
    weights, buffers = workspace.complete(task.weights, task.buffers, own, num_domains)
    factor = workspace.lr_factor(task.round)
    return LocalFit(task, update, rule, terms, loader, epochs, targets, factor, weights, buffers)


_OURS = re.compile(
    r"round|clients|refused|joined|time/(fit|evaluate)|bytes/(up|down)|(test|val|unseen)/acc.*|norm/(client|server)/.*"
)
"""Names of the numbers that a run logs itself."""


def _check_names(logged: Iterable[str]) -> None:
    """Raise a `PublicError` if a module has logged a number by a name that is the run's own, or no name."""
    for name in logged:
        if _OURS.fullmatch(name) or not name.isprintable() or not name:
            raise PublicError(
                f"Expected the model to log numbers by printable names, other than the run's own, but it logs "
                f"{plain(name)!r}: log train/... instead."
            )


def end_fit(
    workspace: Workspace, fit: LocalFit, weights: Tensors, buffers: Tensors, logged: dict[str, float]
) -> tuple[FitResult, Record]:
    """Return a client's answer and its new state.

    Args:
        workspace: this process's data and module.
        fit: the fit.
        weights: the trained parameters after it.
        buffers: the network's other tensors after it.
        logged: numbers that the module logged.
    """
    task, update = fit.task, fit.update
    if update.num_steps == 0:
        raise PublicError(
            f"Expected client {task.client} to train in round {task.round} but its fit took no step: "
            "look at --epochs, and at --trainer.precision, whose gradient scaler may have skipped them all."
        )
    _check_names(logged)
    sent = workspace.sent(weights)
    upload, state = fit.report or update.report(sent)
    norms = {
        f"norm/client/{group}": norm(tensors)
        for group, tensors in state.items()
        if group not in SECOND and (not workspace.private or tensors.keys() <= sent.keys())
    }
    if workspace.private and not fit.discovering:
        kept = workspace.private - workspace.frozen  # a frozen parameter is always theta_0's
        state = state | {PRIVATE: {name: tensor for name, tensor in {**weights, **buffers}.items() if name in kept}}
    learned = {name: snapshot(term.collect()) for name, term in fit.terms.items()}
    if fit.targets is not None:
        learned[SUPERVISION] = snapshot(workspace.experiment.supervision.collect(fit.targets))
    result = FitResult(
        client=task.client,
        num_examples=len(fit.loader.indices),
        num_steps=update.num_steps,
        weight=task.weight,
        weights={} if fit.discovering else sent,
        buffers={} if fit.discovering else workspace.sent(buffers),
        upload=upload,
        learned={name: sums for name, sums in learned.items() if sums},
        metrics=logged | {"train/loss": update.mean_loss} | norms,
        keeps_state=bool(state),
    )
    vars(update).clear()  # a Trainer still refers to it
    return result, state


def fit_client(workspace: Workspace, task: FitTask, state: Record) -> tuple[FitResult, Record]:
    """Train one client from the server's weights.

    Args:
        workspace: this process's data and module.
        task: what the server sent.
        state: what the client kept from its last participation.

    Returns:
        The client's answer and its new state; everything random in it is a function of (seed, round, client).
    """
    fit = begin_fit(workspace, task, state)
    result, after = end_fit(workspace, fit, *run_fit(workspace, fit))
    second = begin_second(workspace, task, state)
    if second is not None:
        weights, buffers, _ = run_fit(workspace, second)
        after = after | second_state(workspace, weights, buffers)
    return result, after


def run_fit(workspace: Workspace, fit: LocalFit) -> tuple[Tensors, Tensors, dict[str, float]]:
    """Train as a fit says; return the parameters and the other tensors after it, and the numbers that were logged."""
    module = workspace.module(fit.weights, fit.buffers, fit.targets)
    module.regularizers.extend(fit.terms.values())
    module.generator, module.loss_term, module.lr_factor = fit.generator, fit.update.loss, fit.lr_factor
    options = workspace.experiment.trainer
    try:
        steps = -1 if fit.discovering else options.max_steps
        weights, logged = train(module, fit.loader, fit.update, fit.epochs, options, steps)
    finally:
        module.generator = module.loss_term = None
    return weights, snapshot(module.statistics()), logged


def begin_second(workspace: Workspace, task: FitTask, state: Record) -> LocalFit | None:
    """Prepare the fit of the client's second model, if the algorithm has one and this is not Phase 1."""
    discovering = task.round == DISCOVERY_ROUND
    update = None if discovering else workspace.experiment.algorithm.second(task, state)
    if update is None:
        return None
    fit = prepare_fit(workspace, task, update, state.get(PRIVATE, {}), "second ")
    return replace(fit, weights=fit.weights | state[SECOND[0]], buffers=fit.buffers | state.get(SECOND[1], {}))


def second_state(workspace: Workspace, weights: Tensors, buffers: Tensors) -> Record:
    """Return the groups of a client's state with its second model; frozen parameters are the server's."""
    frozen = workspace.frozen
    own = {name: tensor for name, tensor in buffers.items() if name not in frozen}
    return {SECOND[0]: weights} | ({SECOND[1]: own} if own else {})
