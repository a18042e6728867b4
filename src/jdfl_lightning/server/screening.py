"""Screening of clients' answers: they must have the declared form, be finite and not be far too large."""

from __future__ import annotations

import math
import pickle
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from jdfl_lightning.algorithms import Algorithm
from jdfl_lightning.backends.worker import encode
from jdfl_lightning.core.errors import InputError, plain
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Record, Tensors, norm, sub
from jdfl_lightning.supervision import Learned

Refuse = Callable[[int, str], None]
"""Called with (client, reason) for an answer that does not enter the round."""
_MOST_COUNTED = 2**31
"""A count must grow by less than this in a fit, so that no answer can make it overflow."""


@dataclass(frozen=True)
class Form:
    """The form that answers must have: for each group its names, with tensors of the expected shapes and types."""

    weights: Tensors
    buffers: Tensors
    upload: Record
    frozen: Tensors = field(default_factory=dict)
    """Parameters that are not trained: they must come back unchanged."""
    learned: Record = field(default_factory=dict)
    parts: Mapping[str, Learned] = field(default_factory=dict)
    """The supervision and the regularizers, which check their own sums."""
    counts: Tensors = field(default_factory=dict)
    """Integer buffers as they were sent: they are counts, for example of batches, and only grow."""
    infinite: Tensors = field(default_factory=dict)
    """Buffers that were sent with values that are not finite, such as a mask: they may come back unchanged."""

    @cached_property
    def groups(self) -> Record:
        """All tensors of an answer, grouped under the names used in messages."""
        return _groups(self.weights, self.buffers, self.upload, self.learned)

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        task: FitTask,
        num_classes: int,
        dtype: torch.dtype | None = None,
        frozen: Collection[str] = (),
        private: Tensors | None = None,
    ) -> Form:
        """Return the form of the answers to tasks like this one.

        Args:
            algorithm: declares what is uploaded.
            task: has the weights, buffers and broadcast that were sent.
            num_classes: C.
            dtype: type of floating-point weights and buffers after a fit, if it differs from their own.
            frozen: names of the parameters that are not trained.
            private: tensors that clients keep: no form has them, but an algorithm can look up their shapes by name.
        """
        weights, buffers = _trained(task.weights, dtype), _trained(task.buffers, dtype)
        moved = sub(weights, _trained(task.weights))
        server = {group: _trained(tensors) for group, tensors in task.server.items()}
        kept = {name: tensor.to(buffers[name].dtype) for name, tensor in task.buffers.items() if name in frozen}
        others = {name: tensor for name, tensor in task.buffers.items() if name not in frozen}
        counts = {n: tensor for n, tensor in others.items() if not (tensor.is_floating_point() or tensor.is_complex())}
        infinite = {n: tensor for n, tensor in others.items() if n not in counts and not tensor.isfinite().all()}
        upload = algorithm.upload_form(_Shapes(moved, _trained(private or {}, dtype)), server, num_classes)
        return cls(weights, buffers, upload, kept, counts=counts, infinite=infinite)


class _Shapes(dict[str, Tensor]):
    """The tensors that are sent, without values; private ones can be looked up too, such as the head for its width."""

    def __init__(self, sent: Tensors, private: Tensors) -> None:
        super().__init__(sent)
        self._private = private

    def __missing__(self, name: str) -> Tensor:
        return self._private[name]


def _groups(weights: Tensors, buffers: Tensors, upload: Record, learned: Record) -> Record:
    """Return all tensors of an answer, grouped under the names used in messages."""
    uploads = {f"upload {group!r}": upload[group] for group in upload}
    return (
        {"update": weights, "buffers": buffers} | uploads | {f"sums of the {name}": learned[name] for name in learned}
    )


def _trained(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Return tensors without values; floating-point ones get the given type."""
    return {name: tensor.to("meta", dtype if tensor.is_floating_point() else None) for name, tensor in tensors.items()}


def why_not(result: FitResult, form: Form, algorithm: Algorithm | None = None) -> str | None:
    """Return why an answer does not have the expected form, or None.

    Args:
        result: the answer, which may hold anything.
        form: what is expected.
        algorithm: checks the upload after all other checks.
    """
    expected = form.groups
    answered = _groups(result.weights, result.buffers, result.upload, result.learned)
    if set(answered) != set(expected):
        return f"it has other uploads than were declared: {_differing(answered, expected)}"
    for what, tensors in answered.items():
        like = expected[what]
        if tensors.keys() != like.keys():
            return f"other names than expected are in its {what}: {_differing(tensors, like)}"
        for name, tensor in tensors.items():
            if _look(tensor) != _look(like[name]):
                return f"its {name} in {what} is {_described(tensor)} and not {_described(like[name])}"
    for name, sent in form.frozen.items():
        if not torch.equal(result.buffers[name], sent):
            return f"its {name} in buffers is not what it was sent, although it is frozen"
    fixed = {n for n, sent in form.infinite.items() if torch.equal(result.buffers[n].nan_to_num(), sent.nan_to_num())}
    if not all(
        math.isfinite(_length({n: t for n, t in tensors.items() if what != "buffers" or n not in fixed}))
        for what, tensors in answered.items()
    ):
        return "its update is not finite: lower --lr or set --trainer.gradient_clip_val"
    for name, sent in form.counts.items():
        grown = result.buffers[name].long() - sent.long()
        if not ((grown >= 0) & (grown < _MOST_COUNTED)).all():
            return f"its {name} in buffers is smaller than what it was sent, or larger than a fit can count"
    if result.num_examples <= 0 or not math.isfinite(result.weight) or result.weight <= 0:
        return "it counts for nothing: its number of examples or its weight is not positive"
    checks: list[tuple[Algorithm | Learned, Any]] = [] if algorithm is None else [(algorithm, result.upload)]
    checks += [(part, result.learned[name]) for name, part in form.parts.items() if name in result.learned]
    for part, sent_back in checks:
        try:
            reason = part.reason_unusable(sent_back)
        except Exception as error:  # a user's check may raise anything
            reason = f"{type(part).__name__}.reason_unusable raised {plain(repr(error))}"
        if reason is not None:
            return reason
    return None


def _differing(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    return plain(", ".join(sorted(set(ours) ^ set(theirs))[:3]))


def _look(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.layout]:
    return tensor.shape, tensor.dtype, tensor.layout


def _described(tensor: Tensor) -> str:
    """Return shape and type, and the layout if it is not strided."""
    shape, dtype, layout = _look(tensor)
    return f"{tuple(shape)} of {dtype}{'' if layout is torch.strided else f', {layout}'}"


def _length(tensors: Tensors) -> float:
    """Return the Euclidean norm of all tensors together, whatever their types."""
    return norm(
        {n: t.abs() if t.is_complex() else t if t.is_floating_point() else t.double() for n, t in tensors.items()}
    )


def screened(
    results: Iterator[FitResult | FitFailure], form: Form, algorithm: Algorithm, refuse: Refuse, trusted: bool = True
) -> Iterator[FitResult]:
    """Yield the answers that can be used.

    Args:
        results: the answers.
        form: the form they must have.
        algorithm: the algorithm that made their uploads.
        refuse: called for answers that cannot be used.
        trusted: whether clients run the server's own code; an undeclared upload is then an error of the algorithm.
    """
    for result in results:
        if isinstance(result, FitFailure):
            refuse(result.client, result.reason)
            continue
        if trusted and result.upload and not form.upload:
            name = type(algorithm).__name__
            raise InputError(
                f"Expected {name}.upload_form to declare what clients upload but it declares nothing and client "
                f"{result.client} uploads {', '.join(map(repr, result.upload))}: write "
                f"{name}.upload_form(weights, server, num_classes), see docs/own_algorithm.md."
            )
        reason = why_not(result, form, algorithm)
        if reason is None:
            yield result
        else:
            refuse(result.client, reason)


def without_outliers(
    results: Iterator[FitResult], weights: Tensors, multiple: float, refuse: Refuse
) -> Iterator[FitResult]:
    """Yield the answers whose update and upload groups each have a norm of at most a multiple of the round's median.

    The median is over norms above 0: if most clients send zeros, the others are not all outliers. It is known only
    when all have answered; until then the answers are kept in a file, not in memory.
    """
    lengths: dict[str, list[float]] = {}
    with tempfile.TemporaryFile(prefix="jdfl-round-") as waiting:
        for result in results:
            for what, tensors in _groups(sub(result.weights, weights), {}, result.upload, result.learned).items():
                lengths.setdefault(what, []).append(_length(tensors))
            waiting.write(encode(result))
        moved = {what: [length for length in each if length > 0] for what, each in lengths.items()}
        limits = {what: multiple * statistics.median(each or [0.0]) for what, each in moved.items()}
        waiting.seek(0)
        for own in zip(*lengths.values(), strict=True):
            result = pickle.load(waiting)
            beyond = [(what, length) for what, length in zip(lengths, own, strict=True) if length > limits[what]]
            if beyond:
                what, length = beyond[0]
                limit = f"{multiple:g} medians ({limits[what]:.3g})"
                refuse(result.client, f"the length of its {what} is {length:.3g}, beyond {limit}")
            else:
                yield result
