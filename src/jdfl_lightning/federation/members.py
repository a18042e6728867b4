"""The sites of a federation: who they are, at which node each is, and how letters reach them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from jdfl_lightning.core.errors import InputError, plain
from jdfl_lightning.federation.roster import Member
from jdfl_lightning.federation.wire import Facts, Letter, read_facts

_AGAIN = 60.0
"""Seconds after which a node that cannot take part is asked again who it is."""


class Mail(ABC):
    """How letters travel to nodes and back."""

    @abstractmethod
    def nodes(self) -> Mapping[int, str]:
        """Return the nodes that are there: ids, each with the public key that it has proved, or an empty text."""

    @abstractmethod
    def send(self, letters: Mapping[int, Letter], question: bool, seconds: float) -> dict[int, str]:
        """Send a letter to each node; return its id for each.

        Args:
            letters: by node.
            question: whether nodes are asked who they are, instead of to work.
            seconds: until the letters expire.
        """

    @abstractmethod
    def receive(self, ids: Iterable[str]) -> dict[str, Letter | str]:
        """Return the answers to some letters that have come by now, or why there is none; by the letters' ids."""


class Federation:
    """The sites of a run: who they are, at which node each is, and what they have been asked.

    Args:
        mail: how they are reached.
        timeout: seconds that a node has for an answer.
        poll: seconds from one look for answers to the next.
        say: tells the user.
        roster: the sites that may take part; none if any may.
    """

    def __init__(
        self,
        mail: Mail,
        timeout: float,
        poll: float,
        say: Callable[[str], None],
        roster: Mapping[int, Member] | None = None,
    ) -> None:
        self.mail, self.timeout, self.poll, self.say, self.roster = mail, timeout, poll, say, roster
        self.limited = {site for site, member in (roster or {}).items() if member.images is not None}
        """Sites whose number of images the roster limits."""
        self.sites: dict[int, Facts] = {}
        """What each site said of itself."""
        self._met: dict[int, int] = {}
        """The site at each node that has said who it is, in the order that they did."""
        self._asked: dict[str, int] = {}
        """The nodes that were asked who they are, by the letter."""
        self._not_before: dict[int, float] = {}
        """When nodes that cannot take part may be asked again."""
        self._late: dict[int, tuple[str, float]] = {}
        """The letter that a node did not answer in time, and until when that may still come."""
        self._node_of: dict[int, int] = {}
        self._gathering: int | None = None
        """Clients that are waited for, before the run begins."""
        self._begun = False

    def gather(self, num_clients: int) -> list[Facts]:
        """Wait until the sites of all clients are there; return what they say, in the order of their numbers."""
        self._gathering = num_clients
        self.meet()
        told = -1
        while (found := sum(len(facts.clients) for facts in self.sites.values())) < num_clients:
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
        """Return the node of a site, if it is there and has answered all that it was asked."""
        node = self._node_of.get(site)
        return None if node is None or node in self._late else node

    def meet(self) -> None:
        """Look who is there, ask nodes that are new who they are, and hear those that were asked."""
        present, now = self.mail.nodes(), time.monotonic()
        if self._late:
            come = self.mail.receive([letter for letter, _ in self._late.values()])
            late = {node: (letter, until) for node, (letter, until) in self._late.items() if letter not in come}
            self._late = {node: (letter, until) for node, (letter, until) in late.items() if until > now}
        new = set(present) - {*self._met, *self._asked.values()}
        new = {node for node in new if self._not_before.get(node, now) <= now}
        sent = self.mail.send({node: Letter() for node in sorted(new)}, True, self.timeout) if new else {}
        self._asked |= {letter: node for node, letter in sent.items()}
        for letter, answer in self.mail.receive(list(self._asked)).items() if self._asked else ():
            node = self._asked.pop(letter)
            try:
                if isinstance(answer, str):
                    raise InputError(answer)
                self._enter(node, read_facts(answer), present)
            except InputError as error:
                self._not_before[node] = time.monotonic() + _AGAIN
                self.say(f"node {node} cannot take part: {plain(str(error))}")
        self._asked = {letter: node for letter, node in self._asked.items() if node in present}
        if self._gathering is not None:  # a site that has gone may come back as another
            self._met = {node: site for node, site in self._met.items() if node in present}
            self.sites = {site: facts for site, facts in self.sites.items() if site in self._met.values()}
        self._node_of = {site: node for node, site in self._met.items() if node in present}  # the newest, if several

    def _enter(self, node: int, facts: Facts, present: Mapping[int, str]) -> None:
        """Take in a site, unless it is not on the roster or does not fit those that are there."""
        if self.roster is not None:
            if facts.site not in self.roster:
                raise InputError(f"site {facts.site} is not on the roster.")
            if reason := self.roster[facts.site].reason_refused(facts, present.get(node, "")):
                raise InputError(reason)
        taken = [other for other, site in self._met.items() if site == facts.site and other in {*present} - {node}]
        if taken:
            raise InputError(f"site {facts.site} is there already, as node {taken[0]}: look at partition-id.")
        if not facts.own and self._gathering is not None and max(facts.clients) >= self._gathering:
            raise InputError(f"it has a client {max(facts.clients)} but there are {self._gathering}.")
        before = self.sites.get(facts.site)
        if before is None and self._begun:
            raise InputError(f"site {facts.site} comes too late: the run has begun without it.")
        if before is not None and replace(before, version="") != replace(facts, version=""):
            raise InputError(f"site {facts.site} had other clients or images, or its number is taken.")
        for other in self.sites.values():
            if (other.classes, other.own) != (facts.classes, facts.own):
                raise InputError(f"its classes {facts.classes} are not those of site {other.site}, {other.classes}.")
            if not facts.own and other.site != facts.site and set(other.clients) & set(facts.clients):
                raise InputError(f"it has clients that site {other.site} has too: look at num-partitions.")
            if not facts.own and other.fingerprint != facts.fingerprint:
                raise InputError(f"its copy of the data set is not that of site {other.site}.")
        if others := [other for other in self.sites.values() if other.version != facts.version]:
            self.say(f"site {facts.site} has {facts.version}, site {others[0].site} {others[0].version}")
        self.sites[facts.site] = facts
        self._met.pop(node, None)
        self._met[node] = facts.site
        self.say(f"site {facts.site}: {len(facts.clients)} clients, {sum(facts.sizes)} images to train on")

    def hear(self, node: int, letter: str, until: float) -> Letter | str:
        """Wait for the answer to a letter; return it, or why there is none."""
        while True:
            if letter in (come := self.mail.receive([letter])):
                answer = come[letter]
                return plain(answer) if isinstance(answer, str) else answer
            if time.monotonic() > until:
                self._late[node] = letter, until + self.timeout
                return f"its site did not answer within {self.timeout:g} s"
            time.sleep(self.poll)
