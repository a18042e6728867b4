"""Randomness as a function of (seed, purpose, round, client), never of global order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch


def derive_seed(seed: int, *keys: str | int) -> int:
    """Return a 63-bit seed that depends on every key and on nothing else.

    >>> derive_seed(0, "shuffle", 1, 2) == derive_seed(0, "shuffle", 1, 2)
    True
    >>> derive_seed(0, "shuffle", 1, 2) == derive_seed(0, "shuffle", 2, 1)
    False
    """
    text = "/".join(str(key) for key in (seed, *keys))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(seed: int, *keys: str | int) -> torch.Generator:
    """Return a CPU generator seeded by `derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(seed, *keys))


def numpy_generator(seed: int, *keys: str | int) -> np.random.Generator:
    """Return a NumPy generator seeded by `derive_seed`."""
    return np.random.default_rng(derive_seed(seed, *keys))


def sample_clients(num_clients: int, count: int, seed: int, round: int, attempt: int = 0) -> list[int]:
    """Return the participants of a round, sorted: a function of (seed, round, attempt).

    >>> len(sample_clients(10, 5, seed=0, round=3))
    5
    """
    generator = numpy_generator(seed, "sample", round, *[attempt] * (attempt > 0))
    return sorted(generator.choice(num_clients, count, replace=False).tolist())


@contextmanager
def isolated_randomness(seed: int, *keys: str | int) -> Iterator[None]:
    """Seed torch's global generators for the block (initialisation, dropout), then restore their state."""
    number = derive_seed(seed, *keys)
    if _has_accelerator():
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(number)
            yield
        return
    # torch.manual_seed would prepare an accelerator even if there is none, in half a millisecond
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(number)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


@cache
def _has_accelerator() -> bool:
    return any(kind.is_available() for kind in (torch.cuda, torch.backends.mps, torch.xpu))
