"""A short random sketch of a long vector: made at the client, so that only the sketch is sent."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from jdfl_lightning.core.seeding import numpy_generator

BLOCKS = 4
"""Number of times that every entry of a vector occurs in its sketch."""


def sketch(vector: Tensor, dim: int, seed: int) -> Tensor:
    r"""Project a vector to few dimensions, approximately preserving cosines.

    The sketch has `BLOCKS` blocks. For each of them the entries of the vector get random signs, are put into random
    order and dealt in turn to the block's dim / BLOCKS places, where they are summed: a sparse projection with `BLOCKS`
    entries of :math:`\pm 1 / \sqrt{\mathrm{BLOCKS}}` for each entry of the vector, never none. Inner products are
    preserved in expectation; for unit vectors the variance is at most about 2 / dim.

    Args:
        vector: (D,).
        dim: length of the sketch, a multiple of `BLOCKS`.
        seed: must be the same for all vectors to compare.

    >>> x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    >>> short = sketch(x, 400, seed=0)
    >>> short.shape, bool(abs(short.norm() / x.norm() - 1) < 0.1)
    (torch.Size([400]), True)
    """
    if dim < BLOCKS or dim % BLOCKS:
        raise ValueError(f"Expected argument `dim` to be a positive multiple of {BLOCKS} but got {dim}.")
    entries = vector.double().numpy()
    places = dim // BLOCKS
    rows = -(-len(entries) // places)
    dealt = np.zeros(rows * places)
    blocks = []
    for order, signs in _plan(len(entries), dim, seed):
        np.multiply(np.take(entries, order, mode="clip"), signs, out=dealt[: len(entries)])
        blocks.append(dealt.reshape(rows, places).sum(axis=0))
    return torch.from_numpy(np.concatenate(blocks) / BLOCKS**0.5).float()


@lru_cache(maxsize=1)
def _plan(length: int, dim: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return order and signs of the entries for each block; cached, as a process makes one kind of sketch."""
    rng = numpy_generator(seed, "sketch", length, dim)
    signs = np.array([-1.0, 1.0], dtype=np.float32)
    return [(rng.permutation(length), signs[rng.integers(0, 2, length, dtype=np.int8)]) for _ in range(BLOCKS)]
