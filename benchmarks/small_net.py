"""A network so small that a round's time is the server's; in a module of its own, to be named as a backbone."""

from __future__ import annotations

from torch import nn


def small_net(size: int) -> nn.Module:
    """Return a backbone of 8 features."""
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3 * (size // 2) ** 2, 8), nn.ReLU())


def wide_features(size: int, width: int = 1280) -> nn.Module:
    """Return a network of 1,280 features, as many as EfficientNet-Lite0 has, or another number."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, width), nn.ReLU())
