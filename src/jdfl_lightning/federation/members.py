"""The sites of a federation: the roster that limits them, their nodes, and the transport of payloads."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from jdfl_lightning.core.errors import InputError, plain
from jdfl_lightning.core.files import checked, read_settings
from jdfl_lightning.federation.wire import Payload, SiteInfo, read_info
from jdfl_lightning.storage.names import Count

_AGAIN = 60.0
"""Seconds after which a refused node is asked for its site info again."""


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
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


def capped(told: Sequence[int], clients: Sequence[int], listed: Sequence[bool], multiple: float) -> list[int]:
    """Return the numbers of images that count: those that are reported, at most a multiple of the median client's.

    Clients that share images have an equal part of them; those without any are left out of the median. It is the lower
    median, so that one of two clients cannot raise it.

    Args:
        told: the numbers of images that are reported, each for a client or for all clients of a site.
        clients: how many clients each is for.
        listed: whether the roster limits the site's images; it is then not capped.
        multiple: largest multiple of the median.

    >>> capped([100, 120, 2**31 - 1], [1, 1, 1], [False] * 3, 10.0), capped([100, 9000], [1, 1], [False, True], 10.0)
    ([100, 120, 1200], [100, 9000])
    """
    parts = [images / count for images, count in zip(told, clients, strict=True) for _ in range(count) if images]
    most = multiple * statistics.median_low(parts) if parts else 0.0
    each = zip(told, clients, listed, strict=True)
    return [images if known else min(images, int(most * count)) for images, count, known in each]


class Transport(ABC):
    """Sends payloads to nodes and receives their answers."""

    @abstractmethod
    def nodes(self) -> Mapping[int, str]:
        """Return the connected nodes: ids, each with its verified public key or an empty string."""

    @abstractmethod
    def send(self, payloads: Mapping[int, Payload], question: bool, seconds: float) -> dict[int, str]:
        """Send a payload to each node; return the payload's id for each.

        Args:
            payloads: the payload of each node.
            question: whether to ask nodes for their site info, not for work.
            seconds: until the payloads expire.
        """

    @abstractmethod
    def receive(self, ids: Iterable[str]) -> dict[str, Payload | str]:
        """Return, by payload id, the answers that have arrived by now, or why there will be none."""


@dataclass(eq=False)
class Federation:
    """The sites of a run: their identity, their nodes, and their open requests."""

    transport: Transport
    timeout: float
    """Seconds that a node has for an answer."""
    poll: float
    """Seconds between two polls for answers."""
    say: Callable[[str], None]
    """Shows a message to the user."""
    roster: Mapping[int, Member] | None = None
    """The sites that may take part; None if any may."""

    def __post_init__(self) -> None:
        self.limited = {site for site, member in (self.roster or {}).items() if member.images is not None}
        """Sites whose number of images the roster limits."""
        self.sites: dict[int, SiteInfo] = {}
        """The info that each site sent."""
        self._met: dict[int, int] = {}
        """The site at each node that has sent its info, in the order of arrival."""
        self._asked: dict[str, int] = {}
        """The nodes that were asked for their info, by payload id."""
        self._not_before: dict[int, float] = {}
        """Time after which a refused node may be asked again."""
        self._late: dict[int, tuple[str, float]] = {}
        """The payload that a node did not answer in time, and the time until which its answer may still arrive."""
        self._node_of: dict[int, int] = {}
        self._gathering: int | None = None
        """Number of clients to wait for before the run begins."""
        self._begun = False

    def gather(self, num_clients: int) -> list[SiteInfo]:
        """Wait until the sites of all clients are connected; return their infos, sorted by site number."""
        self._gathering = num_clients
        self.meet()
        told = -1
        while (found := sum(len(info.clients) for info in self.sites.values())) < num_clients:
            if found != told:
                self.say(f"waiting for sites: {found} of {num_clients} clients are there")
                told = found
            time.sleep(self.poll)
            self.meet()
        if found > num_clients:
            raise InputError(
                f"Expected --data.num_clients to be {found}, the clients of all sites, but got {num_clients}."
            )
        self._gathering, self._begun = None, True
        return [self.sites[site] for site in sorted(self.sites)]

    def node_of(self, site: int) -> int | None:
        """Return the node of a site, if it is connected and has no late answer."""
        node = self._node_of.get(site)
        return None if node is None or node in self._late else node

    def meet(self) -> None:
        """Find the connected nodes, ask new ones for their site info, and process the infos that have arrived."""
        present, now = self.transport.nodes(), time.monotonic()
        if self._late:
            come = self.transport.receive([payload for payload, _ in self._late.values()])
            late = {node: (payload, until) for node, (payload, until) in self._late.items() if payload not in come}
            self._late = {node: (payload, until) for node, (payload, until) in late.items() if until > now}
        new = set(present) - {*self._met, *self._asked.values()}
        new = {node for node in new if self._not_before.get(node, now) <= now}
        sent = self.transport.send({node: Payload() for node in sorted(new)}, True, self.timeout) if new else {}
        self._asked |= {payload: node for node, payload in sent.items()}
        for payload, answer in self.transport.receive(list(self._asked)).items() if self._asked else ():
            node = self._asked.pop(payload)
            try:
                if isinstance(answer, str):
                    raise InputError(answer)
                self._enter(node, read_info(answer), present)
            except InputError as error:
                self._not_before[node] = time.monotonic() + _AGAIN
                self.say(f"node {node} cannot take part: {plain(str(error))}")
        self._asked = {payload: node for payload, node in self._asked.items() if node in present}
        if self._gathering is not None:  # a site that left may come back with other clients
            self._met = {node: site for node, site in self._met.items() if node in present}
            self.sites = {site: info for site, info in self.sites.items() if site in self._met.values()}
        self._node_of = {site: node for node, site in self._met.items() if node in present}  # the newest, if several

    def _enter(self, node: int, info: SiteInfo, present: Mapping[int, str]) -> None:
        """Add a site; raise an `InputError` if it is not on the roster or conflicts with the other sites."""
        if self.roster is not None:
            if info.site not in self.roster:
                raise InputError(f"site {info.site} is not on the roster.")
            if reason := self.roster[info.site].reason_refused(info, present.get(node, "")):
                raise InputError(reason)
        taken = [other for other, site in self._met.items() if site == info.site and other in {*present} - {node}]
        if taken:
            raise InputError(f"site {info.site} is there already, as node {taken[0]}: look at partition-id.")
        if not info.own and self._gathering is not None and max(info.clients) >= self._gathering:
            raise InputError(f"it has a client {max(info.clients)} but there are {self._gathering}.")
        before = self.sites.get(info.site)
        if before is None and self._begun:
            raise InputError(f"site {info.site} comes too late: the run has begun without it.")
        if before is not None and replace(before, version="") != replace(info, version=""):
            raise InputError(f"site {info.site} had other clients or images, or its number is taken.")
        for other in self.sites.values():
            if (other.classes, other.own) != (info.classes, info.own):
                raise InputError(f"its classes {info.classes} are not those of site {other.site}, {other.classes}.")
            if not info.own and other.site != info.site and set(other.clients) & set(info.clients):
                raise InputError(f"it has clients that site {other.site} has too: look at num-partitions.")
            if not info.own and other.fingerprint != info.fingerprint:
                raise InputError(f"its copy of the data set is not that of site {other.site}.")
        if others := [other for other in self.sites.values() if other.version != info.version]:
            self.say(f"site {info.site} has {info.version}, site {others[0].site} {others[0].version}")
        self.sites[info.site] = info
        self._met.pop(node, None)
        self._met[node] = info.site
        self.say(f"site {info.site}: {len(info.clients)} clients, {sum(info.sizes)} images to train on")

    def hear(self, node: int, payload: str, until: float) -> Payload | str:
        """Wait for the answer to a payload; return it, or why there is none."""
        while True:
            if payload in (come := self.transport.receive([payload])):
                answer = come[payload]
                return plain(answer) if isinstance(answer, str) else answer
            if time.monotonic() > until:
                self._late[node] = payload, until + self.timeout
                return f"its site did not answer within {self.timeout:g} s"
            time.sleep(self.poll)
