"""The roster of a federation: the sites that may take part, and limits on the sizes they report."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.files import checked, read_settings
from jdfl_lightning.federation.wire import SiteInfo
from jdfl_lightning.storage.names import Count


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Member:
    """A site on the roster; a field that is None is not checked."""

    key: Annotated[str, Field(pattern=r"^\S+ \S+")] | None = None
    """Its public key: the line in the ``.pub`` file that ``ssh-keygen`` wrote."""
    clients: Annotated[int, Field(ge=1)] | None = None
    """Largest number of clients."""
    images: Annotated[int, Field(ge=1)] | None = None
    """Largest number of images, training and held-out together."""

    def reason_refused(self, info: SiteInfo, key: str) -> str | None:
        """Return why a site with this info, at a node with this key, is not the one listed; None if it is."""
        if self.key is not None and _parts(key) != _parts(self.key):
            return f"site {info.site} has another key in the roster."
        claims = {"clients": len(info.clients), "images": sum(info.sizes) + sum(info.held)}
        for what, claim in claims.items():
            most = getattr(self, what)
            if most is not None and claim > most:
                return f"site {info.site} says that it has {claim} {what}, the roster says {most}."
        return None


def _parts(key: str) -> list[str]:
    """Return kind and value of a public key, without the comment that may follow."""
    return key.split()[:2]


def read_roster(file: str) -> dict[int, Member]:
    """Read a roster: a YAML or JSON file of site numbers, each with any of ``key``, ``clients`` and ``images``."""
    try:
        found = checked(dict[Count, Member | None], read_settings(Path(file), aliases=True))
    except (OSError, ValueError) as error:
        raise InputError(f"Expected --backend.roster to be a file of sites but {file} is not: {error}.") from error
    if not found:
        raise InputError(f"Expected --backend.roster to be a file of sites but {file} has none.")
    return {number: member or Member() for number, member in found.items()}


def capped(sizes: Sequence[int], listed: Sequence[bool], multiple: float) -> list[int]:
    """Return each client's weight in images: the number it reports, at most a multiple of the median.

    It is the lower median, so that one of two clients cannot raise it.

    Args:
        sizes: the number of images reported for each client.
        listed: for each client, whether the roster limits its site's images; it is then not capped.
        multiple: largest multiple of the median.

    >>> capped([100, 120, 2**31 - 1], [False] * 3, 10.0), capped([100, 9000], [False, True], 10.0)
    ([100, 120, 1200], [100, 9000])
    """
    most = max(1, int(multiple * statistics.median_low(sizes)))
    return [size if known else min(size, most) for size, known in zip(sizes, listed, strict=True)]


def capped_held(sites: Sequence[SiteInfo], listed: Collection[int], multiple: float) -> dict[int, int]:
    """Return each site's weight in held-out images: the number it reports, at most a multiple of the median.

    The median is over all clients, each with an equal share of its site's images; sites without any are left out.

    Args:
        sites: the sites' infos.
        listed: the sites whose images the roster limits; they are not capped.
        multiple: largest multiple of the median, for each client of a site.
    """
    told = {info.site: sum(info.held) for info in sites}
    parts = [told[info.site] / len(info.clients) for info in sites for _ in info.clients if told[info.site]]
    most = multiple * statistics.median_low(parts) if parts else 0.0
    return {
        info.site: told[info.site] if info.site in listed else min(told[info.site], int(most * len(info.clients)))
        for info in sites
    }
