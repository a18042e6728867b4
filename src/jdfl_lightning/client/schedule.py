"""The learning rate over the rounds, by any of torch's schedulers."""

from __future__ import annotations

import warnings
from functools import cache

import torch

from jdfl_lightning.core.parts import Part


@cache
def round_factor(scheduler: Part | None, round: int) -> float:
    """Return the factor on the learning rate in a round, counted from 1: that of a scheduler that steps once a round.

    >>> round_factor(Part(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5), round=3)
    0.25
    """
    if scheduler is None:
        return 1.0
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    stepping = scheduler.build(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer itself takes no step
        for _ in range(round - 1):
            stepping.step()
    return float(optimizer.param_groups[0]["lr"])
