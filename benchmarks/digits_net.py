"""A small network for the digits, so that a run takes seconds; in a module of its own, to be named as a backbone."""

from __future__ import annotations

from torch import nn


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(), nn.MaxPool2d(2))


def digits_net(size: int) -> nn.Module:
    """Return a backbone of two conv blocks and 64 features."""
    return nn.Sequential(_block(3, 16), _block(16, 32), nn.Flatten(), nn.Linear(32 * (size // 4) ** 2, 64), nn.ReLU())
