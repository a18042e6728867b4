"""What the server of a federation does: meets the sites, sends them their tasks, and puts their answers together."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from jdfl_lightning.backends import Backend, Runner
from jdfl_lightning.checkpoint import ClientStates, write_whole
from jdfl_lightning.config import Experiment, as_dict
from jdfl_lightning.data.base import Roster
from jdfl_lightning.display import Display
from jdfl_lightning.errors import InputError, StorageError, require
from jdfl_lightning.evaluation import Counts, Evaluation, Scores
from jdfl_lightning.experiment import fit
from jdfl_lightning.federation.wire import (
    Answer,
    Facts,
    Letter,
    Orders,
    Request,
    read_answer,
    read_facts,
    write_orders,
    write_request,
)
from jdfl_lightning.messages import DISCOVERY, FitFailure, FitResult, FitTask
from jdfl_lightning.resume import find_run, fixed_settings
from jdfl_lightning.run_folder import Run
from jdfl_lightning.tensors import Tensors

_RUN = "federation.json"
"""File of a run folder that names the run for its sites."""
_PRECISIONS = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
"""Types that training leaves weights in, if not in the one that they were sent in."""
_AGAIN = 60.0
"""Seconds after which a node that cannot take part is asked again who it is."""


class Mail(ABC):
    """How letters travel to nodes and back."""

    @abstractmethod
    def nodes(self) -> set[int]:
        """Return the ids of the nodes that are there."""

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


@dataclass
class SitesBackend(Backend):
    """Clients at sites that keep their images, and their clients' states, and are reached by messages."""

    timeout: float = 1800.0
    """Seconds that a site has for an answer; one that takes longer is absent from the round."""
    poll: float = 0.5
    """Seconds from one look for answers to the next."""
    federation: Federation | None = field(default=None, init=False, repr=False, compare=False)

    states_here = False

    def __post_init__(self) -> None:
        require(self.timeout > 0, "--backend.timeout", "positive", self.timeout)
        require(self.poll > 0, "--backend.poll", "positive", self.poll)

    @contextmanager
    def open(self, experiment: Experiment, states: ClientStates) -> Iterator[Runner]:
        """Name the run for the sites, as it was named before if it is continued."""
        if self.federation is None:
            raise InputError("Expected SitesBackend to be used by the server of a federation: see docs/flower.md.")
        file = states.folder.parent / _RUN
        if not file.exists():
            write_whole(file, json.dumps({"run": secrets.token_hex(16)}).encode())
        try:
            run = str(json.loads(file.read_text())["run"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"Expected the name of the run but {file} cannot be read: {error!r}.") from error
        yield SitesRunner(experiment, self.federation, run)


def fit_federation(experiment: Experiment, mail: Mail, display: Display) -> Run:
    """Wait for the sites of a run, then train with them; `fit` with images that are elsewhere.

    Args:
        experiment: the settings; its data's ``num_clients`` is the number of clients to wait for.
        mail: how sites are reached.
        display: where progress is shown.
    """
    find_run(experiment)  # what is wrong with the settings is told before anybody is waited for
    backend = experiment.backend if isinstance(experiment.backend, SitesBackend) else SitesBackend()
    backend.federation = Federation(mail, backend, display.say)
    data, sites = experiment.data, backend.federation.gather(experiment.data.num_clients)
    by_client = [pair for facts in sites for pair in zip(facts.clients, facts.sizes, strict=True)]
    sizes = [size for _, size in (by_client if sites[0].own else sorted(by_client))]
    digest = hashlib.blake2b(digest_size=16)
    for facts in sites:
        digest.update(f"{facts.site} {facts.fingerprint}\n".encode())
    data.class_names = tuple(sites[0].classes)
    data.domain_names = tuple(dict.fromkeys(name for facts in sites for name in facts.domains))
    data.roster = Roster(sizes, digest.hexdigest())
    return fit(replace(experiment, backend=backend), display)


class Federation:
    """The sites of a run: who they are, at which node each is, and what they have been asked.

    Args:
        mail: how they are reached.
        backend: how long to wait.
        say: tells the user.
    """

    def __init__(self, mail: Mail, backend: SitesBackend, say: Callable[[str], None]) -> None:
        self.mail, self.backend, self.say = mail, backend, say
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
            time.sleep(self.backend.poll)
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
        new = present - {*self._met, *self._asked.values()}
        new = {node for node in new if self._not_before.get(node, now) <= now}
        sent = self.mail.send({node: Letter() for node in sorted(new)}, True, self.backend.timeout) if new else {}
        self._asked |= {letter: node for node, letter in sent.items()}
        for letter, answer in self.mail.receive(list(self._asked)).items() if self._asked else ():
            node = self._asked.pop(letter)
            try:
                if isinstance(answer, str):
                    raise InputError(answer)
                self._enter(node, read_facts(answer), present)
            except InputError as error:
                self._not_before[node] = time.monotonic() + _AGAIN
                self.say(f"node {node} cannot take part: {error}")
        self._asked = {letter: node for letter, node in self._asked.items() if node in present}
        if self._gathering is not None:  # a site that has gone may come back as another
            self._met = {node: site for node, site in self._met.items() if node in present}
            self.sites = {site: facts for site, facts in self.sites.items() if site in self._met.values()}
        self._node_of = {site: node for node, site in self._met.items() if node in present}  # the newest, if several

    def _enter(self, node: int, facts: Facts, present: set[int]) -> None:
        """Take in a site, unless it does not fit those that are there."""
        taken = [other for other, site in self._met.items() if site == facts.site and other in present - {node}]
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
            if other.version != facts.version:
                self.say(f"site {facts.site} has {facts.version}, site {other.site} {other.version}")
        self.sites[facts.site] = facts
        self._met.pop(node, None)
        self._met[node] = facts.site
        self.say(f"site {facts.site}: {len(facts.clients)} clients, {sum(facts.sizes)} images to train on")

    def hear(self, node: int, letter: str, until: float) -> Letter | str:
        """Wait for the answer to a letter; return it, or why there is none."""
        while True:
            if letter in (come := self.mail.receive([letter])):
                return come[letter]
            if time.monotonic() > until:
                self._late[node] = letter, until + self.backend.timeout
                return f"its site did not answer within {self.backend.timeout:g} s"
            time.sleep(self.backend.poll)


class _Judging:
    """An evaluation that waits for the sites' counts."""

    def __init__(self, models: Mapping[str, Tensors], buffers: Tensors, done: Callable[[Evaluation], None]) -> None:
        self.models, self.buffers, self.done = models, buffers, done
        self.sent = False
        self.awaited: list[_Sent] = []
        """What was sent to sites that have no task beside it."""
        self._counts: dict[str, Counts] = {name: {} for name in models}
        self._seconds = 0.0

    def add(self, answer: Answer) -> None:
        """Add a site's counts."""
        self._seconds = max(self._seconds, answer.seconds)
        for name in self.models:
            for domain, (right, seen) in answer.counts.get(name, {}).items():
                before = self._counts[name].get(domain, (0, 0))
                self._counts[name][domain] = before[0] + right, before[1] + seen

    def tell(self, domains: Sequence[str]) -> None:
        """Tell the scores; domains whose sites did not answer have none."""
        scores = {
            name: Scores.of({domain: counts.get(domain, (0, 0)) for domain in domains})
            for name, counts in self._counts.items()
        }
        self.done(Evaluation(scores, self._seconds))


@dataclass(frozen=True)
class _Sent:
    """A letter on its way."""

    site: int
    node: int
    letter: str
    until: float
    tasks: dict[int, FitTask]
    """By client."""

    @property
    def clients(self) -> list[int]:
        """Those of its tasks."""
        return list(self.tasks)


def _sent(task: FitTask, name: str) -> torch.dtype | None:
    """Return the type that a tensor was sent in, if it was."""
    tensor = task.weights.get(name, task.buffers.get(name))
    return None if tensor is None else tensor.dtype


class SitesRunner(Runner):
    """Sends a round's tasks to the sites, with the last round's model to judge, and waits for them in order.

    Args:
        experiment: the run's settings.
        federation: its sites.
        run: name of the run, by which a site finds its clients' states.
    """

    def __init__(self, experiment: Experiment, federation: Federation, run: str) -> None:
        self._experiment, self._federation, self._run = experiment, federation, run
        self._settings = json.dumps(fixed_settings(as_dict(experiment)))
        self._judging: _Judging | None = None
        self._begun = False
        self._first: dict[int, int] = {}
        self._site_of: dict[int, int] = {}
        number = 0
        for site, facts in sorted(federation.sites.items()):
            self._first[site] = number if facts.own else 0
            clients = [number + client for client in facts.clients] if facts.own else facts.clients
            self._site_of |= dict.fromkeys(clients, site)
            number += len(facts.clients)

    def fit(self, tasks: Sequence[FitTask]) -> Iterator[FitResult | FitFailure]:
        """Send every site its tasks at once; take the answers in the order of the tasks, one site's at a time."""
        if not tasks:
            return
        discovery = (
            tasks[0].round == DISCOVERY and not self._begun
        )  # which decides for all rounds: nobody should miss it
        self._begun = True
        needed = len(tasks) if discovery else min(self._experiment.min_clients, len(tasks))
        self._await_sites([self._site_of[task.client] for task in tasks], needed)
        judging = self._judging
        if judging is not None and judging.sent:
            judging = None
        sent = self._send(tasks, judging)
        results: dict[int, FitResult | FitFailure] = {}
        for task in tasks:
            site = self._site_of[task.client]
            if task.client not in results and site in sent:
                answer = self._take(sent.pop(site))
                results |= {result.client: result for result in answer.results}
                if judging is not None:
                    judging.add(answer)
            absent = FitFailure(task.client, f"its site, {site}, is not there or still at an earlier task")
            yield results.pop(task.client, absent)

    def _await_sites(self, sites: Sequence[int], needed: int) -> None:
        """Look who is there; where that is too few for the round to count, wait for them to come back."""
        self._federation.meet()
        told = False
        until = time.monotonic() + self._federation.backend.timeout
        while sum(self._federation.node_of(site) is not None for site in sites) < needed:
            if not told:
                self._federation.say("waiting for sites to come back: too few of this round's are there")
                told = True
            if time.monotonic() > until:
                return
            time.sleep(self._federation.backend.poll)
            self._federation.meet()

    def _send(self, tasks: Sequence[FitTask], judging: _Judging | None) -> dict[int, _Sent]:
        """Send tasks, and models to all sites; return the letters with tasks, by site."""
        own: dict[int, list[FitTask]] = {} if judging is None else {site: [] for site in self._first}
        for task in tasks:
            own.setdefault(self._site_of[task.client], []).append(task)
        nodes = {site: node for site in own if (node := self._federation.node_of(site)) is not None}
        letters = {node: self._letter(site, own[site], judging) for site, node in nodes.items()}
        seconds = self._federation.backend.timeout
        ids = self._federation.mail.send(letters, False, 2 * seconds) if letters else {}  # it may come, too late
        until = time.monotonic() + seconds
        sent = {
            site: _Sent(site, node, ids[node], until, {task.client: task for task in own[site]})
            for site, node in nodes.items()
            if node in ids
        }
        if judging is not None:
            judging.sent = True
            judging.awaited = [letter for letter in sent.values() if not letter.clients]
        return {site: letter for site, letter in sent.items() if letter.clients}

    def _letter(self, site: int, tasks: Sequence[FitTask], judging: _Judging | None) -> Letter:
        request = Request(tasks) if judging is None else Request(tasks, judging.models, judging.buffers)
        fingerprint = self._federation.sites[site].fingerprint
        orders = Orders(self._run, site, self._first[site], fingerprint, self._settings)
        return write_orders(orders, write_request(request))

    def _take(self, sent: _Sent) -> Answer:
        """Wait for a site's answer; one that cannot be used is a failure of all its clients."""
        answer = self._federation.hear(sent.node, sent.letter, sent.until)
        try:
            if not isinstance(answer, str):
                return self._checked(read_answer(answer, sent.clients), sent)
            reason = answer
        except InputError as error:
            reason = str(error)
        if not sent.clients:
            self._federation.say(f"site {sent.site} did not judge the model: {reason}")
        return Answer([FitFailure(client, reason) for client in sent.clients])

    def _checked(self, answer: Answer, sent: _Sent) -> Answer:
        """Take a site's word for what only it can know: not for how much it counts, nor for others' domains."""
        results: list[FitResult | FitFailure] = []
        for result in answer.results:
            if isinstance(result, FitResult):
                task = sent.tasks[result.client]
                precision = _PRECISIONS.get(self._experiment.trainer.precision)
                wrong = [
                    name
                    for name, tensor in {**result.weights, **result.buffers}.items()
                    if tensor.is_floating_point() and tensor.dtype != (precision or _sent(task, name))
                ]
                if wrong:
                    results.append(
                        FitFailure(result.client, f"its {wrong[0]} is of another type than --trainer.precision")
                    )
                    continue
                size = self._experiment.data.client_sizes[result.client]
                result = replace(result, num_examples=size, weight=task.weight)
            results.append(result)
        known = self._federation.sites[sent.site].domains
        counts = {
            name: {domain: pair for domain, pair in found.items() if domain in known}
            for name, found in answer.counts.items()
        }
        return Answer(results, counts, answer.seconds)

    def evaluate(self, models: Mapping[str, Tensors], buffers: Tensors, done: Callable[[Evaluation], None]) -> None:
        """Have the models judged at all sites, along with the next round's tasks."""
        self.finish()
        self._judging = _Judging(models, buffers, done)

    def finish(self) -> None:
        """Wait until all sites have judged; send them the models now if no round has taken them along."""
        judging, self._judging = self._judging, None
        if judging is None:
            return
        if not judging.sent:
            self._federation.meet()
            self._send([], judging)
        for sent in judging.awaited:
            judging.add(self._take(sent))
        judging.tell(self._experiment.data.domain_names)
