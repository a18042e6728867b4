"""Phase 3: sample clients, fit them, aggregate, evaluate; every event is reported to the callbacks."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from jdfl_lightning.algorithms import Algorithm
from jdfl_lightning.backends import Runner
from jdfl_lightning.client.evaluation import Evaluation, Scores, further_parts
from jdfl_lightning.clustering.clusters import PseudoDomains
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import InputError, last_line, plain
from jdfl_lightning.core.messages import UNKNOWN, FitFailure, FitResult, FitTask, RoundContext
from jdfl_lightning.core.tensors import Record, RunningSum, Tensors, is_record, misfit, norm
from jdfl_lightning.server.events import Events
from jdfl_lightning.server.phase1 import Theta, assign_newcomers
from jdfl_lightning.server.screening import Form, screened, without_outliers
from jdfl_lightning.server.state import ServerState, learned_form, make_tasks, sharing, update_learned

_ATTEMPTS = 3
"""Number of attempts at a round before the run ends."""


class _Tally:
    """Passes results on one by one and sums up the round's metrics."""

    def __init__(self, round: int, total: int, events: Events) -> None:
        self.round, self.name, self.total, self.events = round, f"round {round}", total, events
        self.answered = self.clients = self.size = 0
        self.metrics: dict[str, tuple[float, int]] = {}
        """For each metric: the sum weighted by examples over the clients that sent it, and their number of examples."""
        self.buffers = RunningSum()
        self.keeps: dict[int, bool] = {}
        self.losses: dict[int, float] = {}
        self.learned: list[tuple[int, int, Record]] = []
        """For each client that counts, its pseudo-domain, its number of images and what it sent to be learned from."""
        self.refused: dict[int, str] = {}
        self.failure: Exception | None = None
        """Error raised by the source of the answers, not by the algorithm that uses them."""

    def step(self, what: str, done: int, total: int) -> None:
        """Show progress of something other than the round's own fits."""
        self.events.client_answered(f"{self.name}: {what}", done, total)

    def refuse(self, client: int, reason: str) -> None:
        """Record an answer that does not enter the round."""
        self.refused[client] = reason
        self.events.client_refused(self.round, client, reason)

    def count(self, results: Iterator[FitResult | FitFailure]) -> Iterator[FitResult | FitFailure]:
        """Update the display when clients are asked, and as they answer."""
        self.events.clients_asked(self.name, self.total)
        for result in results:
            self.answered += 1
            self.events.client_answered(self.name, self.answered, self.total)
            yield result

    def watch(self, results: Iterator[FitResult], domains: PseudoDomains | None) -> Iterator[FitResult]:
        """Record the results that enter the round."""
        try:
            for result in results:
                self.clients += 1
                self.size = self.size or result.num_bytes  # all that count have the same form
                for name, value in result.metrics.items():
                    total, examples = self.metrics.get(name, (0.0, 0))
                    self.metrics[name] = total + value * result.num_examples, examples + result.num_examples
                self.buffers.add(result.buffers, result.num_examples)
                self.keeps[result.client] = result.keeps_state
                self.losses[result.client] = result.metrics.get("train/loss", float("nan"))
                domain = UNKNOWN if domains is None else domains.of(result.client)
                self.learned.append((domain, result.num_examples, result.learned))
                if result.note:
                    self.events.client_noted(self.round, result.client, result.note)
                yield result
        except Exception as error:
            self.failure = error
            raise


@dataclass
class Rounds:
    """The rounds of a run."""

    experiment: Experiment
    runner: Runner
    """An open backend."""
    events: Events
    """Told of everything that happens; callbacks of the user may stop the run, so that evaluations are waited for."""
    theta_0: Theta = ({}, {})
    """The shared initialisation, from which newcomers compute their Phase 1 update."""
    frozen: Collection[str] = ()
    """Names of the parameters that are not trained, which no client may change."""
    private: Tensors = field(default_factory=dict)
    """Tensors that clients keep, as they are in the shared initialisation."""

    def run(self, state: ServerState) -> ServerState:
        """Run the remaining rounds from a state, or until a callback asks to stop; return the state after the last."""
        for number in range(state.round + 1, self.experiment.rounds + 1):
            if self.events.asks_to_stop():
                break
            state, metrics = self._run_round(state, number)
            self.events.round_aggregated(state, metrics)
            self.evaluate(state, metrics)
        self.runner.finish()
        return state

    def _run_round(self, state: ServerState, number: int) -> tuple[ServerState, dict[str, float]]:
        """Sample, fit, screen, aggregate; a round with too few answers is repeated with newly sampled clients."""
        experiment, algorithm, start = self.experiment, self.experiment.algorithm, time.perf_counter()
        num_clients, asked = len(experiment.data.client_sizes), experiment.clients_per_round
        domains, probes_down, probes_up = state.domains, 0, 0
        for attempt in range(_ATTEMPTS):
            context = RoundContext(number, num_clients, asked, experiment.seed_everything, attempt)
            clients = _sampled(algorithm, state.record, context)
            tally = _Tally(number, len(clients), self.events)
            if domains is not None and experiment.needs_own_domain:
                draw, unassigned = 1 + number * _ATTEMPTS + attempt, self.events.client_unassigned
                domains, down, up = assign_newcomers(
                    experiment, self.runner, self.theta_0, domains, clients, draw, tally.step, unassigned
                )
                probes_down, probes_up = probes_down + down, probes_up + up
            if domains is not None:
                context = replace(context, domains={client: domains.of(client) for client in clients})
            tasks = make_tasks(experiment, state, domains, clients, context)
            in_head = domains if experiment.supervision.needs_discovery else None
            aggregated = self._aggregate(state, tally.watch(self._answers(tasks, tally), in_head), context, tally)
            if aggregated is not None and (algorithm.may_be_empty or tally.clients >= experiment.min_clients):
                break
        else:
            client, reason = next(iter(tally.refused.items()))
            raise InputError(
                f"Expected at least {experiment.min_clients} of {len(tasks)} clients to answer in round {number} but "
                f"{_ATTEMPTS} attempts were void. Client {client}: {last_line(reason)}"
            ) from RuntimeError(reason)
        self.runner.finish()  # at most one round is still being evaluated
        weights, record = aggregated
        learned = update_learned(experiment, state.learned, tally.learned)
        metrics = {
            "train/loss": float("nan"),
            **{name: total / examples for name, (total, examples) in tally.metrics.items()},
            **_numbers(algorithm, record, context),
            **dict(pair for n, part in experiment.learned.items() for pair in part.metrics(learned.get(n, {})).items()),
            "clients": tally.clients,
            "refused": len(tally.refused),
            **({} if domains is None else {"joined": float(len(domains.newcomers))}),
            "bytes/down": probes_down + len(tasks) * tasks[0].num_bytes,  # all clients are sent the same tensors
            "bytes/up": probes_up + tally.clients * tally.size,
            "time/fit": time.perf_counter() - start,
        }
        kept = {client: round for client, round in state.clients.items() if client not in tally.keeps}
        kept |= {client: number for client, keeps in tally.keeps.items() if keeps}
        buffers = tally.buffers.mean() if tally.clients else state.buffers
        losses = tally.losses if algorithm.keeps_best else {}  # in a private run nobody may know who took part
        taken = state.taken | {client: (state.taken.get(client, (0,))[0] + 1, loss) for client, loss in losses.items()}
        return ServerState(number, weights, buffers, record, learned, kept, domains, taken), metrics

    def _answers(self, tasks: Sequence[FitTask], tally: _Tally) -> Iterator[FitResult]:
        """Have clients do their tasks; yield the answers that can be used."""
        experiment, algorithm = self.experiment, self.experiment.algorithm
        num_classes, multiple = len(experiment.data.class_names), experiment.max_update_norm
        for group in sharing(tasks):
            task, answers = group[0], tally.count(self.runner.fit(group))
            form = Form.of(algorithm, task, num_classes, experiment.trainer.dtype, self.frozen, self.private)
            form = replace(form, learned=learned_form(experiment, task.learned), parts=experiment.learned)
            results = screened(answers, form, algorithm, tally.refuse, trusted=experiment.backend.states_here)
            if multiple is not None:
                results = without_outliers(results, task.weights, multiple, tally.refuse)
            yield from results

    def _aggregate(
        self, state: ServerState, results: Iterator[FitResult], context: RoundContext, tally: _Tally
    ) -> tuple[Tensors, Record] | None:
        """Return the server's new weights and record; None if there is no answer and the algorithm needs one."""
        algorithm = self.experiment.algorithm
        try:
            first = next(results, None)
            if first is None and not algorithm.may_be_empty:
                _stop_if_all_fail_alike(context.number, tally.refused)
                return None
            answered = results if first is None else chain([first], results)
            aggregated: Any = algorithm.aggregate(state.weights, state.record, answered, context)
            return self._checked(aggregated, state.weights, context.number)
        except Exception as error:  # all answers have the declared form: the fault is in the algorithm
            if isinstance(error, InputError) or error is tally.failure:
                raise
            self.events.show(error)
            what = f"{type(error).__name__}: {error}"
            raise InputError(
                f"{type(algorithm).__name__} could not aggregate round {context.number}: {what}"
            ) from error

    def _checked(self, aggregated: Any, before: Tensors, round: int) -> tuple[Tensors, Record]:
        """Return what an algorithm has aggregated; raise an `InputError` if it is not what a round can begin with."""
        pair: Any = aggregated if isinstance(aggregated, (tuple, list)) and len(aggregated) == 2 else (None, None)
        name = f"{type(self.experiment.algorithm).__name__}.aggregate"
        if not (is_record({"weights": pair[0]}) and is_record(pair[1])):
            raise InputError(
                f"Expected {name} to return the weights, named tensors, and a record, groups of named tensors, but "
                f"got {plain(repr(aggregated), 100)}."
            )
        weights, record = pair
        problem = misfit(weights, before)
        for tensor_name, tensor in {} if problem else weights.items():
            if tensor.dtype not in (before[tensor_name].dtype, self.experiment.trainer.dtype):
                problem = f"{tensor_name} is of {tensor.dtype} and not of {before[tensor_name].dtype}"
        if problem is None and not math.isfinite(norm(weights)):
            problem = "they are not finite: lower --lr, or look at the algorithm's own rates"
        if problem is not None:
            raise InputError(f"Expected {name} to return weights like those of round {round - 1} but {problem}.")
        return weights, record

    def evaluate(self, state: ServerState, metrics: dict[str, float], again: bool | None = None) -> None:
        """Evaluate a round's model, and further models that the algorithm names, if an evaluation is due.

        Args:
            state: the state after the round.
            metrics: the round's metrics.
            again: for a round of a resumed run, whether it was evaluated then: this decides, as `evaluate_every` may
                have changed. None for a new round.
        """
        experiment, events = self.experiment, self.events
        turn = state.round % experiment.evaluate_every == 0 if again is None else again
        if not turn and state.round != experiment.rounds:
            further = {part: Scores.unknown(domains) for part, domains in further_parts(experiment.data).items()}
            scores = replace(Scores.unknown(experiment.data.domain_names), further=further)
            events.round_evaluated(state, scores, metrics | {"time/evaluate": 0.0})
            return
        others = experiment.algorithm.other_models(state.weights, state.record)

        def tell(outcome: Evaluation) -> None:
            beside = {f"test/acc_of_{name}": outcome.scores[name].overall for name in others}
            events.round_evaluated(state, outcome.scores[""], beside | metrics | {"time/evaluate": outcome.seconds})

        models = {"": state.weights, **others}
        # of what is private, only a head is sent, as nothing else shows its size; whoever evaluates has the others
        if head := {name: tensor for name, tensor in self.private.items() if name.startswith("head.")}:
            like = next(iter(state.weights.values()), next(iter(head.values())))
            head = {name: tensor.to(like.dtype) for name, tensor in head.items()}
            models = {name: weights | head for name, weights in models.items()}
        self.runner.evaluate(models, state.buffers, tell)
        if events.users:
            self.runner.finish()


def _numbers(algorithm: Algorithm, record: Record, context: RoundContext) -> dict[str, float]:
    """Return an algorithm's metrics of a round; raise an `InputError` if one is no number."""
    found: dict[str, Any] = algorithm.metrics(record, context)
    try:
        return {name: float(value) for name, value in found.items()}
    except (TypeError, ValueError) as error:
        name = type(algorithm).__name__
        raise InputError(
            f"Expected {name}.metrics to return numbers by name but got {plain(repr(found), 100)}."
        ) from error


def _sampled(algorithm: Algorithm, record: Record, context: RoundContext) -> list[int]:
    """Return the clients of a round, sorted; raise an `InputError` if an algorithm gives something else."""
    found: Any = algorithm.sample(record, context)
    try:
        clients = sorted(map(operator.index, found))
    except TypeError:
        clients = [-1]
    known = all(0 <= client < context.num_clients for client in clients) and len({*clients}) == len(clients)
    if not known or not (clients or algorithm.may_be_empty):
        raise InputError(
            f"Expected {type(algorithm).__name__}.sample to return ids of clients, 0 to {context.num_clients - 1}, "
            f"each once, but got {plain(repr(found), 100)}."
        )
    return clients


def _stop_if_all_fail_alike(number: int, refused: dict[int, str]) -> None:
    """End the run if several clients were asked and all raise the same error: other clients would raise it too."""
    reasons = {last_line(reason) for reason in refused.values() if "Traceback (most recent call last)" in reason}
    alike = len(reasons) == 1 and all(last_line(reason) in reasons for reason in refused.values())
    if alike and len(refused) > 1:
        raise InputError(
            f"Expected clients to train in round {number} but all {len(refused)} failed alike: {reasons.pop()}"
        ) from RuntimeError(next(iter(refused.values())))
