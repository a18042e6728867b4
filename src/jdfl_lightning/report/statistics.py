"""Means over seeds, and differences with their confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

CONFIDENCE = 0.95
ROUNDING = 1e-9
"""Tolerance of an accuracy: far below one test image, far above rounding errors."""


@dataclass(frozen=True)
class Spread:
    """Values of several seeds."""

    mean: float
    std: float | None
    """Sample standard deviation; None for one seed, or if a value is not finite."""
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Return mean and sample standard deviation; the mean is NaN if there is no value, or one is not finite.

    >>> spread([0.25, 0.5, 0.75])
    Spread(mean=0.5, std=0.25, count=3)
    """
    if not values or not all(map(math.isfinite, values)):
        return Spread(math.nan, None, len(values))
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Difference:
    """A method's accuracy minus the baseline's, seed by seed."""

    mean: float
    low: float | None
    """Ends of the 95 % interval; None for one seed, or if all seeds have the same difference."""
    high: float | None
    seeds: tuple[int, ...]

    @property
    def verdict(self) -> str:
        """The conclusion in words: only an interval above 0 is called a gain."""
        if self.low is None or self.high is None:
            return "one seed: not judged" if len(self.seeds) == 1 else "no spread: not judged"
        if self.low > 0:
            return "gain"
        return "loss" if self.high < 0 else "undecided"


def paired_difference(values: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Return the mean difference over the seeds that both have, with its Student-t interval; None if none is shared.

    With d the n differences and s their sample standard deviation, the interval is mean(d) -+ t s / sqrt(n), where t is
    the 97.5 % quantile of Student's distribution with n - 1 degrees of freedom. If all seeds differ by
    the same, there is no interval: as accuracies are counts, this is chance, and a zero width would make it a gain.

    >>> paired_difference({0: 0.25, 1: 0.75}, {1: 0.5})
    Difference(mean=0.25, low=None, high=None, seeds=(1,))
    """
    seeds = tuple(sorted(set(values) & set(base)))
    if not seeds:
        return None
    found = spread([values[seed] - base[seed] for seed in seeds])
    if found.std is None or found.std < ROUNDING:
        return Difference(found.mean, None, None, seeds)
    half = float(stdtrit(found.count - 1, (1 + CONFIDENCE) / 2)) * found.std / math.sqrt(found.count)
    return Difference(found.mean, found.mean - half, found.mean + half, seeds)
