"""Checks of a data module: its arguments, and what its `load` returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from jdfl_lightning.core.errors import InputError, require, require_choice

if TYPE_CHECKING:
    from jdfl_lightning.data.base import DomainDataModule

MissingClasses = Literal["refuse", "allow"]
"""Whether a domain may lack a class."""


def check_arguments(data: DomainDataModule) -> None:
    """Raise an `InputError` that names the first argument of a data module that is out of its range."""
    require(data.size > 0, "--data.size", "positive", data.size)
    require(data.num_clients > 0, "--data.num_clients", "positive", data.num_clients)
    require(0 < data.test_fraction < 1, "--data.test_fraction", "between 0 and 1", data.test_fraction)
    require(0 <= data.val_fraction < 1, "--data.val_fraction", "at least 0 and below 1", data.val_fraction)
    require(0 <= data.domain_mix <= 1, "--data.domain_mix", "between 0 and 1", data.domain_mix)
    skew = data.label_skew
    require(skew is None or 0 < skew < math.inf, "--data.label_skew", "null, or positive and finite", skew)


def seen_domains(data: DomainDataModule) -> Sequence[str]:
    """Return the domains that clients have; raise an `InputError` if one that is unseen does not exist."""
    names = data.domain_names
    unseen = [data.unseen] if isinstance(data.unseen, str) else data.unseen or []
    if not unseen or not names:  # a folder's domains are known when it is listed
        return names
    for name in unseen:
        require_choice("--data.unseen", name, list(names))
    seen = [name for name in names if name not in unseen]
    require(len(seen) > 0, "--data.unseen", "such that clients have a domain", data.unseen)
    return seen


def check_loaded(data: DomainDataModule, loaded: Any) -> None:
    """Raise an `InputError` that names the class and what is wrong with what its `load` returned."""

    def expect(holds: bool, what: str, got: object) -> None:
        if not holds:
            raise InputError(f"Expected {type(data).__name__}.load() to return {what} but got {got}.")

    parts = [type(part).__name__ for part in loaded] if isinstance(loaded, tuple) else type(loaded).__name__
    tensors = isinstance(loaded, tuple) and len(loaded) == 3 and all(isinstance(part, Tensor) for part in loaded)
    expect(tensors, "three tensors (images, labels, domains)", parts)
    images, labels, domains = loaded
    count, square = len(images) if images.ndim else 0, (data.size, data.size, 3)
    expect(images.dtype == torch.uint8, "images of type uint8, from 0 to 255,", images.dtype)
    right = images.ndim == 4 and tuple(images.shape[1:]) == square
    expect(right, f"images of shape (N, {', '.join(map(str, square))})", tuple(images.shape))
    for what, values, source in (("labels", labels, "class_names"), ("domains", domains, "domain_names")):
        whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
        expect(whole, f"{what} that are integers", values.dtype)
        expect(tuple(values.shape) == (count,), f"{what} of shape ({count},), one for each image,", tuple(values.shape))
        known = len(getattr(data, source))
        for value in (int(values.min()), int(values.max())) if count else ():
            expect(0 <= value < known, f"{what} from 0 to {known - 1}, the places in {source},", value)
