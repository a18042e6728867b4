"""Who may take part in a federation, and how much a site may say that it has."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from jdfl_lightning.errors import InputError
from jdfl_lightning.federation.wire import Facts


@dataclass(frozen=True)
class Member:
    """What is known of a site beforehand; nothing is asked of what is not given."""

    key: str | None = None
    """Its public key, as ``ssh-keygen`` wrote it."""
    clients: int | None = None
    """The most clients that it has."""
    images: int | None = None
    """The most images that it has, to train and to test on."""

    def reason_refused(self, facts: Facts, key: str) -> str | None:
        """Return why a site that says this of itself, at a node with this key, is not the one listed; or nothing."""
        if self.key is not None and _parts(key) != _parts(self.key):
            return f"site {facts.site} has another key in the roster."
        claims = {"clients": len(facts.clients), "images": sum(facts.sizes) + sum(facts.held)}
        for what, claim in claims.items():
            most = getattr(self, what)
            if most is not None and claim > most:
                return f"site {facts.site} says that it has {claim} {what}, the roster says {most}."
        return None


def _parts(key: str) -> list[str]:
    """Return kind and value of a public key, without the comment that may follow."""
    return key.split()[:2]


def read_roster(file: str) -> dict[int, Member]:
    """Read a roster: a YAML or JSON file of numbers of sites, each with some of ``key``, ``clients`` and ``images``."""
    try:
        content = yaml.safe_load(Path(file).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(
            f"Expected --backend.roster to be a file of sites but {file} cannot be read: {error}"
        ) from error
    if not isinstance(content, dict) or not content:
        raise InputError(f"Expected --backend.roster to be a file of sites by their numbers but {file} has none.")
    return {_number(number, file): _member(number, entry, file) for number, entry in content.items()}


def _number(value: Any, file: str) -> int:
    try:
        number = int(value)  # JSON knows no other keys than texts
    except (TypeError, ValueError):
        number = -1
    if number < 0 or isinstance(value, (bool, float)):
        raise InputError(f"Expected the sites in {file} to be numbers from 0 but got {value!r}.")
    return number


def _member(number: Any, entry: Any, file: str) -> Member:
    entry = {} if entry is None else entry
    known = [field.name for field in fields(Member)]
    if not isinstance(entry, dict) or set(entry) - {*known}:
        raise InputError(f"Expected site {number} in {file} to have {', '.join(known)} but got {entry!r}.")
    for what in ("clients", "images"):
        value = entry.get(what)
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"Expected {what} of site {number} in {file} to be a number above 0 but got {value!r}.")
    key = entry.get("key")
    if key is not None and (not isinstance(key, str) or len(_parts(key)) != 2):
        raise InputError(f"Expected key of site {number} in {file} to be the line in its .pub file but got {key!r}.")
    return Member(**entry)


def capped(sizes: Sequence[int], listed: Sequence[bool], multiple: float) -> list[int]:
    """Return for how many images each client counts: those it says, but no more than a multiple of the median.

    The median is the lower one of two, so that one of two clients cannot move it.

    Args:
        sizes: what the clients' sites say.
        listed: whether the roster has the number of images of a client's site, which is limit enough.
        multiple: of the median.

    >>> capped([100, 120, 2**31 - 1], [False] * 3, 10.0), capped([100, 9000], [False, True], 10.0)
    ([100, 120, 1200], [100, 9000])
    """
    most = max(1, int(multiple * statistics.median_low(sizes)))
    return [size if known else min(size, most) for size, known in zip(sizes, listed, strict=True)]
