"""Clients' messages in Phase 1: normalised updates of some layers, or sketches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jdfl_lightning.core.tensors import Tensors, flatten, sub


def unit(vector: Tensor) -> Tensor:
    """Return a vector scaled to norm 1; a zero vector is unchanged.

    >>> unit(torch.tensor([3.0, 4.0])), unit(torch.zeros(1))
    (tensor([0.6000, 0.8000]), tensor([0.]))
    """
    exact = vector.double()
    scaled: Tensor = exact / exact.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return scaled.float()


def update_vector(before: Tensors, after: Tensors, names: Sequence[str]) -> Tensor:
    r"""Return :math:`\bar u = u / \|u\|_2` with :math:`u = \mathrm{vec}(\tilde\theta[P] - \theta_0[P])`.

    >>> update_vector({"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}, ["w"])
    tensor([0.6000, 0.8000])
    """
    return unit(flatten(sub({name: after[name] for name in names}, before)))


def reason_unusable(update: Tensor) -> str | None:
    """Return why an update vector cannot be used; None if it can.

    >>> reason_unusable(torch.tensor([0.6, 0.8])), reason_unusable(torch.zeros(2))
    (None, 'its update is zero')
    """
    if not torch.isfinite(update).all():
        return "its update is not finite: lower --lr or set --trainer.gradient_clip_val"
    return None if update.any() else "its update is zero"


@dataclass(frozen=True)
class Updates:
    """The clients' updates of Phase 1."""

    clients: list[int]
    """Ids of the clients whose update can be used."""
    vectors: Tensor
    """Their normalised updates, or sketches of them (clients, D)."""
    left_out: dict[int, str] = field(default_factory=dict)
    """Clients without a usable update, and why."""
    bytes_down: int = 0
    bytes_up: int = 0
