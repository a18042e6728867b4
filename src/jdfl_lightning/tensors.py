"""Arithmetic on named tensors, so that an algorithm reads like its paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
"""Parameter name -> tensor."""

Record = dict[str, Tensors]
"""Group -> named tensors, such as ``{"c": {...}}``: what an algorithm keeps and sends."""


def snapshot(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copy live tensors to the CPU in the default layout, cut off from autograd."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def sub(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensors:
    """Return ``a - b``, name by name.

    >>> sub({"w": torch.tensor(3.0)}, {"w": torch.tensor(1.0)})
    {'w': tensor(2.)}
    """
    return {name: a[name] - b[name] for name in a}


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Concatenate all tensors to one vector, in the order of the mapping (the paper's vec).

    >>> flatten({"w": torch.ones(2, 2), "b": torch.zeros(1)})
    tensor([1., 1., 1., 1., 0.])
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def num_bytes(record: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Return how many bytes the tensors of a record take.

    >>> num_bytes({"c": {"w": torch.zeros(2, 2)}, "h": {}})
    16
    """
    return sum(tensor.numel() * tensor.element_size() for group in record.values() for tensor in group.values())


def weighted_mean(items: Iterable[tuple[float, Mapping[str, Tensor]]]) -> Tensors:
    """Return ``sum(weight * tensors) / sum(weight)``, holding one running sum and never all the items.

    The sum runs in double precision: the mean of equal tensors is that tensor to the bit. Integer tensors
    (BatchNorm's step counter) have no mean; the first item's are copied.

    >>> weighted_mean([(1, {"w": torch.tensor(1.0)}), (3, {"w": torch.tensor(2.0)})])
    {'w': tensor(1.7500)}
    """
    total, sums, first = 0.0, Tensors(), Tensors()
    for weight, tensors in items:
        if not first:
            first = dict(tensors)
            sums = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in first.items() if t.is_floating_point()}
        total += weight
        for name, accumulator in sums.items():
            accumulator.add_(tensors[name].double(), alpha=weight)
    return {n: (sums[n] / total).to(t.dtype) if n in sums else t.clone() for n, t in first.items()}
