"""A small network for the digits, so that a run takes seconds; in a module of its own, to be named as a backbone."""

from __future__ import annotations

from torch import nn


def _block(inputs: int, outputs: int, norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2))


def digits_net(size: int) -> nn.Module:
    """Return a backbone of two conv blocks and 64 features."""
    blocks = _block(3, 16, nn.GroupNorm(4, 16)), _block(16, 32, nn.GroupNorm(4, 32))
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * (size // 4) ** 2, 64), nn.ReLU())


def batch_norm_net(size: int) -> nn.Module:
    """Return the same with BatchNorm."""
    blocks = _block(3, 16, nn.BatchNorm2d(16)), _block(16, 32, nn.BatchNorm2d(32))
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * (size // 4) ** 2, 64), nn.ReLU())
