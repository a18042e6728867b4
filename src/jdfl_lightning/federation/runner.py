"""The rounds of a federation: sends tasks and models to sites, and checks and combines their answers."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jdfl_lightning.backends import Runner
from jdfl_lightning.client.evaluation import COUNTS, Evaluation, Scores
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.federation.members import Federation, capped
from jdfl_lightning.federation.wire import (
    Answer,
    Request,
    RequestHeader,
    read_answer,
    shared_settings,
    write_request,
)


@dataclass
class _Evaluating:
    """An evaluation that waits for the sites' counts."""

    models: Mapping[str, Tensors]
    buffers: Tensors
    done: Callable[[Evaluation], None]
    sent: bool = False
    awaited: Sequence[_Sent] = ()
    """Payloads to sites that have no task in this round."""
    answers: list[Answer] = field(default_factory=list)
    """The counts of the sites, without the results of their clients."""

    def scores(self, name: str, domains: Sequence[str], complete: bool) -> Scores:
        """Return a model's; they are NaN for domains whose sites did not answer, and overall unless all sites did."""
        right, seen = Counter[str](), Counter[str]()
        for answer in self.answers:
            for domain, pair in answer.counts.get(name, {}).items():
                right[domain] += pair[0]
                seen[domain] += pair[1]
        found = Scores.of({domain: (right[domain], seen[domain]) for domain in domains})
        # without all sites, it would not be over the same images as in other rounds
        return found if complete else replace(found, overall=float("nan"))


def _scaled(pair: tuple[int, int], share: float) -> tuple[int, int]:
    """Scale the counts of correct and of all images by a share; at least one image is left if there is any."""
    if share >= 1 or not pair[1]:
        return pair
    seen = max(1, round(pair[1] * share))
    return round(pair[0] / pair[1] * seen), seen


@dataclass(frozen=True)
class _Sent:
    """A payload that was sent."""

    site: int
    node: int
    payload: str
    until: float
    tasks: dict[int, FitTask]
    """Tasks by client."""
    models: tuple[str, ...] = ()
    """Names of the models to evaluate."""


class SitesRunner(Runner):
    """Sends a round's tasks to the sites, with the last round's model to evaluate, and collects answers in order.

    Args:
        experiment: the run's settings.
        federation: its sites.
        run: id of the run, under which a site stores its clients' states.
        max_weight: cap on a client's share of the held-out images, as a multiple of the median client's.
    """

    def __init__(self, experiment: Experiment, federation: Federation, run: str, max_weight: float) -> None:
        self._experiment, self._federation, self._run = experiment, federation, run
        self._settings = json.dumps(shared_settings(experiment))
        self._evaluating: _Evaluating | None = None
        self._begun = False
        self._first: dict[int, int] = {}
        self._site_of: dict[int, int] = {}
        number = 0
        for site, info in sorted(federation.sites.items()):
            self._first[site] = number if info.own else 0
            clients = [number + client for client in info.clients] if info.own else info.clients
            self._site_of |= dict.fromkeys(clients, site)
            number += len(info.clients)
        held = {site: sum(info.held) for site, info in federation.sites.items()}
        numbers = [len(info.clients) for info in federation.sites.values()]
        listed = [site in federation.limited for site in held]
        self._held = dict(zip(held, capped(list(held.values()), numbers, listed, max_weight), strict=True))
        for site, counts in self._held.items():
            if counts < held[site]:
                federation.say(
                    f"site {site} says it holds out {held[site]} images and they count for {counts}, {max_weight:g} "
                    "times the median: if it is right, list its images in --backend.roster"
                )

    def fit(self, tasks: Sequence[FitTask]) -> Iterator[FitResult | FitFailure]:
        """Send every site its tasks at once; collect the answers in the order of the tasks, one site at a time."""
        if not tasks:
            return
        needed = min(self._experiment.min_clients, len(tasks))
        if tasks[0].round == DISCOVERY_ROUND and not self._begun:
            needed = len(tasks)  # discovery decides for all rounds: wait for all of its clients
        self._begun = True
        self._await_sites([self._site_of[task.client] for task in tasks], needed)
        evaluating = self._evaluating
        if evaluating is not None and evaluating.sent:
            evaluating = None
        sent = self._send(tasks, evaluating)
        results: dict[int, FitResult | FitFailure] = {}
        for task in tasks:
            site = self._site_of[task.client]
            if task.client not in results and site in sent:
                answer = self._take(sent.pop(site))
                results |= {result.client: result for result in answer.results}
                if evaluating is not None:
                    evaluating.answers.append(replace(answer, results=()))
            absent = FitFailure(task.client, f"its site, {site}, is not there or still at an earlier task")
            yield results.pop(task.client, absent)

    def _await_sites(self, sites: Sequence[int], needed: int) -> None:
        """Wait, up to the timeout, until enough of the round's sites are connected."""
        self._federation.meet()
        told = False
        until = time.monotonic() + self._federation.timeout
        while sum(self._federation.node_of(site) is not None for site in sites) < needed:
            if not told:
                self._federation.say("waiting for sites to come back: too few of this round's are there")
                told = True
            if time.monotonic() > until:
                return
            time.sleep(self._federation.poll)
            self._federation.meet()

    def _send(self, tasks: Sequence[FitTask], evaluating: _Evaluating | None) -> dict[int, _Sent]:
        """Send tasks, and models to all sites; return the payloads with tasks, by site."""
        own: dict[int, list[FitTask]] = {} if evaluating is None else {site: [] for site in self._first}
        for task in tasks:
            own.setdefault(self._site_of[task.client], []).append(task)
        nodes = {site: node for site in own if (node := self._federation.node_of(site)) is not None}
        models, buffers = ({}, {}) if evaluating is None else (evaluating.models, evaluating.buffers)
        payloads = {}
        for site, node in nodes.items():
            fingerprint = self._federation.sites[site].fingerprint
            header = RequestHeader(self._run, site, self._first[site], fingerprint, self._settings)
            payloads[node] = write_request(Request(own[site], models, buffers), header)
        seconds = self._federation.timeout
        ids = self._federation.transport.send(payloads, False, 2 * seconds) if payloads else {}  # answers may be late
        until = time.monotonic() + seconds
        sent = {
            site: _Sent(site, node, ids[node], until, {task.client: task for task in own[site]}, tuple(models))
            for site, node in nodes.items()
            if node in ids
        }
        if evaluating is not None:
            evaluating.sent = True
            evaluating.awaited = [payload for payload in sent.values() if not payload.tasks]
        return {site: payload for site, payload in sent.items() if payload.tasks}

    def _take(self, sent: _Sent) -> Answer:
        """Wait for a site's answer; an unusable answer is a failure of all its clients."""
        answer = self._federation.hear(sent.node, sent.payload, sent.until)
        try:
            if not isinstance(answer, str):
                return self._checked(read_answer(answer, list(sent.tasks), sent.models, self._metrics(sent)), sent)
            reason = answer
        except InputError as error:
            reason = str(error)
        if not sent.tasks:
            self._federation.say(f"site {sent.site} did not evaluate the model: {reason}")
        return Answer([FitFailure(client, reason) for client in sent.tasks])

    def _metrics(self, sent: _Sent) -> set[str]:
        """Return the names of the metrics that clients report: their loss and the norms of their states, or counts."""
        if any(task.personal for task in sent.tasks.values()):
            return set(COUNTS)
        weights = {name: t.to("meta") for task in sent.tasks.values() for name, t in task.weights.items()}
        groups = self._experiment.algorithm.state_groups(weights)
        return {"train/loss", *(f"norm/client/{group}" for group in groups)}

    def _checked(self, answer: Answer, sent: _Sent) -> Answer:
        """Use the server's own client weights in a site's answer; drop counts over other images than the site reported.

        `screening` checks the clients' tensors.
        """
        sizes = self._experiment.data.client_sizes
        results = [
            replace(result, num_examples=sizes[result.client], weight=sent.tasks[result.client].weight)
            if isinstance(result, FitResult)
            else result
            for result in answer.results
        ]
        info, counts = self._federation.sites[sent.site], dict(answer.counts)
        held = dict(zip(info.domains, info.held, strict=True))
        for name in answer.counts:
            if {domain: seen for domain, (_, seen) in counts[name].items()} != held:
                self._federation.say(
                    f"site {sent.site} evaluated a model by other images than it said: it does not count"
                )
                del counts[name]
            else:
                share = self._held[sent.site] / max(1, sum(info.held))
                counts[name] = {domain: _scaled(pair, share) for domain, pair in counts[name].items()}
        return Answer(results, counts, answer.seconds)

    def evaluate(self, models: Mapping[str, Tensors], buffers: Tensors, done: Callable[[Evaluation], None]) -> None:
        """Have the models evaluated at all sites, along with the next round's tasks."""
        self.finish()
        self._evaluating = _Evaluating(models, buffers, done)

    def finish(self) -> None:
        """Wait until all sites have evaluated; send them the models now if they were not sent with a round's tasks."""
        evaluating, self._evaluating = self._evaluating, None
        if evaluating is None:
            return
        if not evaluating.sent:
            self._federation.meet()
            self._send([], evaluating)
        models, answers = evaluating.models, evaluating.answers
        answers += [self._take(sent) for sent in evaluating.awaited]
        evaluated = sum(set(models) <= set(answer.counts) for answer in answers)
        if evaluated < len(self._first):
            missing = f"{evaluated} of {len(self._first)} sites evaluated the model"
            self._federation.say(f"{missing}: it has no overall accuracy, and cannot be the best")
        domains, complete = self._experiment.data.domain_names, evaluated == len(self._first)
        scores = {name: evaluating.scores(name, domains, complete) for name in models}
        evaluating.done(Evaluation(scores, max((answer.seconds for answer in answers), default=0.0)))
