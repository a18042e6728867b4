"""The end of a run with models of clients' own: each client evaluates its own, and the server sums up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jdfl_lightning.backends import Runner
from jdfl_lightning.client.personal import COUNTS, GLOBAL, IMAGES, MODELS, SEEN
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask, RoundContext
from jdfl_lightning.server.events import Events
from jdfl_lightning.server.rounds import ServerState
from jdfl_lightning.server.tasks import make_tasks, sharing

Accuracies = dict[str, float]
"""Model, with a suffix for the images -> its accuracy at a client."""


def evaluate_clients(
    experiment: Experiment, runner: Runner, state: ServerState, events: Events
) -> dict[int, Accuracies]:
    """Have every client that has a model of its own evaluate it; return what each answered.

    Args:
        experiment: the run's settings.
        runner: an open backend.
        state: the state after the last round.
        events: told of each answer.
    """
    stateful = bool(experiment.private) or experiment.algorithm.has_second_model
    everyone = range(experiment.data.num_clients)
    asked = [client for client in everyone if client in state.clients or not stateful]
    context = RoundContext(state.round + 1, len(everyone), len(asked), experiment.seed_everything)
    tasks = [replace(task, personal=True) for task in make_tasks(experiment, state, state.domains, asked, context)]
    found: dict[int, Accuracies] = {}
    for answer in _answers(runner, tasks, len(tasks), events):
        found[answer.client] = _accuracies(answer.metrics)
    if experiment.algorithm.by_domain:  # the model that was sent is not the global one
        asked_too = [replace(task, weights=state.weights, buffers=state.buffers) for task in tasks]
        for answer in _answers(runner, asked_too, len(tasks), events):
            found.setdefault(answer.client, {})[GLOBAL] = _accuracies(answer.metrics).get(GLOBAL, math.nan)
    return {client: found[client] for client in sorted(found)}


def _answers(runner: Runner, tasks: Sequence[FitTask], total: int, events: Events) -> Iterator[FitResult]:
    done = 0
    for group in sharing(tasks):
        for answer in runner.fit(group):
            done += 1
            events.client_answered("personal models", done, total)
            if isinstance(answer, FitFailure):
                events.client_noted(
                    group[0].round - 1, answer.client, f"its own model was not evaluated: {answer.reason}"
                )
            else:
                yield answer


def _accuracies(counts: Mapping[str, float]) -> Accuracies:
    """Return the accuracies of counts; those that no evaluation can give are left out."""
    found: Accuracies = {}
    for suffix in IMAGES.values():
        seen = counts.get(SEEN + suffix, 0.0)
        right = {name + suffix: counts.get(name + suffix, -1.0) for name in MODELS}
        found |= {name: number / seen for name, number in right.items() if 0 <= number <= seen > 0}
    return found


def summarise(experiment: Experiment, round: int, found: Mapping[int, Accuracies]) -> dict[str, Any]:
    """Return mean, worst and standard deviation over the clients, for each model.

    Args:
        experiment: the run's settings.
        round: the round of the models.
        found: accuracies by client.
    """
    models: dict[str, Any] = {}
    for name in COUNTS:
        each = [accuracies[name] for accuracies in found.values() if not math.isnan(accuracies.get(name, math.nan))]
        if each:
            models[name] = {
                "clients": len(each),
                "mean": statistics.fmean(each),
                "worst": min(each),
                "std": statistics.stdev(each) if len(each) > 1 else None,
            }
    return {"round": round, "score": experiment.score, "models": models}
