"""What a run's settings make at a client: the backbone, the module, the rate of a round."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from jdfl_lightning.client.module import JointModule
from jdfl_lightning.core.errors import InputError, without_stop
from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.seeding import isolated_randomness
from jdfl_lightning.joint import JointHead
from jdfl_lightning.models import backbone_on_features, build_backbone, num_features

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


def round_factor(scheduler: Part, round: int, lr: float) -> float:
    """Return the factor on the learning rate in a round, counted from 1, by a scheduler that steps once a round.

    Args:
        scheduler: the scheduler.
        round: the round.
        lr: the rate that it begins with.

    >>> round_factor(Part(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5), round=3, lr=0.5)
    0.25
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    stepping = scheduler.build(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer itself takes no step
        for _ in range(round - 1):
            stepping.step()
    return float(optimizer.param_groups[0]["lr"]) / lr


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
        backbone = build_backbone(name, data.size, arguments, pretrained)
        if any(map(is_lazy, backbone.parameters())):
            num_features(backbone, data.size)  # makes its parameters
        return backbone


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
    kind = type(module)
    if type(module.head) is not JointHead:
        raise InputError(
            f"Expected --model to leave the JointHead as it is, which a run makes anew for M pseudo-domains, but "
            f"{kind.__name__} has a {type(module.head).__name__}: put layers of your own below it."
        )
    if kind.forward is not JointModule.forward and kind.training_step is JointModule.training_step:
        raise InputError(
            f"Expected --model to override training_step with forward but {kind.__name__} overrides forward alone, "
            "which the training step does not call, so that another network would be trained than is evaluated. If "
            "that is meant, override training_step by a call of super()."
        )
    return module


def read_by(module: JointModule, method: str) -> set[str]:
    """Call a method of a module; return the names of the attributes that it looks at."""
    read, kind = set(), type(module)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    module.__class__ = Watched
    try:
        getattr(module, method)()
    finally:
        module.__class__ = kind
    return read
