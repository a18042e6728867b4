"""The arguments that a class takes, including those that it hands on to its base, and those that a run supplies."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from jsonargparse import ArgumentParser
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jdfl_lightning.client.module import SUPPLIED, JointModule

PARTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "model": (JointModule, SUPPLIED),
    "optimizer": (Optimizer, ("params",)),
    "lr_scheduler": (LRScheduler, ("optimizer",)),
    "round_scheduler": (LRScheduler, ("optimizer",)),
}
"""Settings that name a class with its arguments, as in LightningCLI: the class's parent, and what the run supplies."""


@cache
def argument_names(kind: Any) -> tuple[str, ...]:
    """Return the names of a class's arguments; ``**options`` stands for those of the base that it is handed on to.

    >>> from jdfl_lightning import DigitsDomains
    >>> argument_names(DigitsDomains)[:4]
    ('size', 'num_clients', 'test_fraction', 'augment')
    """
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(parameter.name for parameter in parameters)
    # found as the command line finds them
    return tuple(ArgumentParser(exit_on_error=False).add_class_arguments(kind, fail_untyped=False))
