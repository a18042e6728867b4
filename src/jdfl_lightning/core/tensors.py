"""Arithmetic on named tensors, so that an algorithm reads like its paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
"""Parameter name -> tensor."""

Record = dict[str, Tensors]
"""Group -> named tensors, such as ``{"c": {...}}``: what an algorithm keeps and sends."""


def snapshot(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copy live tensors to the CPU in the default layout, detached from autograd."""
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
    """Return the size of a record's tensors in bytes.

    >>> num_bytes({"c": {"w": torch.zeros(2, 2)}, "h": {}})
    16
    """
    return sum(tensor.numel() * tensor.element_size() for group in record.values() for tensor in group.values())


def misfit(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> str | None:
    """Return why named tensors do not have the names and shapes of others; None if they do.

    >>> misfit({"w": torch.zeros(2)}, {"w": torch.zeros(3)})
    'w has the shape (2,) and not (3,)'
    """
    if names := sorted(set(tensors) ^ set(like)):
        return f"the names differ: {', '.join(names[:3])}"
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape:
            return f"{name} has the shape {tuple(tensor.shape)} and not {tuple(like[name].shape)}"
        if tensor.is_floating_point() != like[name].is_floating_point():
            return f"{name} is of {tensor.dtype} and not of {like[name].dtype}"
    return None


def zeros_like(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return zeros of the same names and shapes.

    >>> zeros_like({"w": torch.ones(2)})
    {'w': tensor([0., 0.])}
    """
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], alpha: float = 1.0) -> Tensors:
    """Return ``a + alpha * b``, name by name.

    >>> add({"w": torch.tensor(3.0)}, {"w": torch.tensor(1.0)}, alpha=-2)
    {'w': tensor(1.)}
    """
    return {name: torch.add(a[name], b[name], alpha=alpha) for name in a}


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm of all floating-point tensors together, in double precision: finite if they are.

    >>> norm({"w": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    5.0
    """
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in floats))


def place(tensors: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> list[Tensor]:
    """Copy tensors to where the parameters of the same names are: device, type and memory layout.

    Operations over lists of tensors are fused only if layouts agree.
    """
    return [torch.empty_like(param).copy_(tensors[name]) for name, param in params.items()]


class RunningSum:
    """A weighted sum of named tensors in double precision, one at a time.

    >>> total = RunningSum()
    >>> total.add({"w": torch.tensor(1.0)}, 2.0)
    >>> total.add({"w": torch.tensor(5.0)})
    >>> total.result(scale=0.5)
    {'w': tensor(3.5000)}
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._sums: Tensors = {}
        self._first: Tensors = {}

    def add(self, tensors: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add tensors with a weight."""
        if not self._first:
            self._first = dict(tensors)
            self._sums = {
                name: torch.zeros_like(tensor, dtype=torch.float64)
                for name, tensor in tensors.items()
                if tensor.is_floating_point()
            }
        self.weight += weight
        for name, accumulator in self._sums.items():
            accumulator.add_(tensors[name], alpha=weight)  # in double precision, without a copy

    def result(self, scale: float = 1.0) -> Tensors:
        """Return the sum times a factor; integer tensors are not summed: the first ones added are returned."""
        return self._cast(lambda total: total * scale)

    def mean(self) -> Tensors:
        """Return the sum divided by the sum of the weights; the mean of equal tensors is bit-identical to them."""
        return self._cast(lambda total: total / self.weight)

    def _cast(self, finish: Callable[[Tensor], Tensor]) -> Tensors:
        return {
            name: finish(self._sums[name]).to(tensor.dtype) if name in self._sums else tensor.clone()
            for name, tensor in self._first.items()
        }


def grads(params: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the gradients of parameters, to be changed in place."""
    return [param.grad for param in params.values() if param.grad is not None]


def pull(params: Mapping[str, Tensor], anchors: list[Tensor], strength: float) -> None:
    """Add ``strength * (parameter - anchor)`` to every gradient; the difference is computed first, to lose no digits.

    >>> x = torch.tensor([3.0])
    >>> x.grad = torch.tensor([1.0])
    >>> pull({"x": x}, [torch.tensor([1.0])], 0.5)
    >>> x.grad
    tensor([2.])
    """
    torch._foreach_add_(grads(params), torch._foreach_sub(list(params.values()), anchors), alpha=strength)
