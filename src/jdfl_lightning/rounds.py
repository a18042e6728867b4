"""Phase 3: sample clients, fit them, aggregate, evaluate; one report for each round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from jdfl_lightning.backends import Runner
from jdfl_lightning.client import Site
from jdfl_lightning.config import Experiment
from jdfl_lightning.data.base import Progress
from jdfl_lightning.evaluation import Scores, evaluate
from jdfl_lightning.messages import FitResult, FitTask
from jdfl_lightning.seeding import numpy_generator
from jdfl_lightning.tensors import Record, RunningSum, Tensors, norm


@dataclass(frozen=True)
class ServerState:
    """All that the server knows after a round."""

    round: int
    weights: Tensors
    buffers: Tensors
    record: Record


@dataclass(frozen=True)
class RoundReport:
    """What a round did."""

    state: ServerState
    scores: Scores
    metrics: dict[str, float]


def sample_clients(num_clients: int, fraction: float, seed: int, round: int) -> list[int]:
    """Return the participants of a round, sorted: a function of (seed, round).

    >>> len(sample_clients(10, 0.5, seed=0, round=3))
    5
    """
    count = max(1, round_half_up(fraction * num_clients))
    return sorted(numpy_generator(seed, "sample", round).choice(num_clients, count, replace=False).tolist())


def round_half_up(value: float) -> int:
    """Round to the nearest whole number, halves up (Python's own rounds 2.5 down).

    >>> round_half_up(2.5), round_half_up(2.4)
    (3, 2)
    """
    return int(value + 0.5)


class _Tally:
    """Passes results on one by one, and adds up what the round reports of them."""

    def __init__(self, name: str, total: int, progress: Progress) -> None:
        self.name, self.total, self.progress = name, total, progress
        self.clients = self.bytes = self.examples = 0
        self.metrics: dict[str, float] = {}
        self.buffers = RunningSum()

    def watch(self, results: Iterator[FitResult]) -> Iterator[FitResult]:
        for result in results:
            self.clients += 1
            self.bytes += result.num_bytes
            self.examples += result.num_examples
            for name, value in result.metrics.items():
                self.metrics[name] = self.metrics.get(name, 0.0) + value * result.num_examples
            self.buffers.add(result.buffers, result.num_examples)
            self.progress(self.name, self.clients, self.total)
            yield result


def run_rounds(
    experiment: Experiment,
    runner: Runner,
    site: Site,
    state: ServerState,
    assignments: list[int],
    table: Tensor | None,
    progress: Progress,
) -> Iterator[RoundReport]:
    """Run the rounds that are left after a state.

    Args:
        experiment: the run's settings.
        runner: an open backend.
        site: where the server evaluates.
        state: where to go on.
        assignments: z_i, the pseudo-domain of each client.
        table: weights over pseudo-domains; none for the baseline.
        progress: called as clients answer.
    """
    algorithm, seed = experiment.algorithm, experiment.seed_everything
    sizes = [len(images) for images in experiment.data.partition.clients]
    num_clients, num_examples = len(sizes), sum(sizes)
    for number in range(state.round + 1, experiment.rounds + 1):
        start = time.perf_counter()
        broadcast = algorithm.broadcast(state.record)
        tasks = [
            FitTask(
                client=client,
                round=number,
                seed=seed,
                weights=state.weights,
                buffers=state.buffers,
                server=broadcast,
                rounds=experiment.rounds,
                weight=num_clients * sizes[client] / num_examples if algorithm.weighting == "samples" else 1.0,
                domain=assignments[client],
                table=table,
            )
            for client in sample_clients(num_clients, experiment.client_fraction, seed, number)
        ]
        tally = _Tally(f"round {number}", len(tasks), progress)
        weights, record = algorithm.aggregate(state.weights, state.record, tally.watch(runner(tasks)), num_clients)
        state = ServerState(number, weights, tally.buffers.mean(), record)
        fitted = time.perf_counter()
        scores = evaluate(site, state.weights, state.buffers)
        metrics = {
            **{name: total / tally.examples for name, total in tally.metrics.items()},
            **{f"norm/server/{group}": norm(tensors) for group, tensors in record.items()},
            **_other_scores(experiment, site, state),
            "clients": tally.clients,
            "bytes/down": sum(task.num_bytes for task in tasks),
            "bytes/up": tally.bytes,
            "time/fit": fitted - start,
            "time/evaluate": time.perf_counter() - fitted,
        }
        yield RoundReport(state, scores, metrics)


def _other_scores(experiment: Experiment, site: Site, state: ServerState) -> dict[str, float]:
    """Evaluate the models beside the server's that an algorithm names, such as the participants' mean."""
    others = experiment.algorithm.other_models(state.weights, state.record)
    return {f"test/acc_of_{name}": evaluate(site, model, state.buffers).overall for name, model in others.items()}
