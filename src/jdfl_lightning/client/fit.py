"""fit_client: one client's local training, called by every backend; train: the training loop it shares with Phase 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import nn

from jdfl_lightning.algorithms import LocalUpdate
from jdfl_lightning.client.loop import PlainLoop, needs_no_trainer
from jdfl_lightning.client.module import JointModule, TensorPlaces
from jdfl_lightning.client.probe import DiscoveryProbe, EpochProbe
from jdfl_lightning.client.rotation import TurnedBatches
from jdfl_lightning.client.schedule import round_factor
from jdfl_lightning.client.trainer import TrainerOptions, quiet, silent_trainer, user_callbacks
from jdfl_lightning.core.errors import InputError, PublicError, without_stop
from jdfl_lightning.core.messages import DISCOVERY_ROUND, SUPERVISION, FitResult, FitTask
from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.seeding import isolated_randomness, torch_generator
from jdfl_lightning.core.tensors import Record, Tensors, norm, snapshot
from jdfl_lightning.data.loader import BatchLoader
from jdfl_lightning.joint import JointHead, PlainTargets, TargetRule
from jdfl_lightning.models import backbone_on_features, build_backbone, num_features, select_parameters
from jdfl_lightning.regularizers import Term

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


def initial_backbone(experiment: Experiment, pretrained: bool = True) -> nn.Module:
    """Return the initial backbone of every run with these settings, a function of the seed.

    Args:
        experiment: the run's settings. If its data has features, the backbone is what is above the frozen network.
        pretrained: whether its weights are loaded, if the settings name some; a process that is sent all weights needs
            none.
    """
    name, data, arguments = experiment.backbone, experiment.data, experiment.backbone_args
    with isolated_randomness(experiment.seed_everything, "backbone"):
        if data.features is not None:
            return backbone_on_features(name, arguments, data.features.shape[1])
        return build_backbone(name, data.size, arguments, pretrained)


def build_module(model: Part | None, backbone: nn.Module, **supplied: Any) -> JointModule:
    """Build the module of a run: a `JointModule`, or the user's subclass with its own arguments too.

    Args:
        model: the subclass; None for `JointModule`.
        backbone: the network below the head.
        supplied: further arguments of a `JointModule`.
    """
    part = model or Part(JointModule)
    try:
        module: JointModule = part.build(backbone=backbone, **supplied)
    except Exception as error:  # whatever a user's class raises
        raise InputError(
            f"Expected --model to be built like a JointModule but {part.class_path} failed: {type(error).__name__}: "
            f"{without_stop(error)}. Its __init__ takes its own arguments and **rest, and calls "
            "super().__init__(**rest)."
        ) from error
    return module


class Workspace:
    """Everything a process needs to train or evaluate a model, built once: the data and one module.

    Args:
        experiment: the run's settings; its data is loaded and partitioned.
        first: id of the first client whose images this process has.
        backbone: the network of `initial_backbone`, if it is already built.
        network: tensors of the frozen network whose features the clients train on, by their names in a saved model.
    """

    def __init__(
        self,
        experiment: Experiment,
        first: int = 0,
        backbone: nn.Module | None = None,
        network: Tensors | None = None,
    ) -> None:
        self.experiment, self.first, self.network = experiment, first, network or {}
        self.data = experiment.data
        backbone = initial_backbone(experiment) if backbone is None else backbone
        with isolated_randomness(experiment.seed_everything, "backbone"):
            self._module = build_module(
                experiment.model,
                backbone,
                in_features=num_features(backbone, self.data.size),
                num_classes=len(self.data.class_names),
                domains=[*self.data.domain_names, *self.data.unseen_names],
                score=experiment.score,
            )
        for name in ("lr", "momentum", "weight_decay"):  # for a subclass that makes its optimizer itself
            setattr(self._module, name, experiment.local_optimizer.argument(name))
        self._module.optimizer, self._module.lr_scheduler = experiment.local_optimizer, experiment.lr_scheduler
        self._module.head_lr = experiment.head_lr
        self._plain = PlainTargets()
        self._module.to(memory_format=torch.channels_last)
        self._theta_0 = snapshot(self._module.trainable()), snapshot(self._module.statistics())

    def initial(self, num_domains: int) -> tuple[Tensors, Tensors]:
        """Return theta_0, a function of the seed, with a head of M x C outputs: a new one, or M copies of one of C."""
        weights, buffers = self._theta_0
        head = self._new_head(num_domains if self.experiment.head_init == "fresh" else 1)
        if head.num_domains != num_domains:
            head = JointHead.expand(head, num_domains, "tile")
        return weights | {
            f"head.{name}": value for name, value in snapshot(dict(head.named_parameters())).items()
        }, buffers

    def _new_head(self, num_domains: int) -> JointHead:
        with isolated_randomness(self.experiment.seed_everything, "head", num_domains):
            head = self._module.head
            return JointHead(head.in_features, head.num_classes, num_domains, score=head.score)

    def check_optimizer(self) -> None:
        """Raise an `InputError` if optimizer and schedulers cannot be built; a subclass's own are not tried."""
        experiment, module = self.experiment, self._module
        try:
            if type(module).configure_optimizers is JointModule.configure_optimizers:
                module.configure_optimizers()
            round_factor(experiment.round_scheduler, 2)
        except Exception as error:  # whatever a user's class raises
            raise InputError(
                "Expected --optimizer, --lr_scheduler and --round_scheduler to work with the network but: "
                f"{type(error).__name__}: {without_stop(error)}."
            ) from error

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that are not trained."""
        return frozenset(name for name, param in self._module.named_parameters() if not param.requires_grad)

    def update_length(self) -> int:
        """Return the length of a client's update vector in Phase 1: the number of weights in --clustering.layers."""
        weights, buffers = self.initial(num_domains=1)
        names = select_parameters(self.module(weights, buffers), self.experiment.clustering.layers)
        return sum(weights[name].numel() for name in names)

    def module(self, weights: Tensors, buffers: Tensors, targets: TargetRule | None = None) -> JointModule:
        """Return the module with these weights; its head is resized to fit them."""
        module = self._module
        num_domains = weights["head.weight"].shape[0] // module.head.num_classes
        if num_domains != module.head.num_domains:
            module.head, module.places = self._new_head(num_domains), None
        if module.places is None and type(module) is JointModule:  # a subclass may exchange layers as it likes
            module.places = TensorPlaces(module)
        module.targets = targets if targets is not None else self._plain
        module.regularizers = nn.ModuleList()
        dtype = weights["head.weight"].dtype
        with torch.no_grad():
            for live, values in ((module.trainable(), weights), (module.statistics(), buffers)):
                for name, tensor in live.items():
                    if (
                        tensor.is_floating_point() and tensor.dtype != dtype
                    ):  # it is single before a process's first fit
                        tensor.data = tensor.data.to(dtype)
                    tensor.copy_(values[name])
        return module


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
            PlainLoop(module, loader, update).fit(epochs)
        return snapshot(module.trainable()), {}
    with quiet(), randomness:
        trainer = silent_trainer(options, epochs, [update, *user_callbacks(options)], max_steps)
        trainer.fit(module, loader)
    # Trainer has reference cycles, so it stays in memory until the garbage collector runs: free its large tensors now
    for optimizer in trainer.optimizers:
        optimizer.state.clear()
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
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
    experiment, data = workspace.experiment, workspace.data
    number = task.client - workspace.first  # index among this process's clients
    if len(data.partition.clients[number]) == 0:
        raise PublicError(
            f"Expected client {task.client} to train in round {task.round} but it has no image to take a step with: "
            "lower --data.num_clients."
        )
    discovering, sent = task.round == DISCOVERY_ROUND, task.learned
    terms: dict[str, Term] = {}
    rule = None
    if discovering:
        names = select_parameters(workspace.module(task.weights, task.buffers), experiment.clustering.layers)
        update: LocalUpdate = (
            EpochProbe(task, names)
            if task.every_epoch
            else DiscoveryProbe(task, names, experiment.clustering.sketch_dim)
        )
        epochs = experiment.clustering.epochs
        batch_size = experiment.clustering.batch_size or experiment.batch_size
    else:
        update = experiment.algorithm.local(task, state)
        joint = SUPERVISION in sent or task.weights["head.weight"].shape[0] > len(data.class_names)
        if joint:  # else ordinary labels
            rule = experiment.supervision.rule(sent.get(SUPERVISION, {}), task.domain)
        terms = {name: part.term(sent.get(name, {})) for name, part in experiment.regularizers_by_name.items()}
        epochs, batch_size = experiment.epochs, experiment.batch_size
    shuffle = torch_generator(task.seed, "shuffle", *task.where)
    loader = data.client_loader(number, max(task.domain, 0), batch_size, shuffle, augment=not discovering)
    if discovering and experiment.clustering.labels == "rotations":
        loader = TurnedBatches(loader, len(data.class_names))
    targets = torch_generator(task.seed, "targets", *task.where)
    factor = 1.0 if discovering else round_factor(experiment.round_scheduler, task.round)
    return LocalFit(task, update, rule, terms, loader, epochs, targets, factor)


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
    upload, state = update.report(weights)
    norms = {f"norm/client/{group}": norm(tensors) for group, tensors in state.items()}
    learned = {name: snapshot(term.collect()) for name, term in fit.terms.items()}
    if fit.targets is not None:
        learned[SUPERVISION] = snapshot(workspace.experiment.supervision.collect(fit.targets))
    result = FitResult(
        client=task.client,
        num_examples=len(fit.loader.indices),
        num_steps=update.num_steps,
        weight=task.weight,
        weights={} if fit.discovering else weights,
        buffers={} if fit.discovering else buffers,
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
    module = workspace.module(task.weights, task.buffers, fit.targets)
    module.regularizers.extend(fit.terms.values())
    module.generator, module.loss_term, module.lr_factor = fit.generator, fit.update.loss, fit.lr_factor
    options = workspace.experiment.trainer
    try:
        steps = -1 if fit.discovering else options.max_steps
        weights, logged = train(module, fit.loader, fit.update, fit.epochs, options, steps)
    finally:
        module.generator = module.loss_term = None
    return end_fit(workspace, fit, weights, snapshot(module.statistics()), logged)
