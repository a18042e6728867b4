"""Small things that several tests need."""

from __future__ import annotations

from typing import Any

from torch import nn

from jdfl_lightning import DigitsDomains, Experiment


def digits(num_clients: int = 4) -> DigitsDomains:
    """Real digits at 8 px, dealt with seed 0: a network trains on all of them in well under a second."""
    data = DigitsDomains(size=8, num_clients=num_clients)
    data.deal(0)
    return data


def experiment(**settings: Any) -> Experiment:
    """A run of a few seconds."""
    defaults: dict[str, Any] = {
        "data": digits(),
        "backbone": "helpers.tiny_net",
        "rounds": 2,
        "epochs": 1,
        "client_fraction": 1.0,
        "num_domains": 3,
    }
    return Experiment(**(defaults | settings))


def tiny_net(size: int) -> nn.Module:
    """A backbone of two conv blocks that any size fits."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(16 * size * size, 12),
        nn.ReLU(),
    )


def batch_norm_net(size: int) -> nn.Module:
    """A backbone with buffers: running statistics and an integer counter."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())


def picture_net(size: int) -> nn.Module:
    """Not a backbone: gives maps instead of a feature vector."""
    return nn.Conv2d(3, 8, 3)
