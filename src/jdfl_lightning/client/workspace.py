"""Workspace: everything a process needs to train or evaluate a model, and what of the network is private."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from jdfl_lightning.client.build import build_module, initial_backbone, read_by, round_factor
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.core.errors import InputError, require, without_stop
from jdfl_lightning.core.messages import DISCOVERY_ROUND
from jdfl_lightning.core.seeding import isolated_randomness
from jdfl_lightning.core.tensors import Tensors, snapshot
from jdfl_lightning.joint import JointHead, PlainTargets, TargetRule
from jdfl_lightning.models import matching, num_features, select_parameters

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


def _in_default_layout(backbone: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.contiguous() for tensor in args)


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
                score=experiment.global_score,
            )
        for name in ("lr", "momentum", "weight_decay"):  # for a subclass that makes its optimizer itself
            setattr(self._module, name, experiment.local_optimizer.argument(name))
        self._module.optimizer, self._module.lr_scheduler = experiment.local_optimizer, experiment.lr_scheduler
        self._module.head_lr = experiment.head_lr
        self._plain = PlainTargets()
        layout = experiment.trainer.memory_format
        self._module.to(memory_format=layout)
        if layout is torch.contiguous_format:  # batches have the layout of the stored images, channels_last
            self._module.backbone.register_forward_pre_hook(_in_default_layout)
        self._theta_0 = snapshot(self._module.trainable()), snapshot(self._module.statistics())
        names = {**self._theta_0[0], **self._theta_0[1]}
        usual = self._module.head.weight.dtype
        self._other_types = {name for name, tensor in names.items() if tensor.dtype != usual}
        self.private = self._module.private = matching(experiment.private, names, "--private")
        """Names of the parameters and buffers that clients keep and never send."""
        self._sent: Tensors = {}
        self._rules: dict[int, TargetRule] = {}
        """The rules of a round, by pseudo-domain, that serve several clients."""
        self._factors: dict[int, float] = {}

    def lr_factor(self, round: int) -> float:
        """Return the factor on the learning rate in a round: that of ``--round_scheduler``."""
        scheduler = self.experiment.round_scheduler
        if scheduler is None or round == DISCOVERY_ROUND:
            return 1.0
        if round not in self._factors:
            rate = self.experiment.local_optimizer.argument("lr")
            self._factors[round] = round_factor(scheduler, round, float(rate or 1.0))
        return self._factors[round]

    def rule(self, sent: Tensors, domain: int) -> TargetRule:
        """Return the supervision's target rule of a fit; one that keeps nothing serves all of a round's clients.

        Args:
            sent: what the server sent for it.
            domain: the client's pseudo-domain.
        """
        if sent is not self._sent:
            self._sent, self._rules = sent, {}
        rule = self._rules.get(domain)
        if rule is None:
            rule = self.experiment.supervision.rule(sent, domain)
            if type(rule) is TargetRule:
                self._rules[domain] = rule
        return rule

    def initial(self, num_domains: int) -> tuple[Tensors, Tensors]:
        """Return theta_0, a function of the seed, with a head of M x C outputs: a new one, or M copies of one of C."""
        weights, buffers = self._theta_0
        head = self._new_head(num_domains if self.experiment.head_init == "fresh" else 1)
        if head.num_domains != num_domains:
            head = JointHead.expand(head, num_domains, "tile")
        return weights | {
            f"head.{name}": value for name, value in snapshot(dict(head.named_parameters())).items()
        }, buffers

    def start(self, num_domains: int) -> tuple[Tensors, Tensors]:
        """Return what the server has of theta_0: all but what is private."""
        weights, buffers = self.initial(num_domains)
        return self.sent(weights), self.sent(buffers)

    def sent(self, tensors: Tensors) -> Tensors:
        """Leave out tensors that are private."""
        if not self.private:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if name not in self.private}

    def complete(
        self, weights: Tensors, buffers: Tensors, own: Tensors | None = None, num_domains: int = 1
    ) -> tuple[Tensors, Tensors]:
        """Return all parameters and buffers of a model.

        Args:
            weights: parameters, with or without the private ones.
            buffers: other tensors, with or without the private ones.
            own: a client's private tensors; those that are missing are theta_0's.
            num_domains: M, if neither has a head that shows it.
        """
        if not self.private:
            return weights, buffers
        known = {**weights, **buffers, **(own or {})}
        if not self.private <= known.keys():
            outputs = [len(known[name]) for name in ("head.weight", "head.bias") if name in known]
            theta_0 = self.initial(outputs[0] // self._module.head.num_classes if outputs else num_domains)
            dtype = next((tensor.dtype for tensor in known.values() if tensor.is_floating_point()), None)
            for name, tensor in {**theta_0[0], **theta_0[1]}.items():
                known.setdefault(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
        return {name: known[name] for name in self._theta_0[0]}, {name: known[name] for name in self._theta_0[1]}

    def _new_head(self, num_domains: int) -> JointHead:
        with isolated_randomness(self.experiment.seed_everything, "head", num_domains):
            head = self._module.head
            return JointHead(head.in_features, head.num_classes, num_domains, score=head.score)

    def check_optimizer(self) -> None:
        """Raise an `InputError` if optimizer and schedulers cannot be built, or if a subclass's own ignore settings."""
        module = self._module
        own = type(module).configure_optimizers is not JointModule.configure_optimizers
        try:
            self.lr_factor(2)
            if not own:
                module.configure_optimizers()
        except Exception as error:  # whatever a user's class raises
            raise InputError(
                "Expected --optimizer, --lr_scheduler and --round_scheduler to work with the network but: "
                f"{type(error).__name__}: {without_stop(error)}."
            ) from error
        if own:
            self._check_settings_used()

    def _check_settings_used(self) -> None:
        try:
            read = read_by(self._module, "configure_optimizers")
        except Exception:  # it may need its Trainer, so that nobody knows what it would look at
            return
        experiment, name = self.experiment, type(self._module).__name__
        used: dict[str, tuple[Any, str]] = {
            "optimizer": (experiment.optimizer, "optimizer"),
            "lr_scheduler": (experiment.lr_scheduler, "lr_scheduler"),
            "round_scheduler": (experiment.round_scheduler, "lr_factor"),
            "head_lr": (None if experiment.head_lr == 1 else experiment.head_lr, "head_lr"),
        }
        for setting, (value, attribute) in used.items():
            why = f"left out, as {name}.configure_optimizers does not look at self.{attribute},"
            require(value is None or attribute in read, f"--{setting}", why, value)

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that are not trained."""
        return frozenset(name for name, param in self._module.named_parameters() if not param.requires_grad)

    def update_length(self) -> int:
        """Return the length of a client's update vector in Phase 1: the number of weights in --clustering.layers."""
        weights, _ = self.initial(num_domains=1)
        return sum(weights[name].numel() for name in self.update_names())

    def update_names(self) -> list[str]:
        """Return the names of the parameters whose update a client sends in Phase 1: no private ones."""
        layers = self.experiment.clustering.layers
        names = [name for name in select_parameters(self._module, layers) if name not in self.private]
        if not names and self.experiment.needs_discovery:
            raise InputError(
                f"Expected --clustering.layers to have parameters that are sent but all of {layers} are private: name "
                "others by patterns, such as [backbone.*]."
            )
        return names

    def module(self, weights: Tensors, buffers: Tensors, targets: TargetRule | None = None) -> JointModule:
        """Return the module with these weights; its head is resized to fit them, and what they lack is theta_0's."""
        weights, buffers = self.complete(weights, buffers)
        module = self._module
        num_domains = weights["head.weight"].shape[0] // module.head.num_classes
        if num_domains != module.head.num_domains:
            module.head, module.live = self._new_head(num_domains), None
        rule = targets if targets is not None else self._plain
        if module.targets is not rule:  # to set an attribute of a module takes long
            module.targets = rule
        if len(module.regularizers):
            module.regularizers = nn.ModuleList()
        if module.live is None and type(module) is JointModule and self.experiment.trainer.are_plain:
            module.find_live()  # no subclass or Trainer exchanges the parameters
        dtype = weights["head.weight"].dtype
        values = {**weights, **buffers}
        with torch.no_grad():
            for name, tensor in {**module.trainable(), **module.statistics()}.items():
                # it is single before a process's first fit; one that began with another type keeps that
                if tensor.is_floating_point() and tensor.dtype != dtype and name not in self._other_types:
                    tensor.data = tensor.data.to(dtype)
                tensor.copy_(values[name])
        return module
