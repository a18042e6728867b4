"""Which clients' answers enter a round: those that are whole, finite and not absurdly large."""

from __future__ import annotations

import math
import pickle
import statistics
import tempfile
from collections.abc import Callable, Iterator

import torch

from jdfl_lightning.messages import FitFailure, FitResult
from jdfl_lightning.tensors import Tensors, norm, sub

Refuse = Callable[[int, str], None]
"""Is told (client, reason) of an answer that does not enter the round."""


def why_not(result: FitResult, weights: Tensors, buffers: Tensors) -> str | None:
    """Return what is wrong with an answer to a task with these weights and buffers, or nothing."""
    for sent, answered, what in ((weights, result.weights, "weights"), (buffers, result.buffers, "buffers")):
        if set(answered) != set(sent):
            names = sorted(set(answered) ^ set(sent))
            return f"its {what} have other names than those sent: {', '.join(names[:3])}"
        for name, tensor in answered.items():
            if tensor.shape != sent[name].shape or tensor.is_floating_point() != sent[name].is_floating_point():
                shape = f"{tuple(tensor.shape)} of {tensor.dtype}"
                return f"its {name} is {shape} and not {tuple(sent[name].shape)} of {sent[name].dtype}"
    if result.num_examples <= 0 or not math.isfinite(result.weight) or result.weight <= 0:
        return "it counts for nothing: its number of examples or its weight is not positive"
    if not all(math.isfinite(norm(group)) for group in (result.weights, result.buffers, *result.upload.values())):
        return "its update is not finite: lower --lr or set --trainer.gradient_clip_val"
    return None


def screened(
    results: Iterator[FitResult | FitFailure], weights: Tensors, buffers: Tensors, refuse: Refuse
) -> Iterator[FitResult]:
    """Pass on the answers that can be used; uploads have the form of the first one's."""
    form: dict[str, dict[str, torch.Size]] | None = None
    for result in results:
        if isinstance(result, FitFailure):
            refuse(result.client, result.reason)
            continue
        reason = why_not(result, weights, buffers)
        own = {group: {n: t.shape for n, t in tensors.items()} for group, tensors in result.upload.items()}
        if reason is None and form is not None and own != form:
            reason = f"its upload ({', '.join(own) or 'nothing'}) has another form than that of the first answer"
        if reason is None:
            form = own
            yield result
        else:
            refuse(result.client, reason)


def without_outliers(
    results: Iterator[FitResult], weights: Tensors, multiple: float, refuse: Refuse
) -> Iterator[FitResult]:
    """Pass on the answers whose update is at most a multiple of the median length of the round's updates.

    The median is known when all have answered; until then they wait in a file, not in memory.
    """
    lengths: list[float] = []
    with tempfile.TemporaryFile(prefix="jdfl-round-") as waiting:
        for result in results:
            lengths.append(norm(sub(result.weights, weights)))
            pickle.dump(result, waiting, protocol=5)
        if not lengths:
            return
        limit = multiple * statistics.median(lengths)
        waiting.seek(0)
        for length in lengths:
            result = pickle.load(waiting)
            if length <= limit:
                yield result
            else:
                refuse(result.client, f"its update has length {length:.3g}, beyond {multiple:g} medians ({limit:.3g})")
