"""How M, the number of pseudo-domains, is chosen: by the elbow, by the silhouette, or by a class of your own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from jdfl_lightning.core.errors import require_choice, require_type, require_types

VISIBLE = 0.05
"""Threshold for structure: on the depth of the inertia curve below its chord, as a share of its fall, and on the
silhouette. Random directions in 1,000 dimensions or more stay below both."""
_FEWEST = 4
"""Smallest number of clients for an elbow."""


@dataclass(frozen=True)
class Clusterings:
    """The clusterings that were tried, by their number of pseudo-domains."""

    count: int
    """Number of clients."""
    inertias: Mapping[int, float]
    """Sum of squared distances to the centroids, for each M."""
    silhouettes: Mapping[int, float] = field(default_factory=dict)
    """Mean silhouette, for each M from 2 that has one."""


def elbow(inertias: Mapping[int, float]) -> int | None:
    """Return the M where the curve of inertias bends most: farthest below the chord from its first to its last point.

    Clients that are all equally far from each other have a straight curve: merging any two adds the same inertia. So
    the depth below the chord, as a share of the curve's fall, measures structure. If it is less than `VISIBLE`, there
    is no elbow.

    >>> elbow({1: 10.0, 2: 6.0, 3: 2.0, 4: 1.5, 5: 1.0})
    3
    >>> elbow({1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0, 5: 0.0}) is None
    True
    """
    ms = np.array(list(inertias), dtype=float)
    values = np.array(list(inertias.values()))
    if len(ms) < 3 or values[0] <= values[-1]:
        return None
    depth = (ms[-1] - ms) / (ms[-1] - ms[0]) - (values - values[-1]) / (values[0] - values[-1])
    return int(ms[depth.argmax()]) if depth.max() >= VISIBLE else None


def other_elbows(inertias: Mapping[int, float]) -> dict[int, int]:
    """Return, for every shorter curve on which the elbow would be elsewhere, its last M and its elbow.

    The chord ends at the last M that was tried, so where the elbow lies may depend on that.

    >>> other_elbows({1: 10.0, 2: 6.0, 3: 2.0, 4: 1.5, 5: 1.0})
    {}
    >>> other_elbows({1: 10.0, 2: 5.0, 3: 4.0, 4: 1.0, 5: 0.9, 6: 0.8})
    {4: 2, 5: 2}
    """
    whole = elbow(inertias)
    found = {}
    for last in list(inertias)[2:-1]:
        shorter = elbow({m: value for m, value in inertias.items() if m <= last})
        if shorter is not None and shorter != whole and (whole is None or whole <= last):
            found[last] = shorter
    return found


def best_silhouette(silhouettes: Mapping[int, float]) -> int | None:
    """Return the M with the highest silhouette, if that is at least `VISIBLE`.

    >>> best_silhouette({2: 0.1, 3: 0.3, 4: 0.2}), best_silhouette({2: 0.01})
    (3, None)
    """
    best = max(silhouettes, key=silhouettes.__getitem__, default=None)
    return best if best is not None and silhouettes[best] >= VISIBLE else None


@dataclass(frozen=True)
class Criterion(ABC):
    """How M is chosen among the numbers of pseudo-domains that were tried."""

    short: ClassVar[str] = ""
    """Short name on the command line; the class's name if it has none."""

    def __post_init__(self) -> None:
        require_types(self, "--clustering.criterion.")

    @property
    def name(self) -> str:
        """Short name, or the name of the class."""
        return self.short or type(self).__name__

    @abstractmethod
    def choose(self, tried: Clusterings) -> tuple[int | None, str]:
        """Return M and a remark; None and the reason if it sees no structure, so that the silhouette decides."""

    @classmethod
    def short_names(cls) -> dict[str, type[Criterion]]:
        """Return the criteria of this package, by their short names."""
        return {known.short: known for known in (Elbow, Silhouette)}

    @classmethod
    def of(cls, value: Criterion | str) -> Criterion:
        """Return a criterion, which may be given by its short name."""
        if isinstance(value, str):
            require_choice("--clustering.criterion", value, list(cls.short_names()))
            return cls.short_names()[value]()
        require_type("--clustering.criterion", value, Criterion)
        return value


@dataclass(frozen=True)
class Elbow(Criterion):
    """The M where the curve of inertias bends most."""

    short: ClassVar[str] = "elbow"

    def choose(self, tried: Clusterings) -> tuple[int | None, str]:
        """Return the elbow of the curve of inertias."""
        if tried.count < _FEWEST:
            return None, f"{tried.count} clients are too few for an elbow"
        m = elbow(tried.inertias)
        return m, "" if m is not None else "no elbow is visible"


@dataclass(frozen=True)
class Silhouette(Criterion):
    """The M with the highest silhouette."""

    short: ClassVar[str] = "silhouette"

    def choose(self, tried: Clusterings) -> tuple[int | None, str]:
        """Return the M with the highest silhouette."""
        m = best_silhouette(tried.silhouettes)
        return m, "" if m is not None else "no silhouette says that there are several"
