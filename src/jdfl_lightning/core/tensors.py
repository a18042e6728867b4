"""Arithmetic on named tensors, so that an algorithm reads like its paper."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
"""Parameter name -> tensor."""

Record = dict[str, Tensors]
"""Group -> named tensors, such as ``{"c": {...}}``: what an algorithm keeps and sends."""

_SMALL = 1 << 16
"""Values of a tensor that fits into a core's cache."""


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


def digest_tensors(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """Return a checksum of a text and of named tensors, whatever their order."""
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def is_record(value: object) -> bool:
    """Return whether a value is a `Record`.

    >>> is_record({"c": {"w": torch.zeros(1)}}), is_record({"c": torch.zeros(1)})
    (True, False)
    """
    groups = value.values() if isinstance(value, dict) else (None,)
    return all(isinstance(group, dict) and all(isinstance(t, Tensor) for t in group.values()) for group in groups)


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


def divide(a: Mapping[str, Tensor], b: float | Tensor) -> Tensors:
    """Return ``a / b``, name by name; if b is a number for each of K clients, (K, ...) for each name.

    >>> divide({"w": torch.ones(2)}, torch.tensor([1.0, 4.0]))
    {'w': tensor([[1.0000, 1.0000],
            [0.2500, 0.2500]])}
    """
    if not isinstance(b, Tensor):
        return {name: tensor / b for name, tensor in a.items()}
    return {name: tensor / b.to(tensor.dtype).view(-1, *[1] * tensor.ndim) for name, tensor in a.items()}


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


def placed(tensors: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> list[Tensor]:
    """Return what `place` does, without copies of tensors that are there already: not to be changed in place."""
    return [_placed(tensors[name], param) for name, param in params.items()]


def _placed(tensor: Tensor, param: Tensor) -> Tensor:
    there = (tensor.device, tensor.dtype, tensor.shape) == (param.device, param.dtype, param.shape)
    return tensor if there and tensor.stride() == param.stride() else torch.empty_like(param).copy_(tensor)


def stack_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors of the same shape and type; if they are the rows of one tensor, in their order, do not copy them.

    >>> rows = torch.arange(6.0).view(3, 2)
    >>> stack_rows(rows.unbind()).data_ptr() == rows.data_ptr()
    True
    """
    first, size = tensors[0], tensors[0].numel()
    start, width = first.data_ptr(), size * first.element_size()
    held = first.untyped_storage()
    inside = start + len(tensors) * width <= held.data_ptr() + held.nbytes()
    if (
        size
        and inside
        and all(row.data_ptr() == start + place * width and row.is_contiguous() for place, row in enumerate(tensors))
    ):
        return first.as_strided((len(tensors), *first.shape), (size, *first.stride()), first.storage_offset())
    return torch.stack(list(tensors))


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
        self._doubles: Tensors = {}
        """Room for small tensors in double precision: they are sooner copied than added to those of another type."""
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
            self._doubles = {
                name: torch.empty_like(accumulator)
                for name, accumulator in self._sums.items()
                if tensors[name].dtype is not torch.float64 and accumulator.numel() <= _SMALL
            }
        self.weight += weight
        for name, accumulator in self._sums.items():
            room, tensor = self._doubles.get(name), tensors[name]
            accumulator.add_(tensor if room is None else room.copy_(tensor), alpha=weight)

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
