"""Secret randomness and the accounting of differential privacy: pure functions of a key and of numbers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from jdfl_lightning.core.errors import InputError

KEY_BYTES = 32
"""Length of a key: 256 bits."""

STEPS = 2.0**24
"""Steps of the grid in one standard deviation of the noise."""

_BLOCK = 1 << 18
"""Numbers generated at once, which fit into the processor's cache."""


def keyed_bytes(key: bytes, size: int, purpose: str, *where: str | int) -> bytes:
    """Return pseudo-random bytes: SHAKE-256 of the key, the purpose and `where`.

    The key has a fixed length and comes first; the rest is encoded without ambiguity. Without the key, the bytes of
    one purpose and place reveal nothing about those of another.

    >>> keyed_bytes(bytes(KEY_BYTES), 4, "noise", 1) == keyed_bytes(bytes(KEY_BYTES), 8, "noise", 1)[:4]
    True
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"Expected argument `key` to have {KEY_BYTES} bytes but got {len(key)}.")
    return hashlib.shake_256(key + json.dumps([purpose, *where]).encode()).digest(size)


def secret_sample(key: bytes, num_clients: int, count: int, *where: str | int) -> list[int]:
    """Return a sample of the clients, sorted; without the key, all samples are equally likely.

    >>> len(secret_sample(bytes(KEY_BYTES), 10, 5, 3))
    5
    """
    ranks = np.frombuffer(keyed_bytes(key, 8 * num_clients, "sample", *where), dtype="<u8")
    return sorted(np.argsort(ranks, kind="stable")[:count].tolist())


def gaussian(key: bytes, count: int, *where: str | int) -> np.ndarray:
    """Return standard normal numbers of double precision (Box and Muller, 1958).

    The radius uses all 64 bits of a random word on both sides of its median, so it is fine-grained in the tail (up to
    9.5) and near 0.
    """
    numbers = np.empty(count)
    for start in range(0, count, _BLOCK):
        part = numbers[start : start + _BLOCK]
        pairs = (len(part) + 1) // 2
        words = np.frombuffer(keyed_bytes(key, 16 * pairs, "noise", *where, start), dtype="<u8")
        first, second = words[:pairs], words[pairs:]
        lower, upper = (first + 0.5) * 2.0**-64, (~first + 0.5) * 2.0**-64  # u and 1 - u, each exact where it is small
        radius = np.sqrt(-2 * np.where(first < 2**63, np.log(lower), np.log1p(-np.minimum(upper, 0.5))))
        angle = (2 * math.pi * 2.0**-64) * second
        part[:pairs] = radius * np.cos(angle)
        part[pairs:] = (radius * np.sin(angle))[: len(part) - pairs]
    return numbers


def grid_noise(key: bytes, count: int, *where: str | int) -> Tensor:
    """Return Gaussian noise of standard deviation `STEPS`, rounded to integers."""
    return torch.from_numpy(np.rint(STEPS * gaussian(key, count, *where)))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a collision-resistant checksum of tensors of double precision."""
    found = hashlib.blake2b(digest_size=32)
    for name, tensor in tensors.items():
        found.update(json.dumps([name, *tensor.shape]).encode())
        found.update(tensor.contiguous().numpy().data)
    return found.hexdigest()


@cache
def spent_epsilon(noise_multiplier: float, delta: float, num_clients: int, per_round: int, rounds: int) -> float:
    """Return epsilon after some rounds, by Renyi accounting of sampling without replacement.

    Neighbouring federations differ in one client's data, so that a round's sum changes by at most 2 C: the noise is
    z / 2 in units of that. Who took part must be secret if not all did.
    """
    try:
        from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent, SelfComposedDpEvent
        from dp_accounting.privacy_accountant import NeighboringRelation
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise InputError("Expected dp-accounting for PrivateFedAvg: pip install 'jdfl-lightning[privacy]'.") from error
    event = GaussianDpEvent(noise_multiplier / 2)
    if per_round < num_clients:
        event = SampledWithoutReplacementDpEvent(num_clients, per_round, event)
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(SelfComposedDpEvent(event, rounds))
    return float(accountant.get_epsilon(delta))
