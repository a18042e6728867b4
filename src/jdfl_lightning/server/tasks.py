"""What clients are asked: the tasks of a round, in groups that share their model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jdfl_lightning.clustering.clusters import PseudoDomains
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.messages import UNKNOWN, FitTask, RoundContext
from jdfl_lightning.server.learning import broadcast_learned

if TYPE_CHECKING:
    from jdfl_lightning.server.rounds import ServerState


def make_tasks(
    experiment: Experiment,
    state: ServerState,
    domains: PseudoDomains | None,
    clients: Sequence[int],
    context: RoundContext,
) -> list[FitTask]:
    """Return the tasks to send to a round's clients."""
    algorithm, sizes = experiment.algorithm, experiment.data.client_sizes
    by_size, total = algorithm.weighting == "samples" and algorithm.tells_weights, sum(sizes)
    broadcast = algorithm.broadcast(state.record)
    in_head = domains if experiment.supervision.needs_discovery else None
    learned = broadcast_learned(experiment, state.learned, in_head, context.number)
    own = {client: UNKNOWN if domains is None else domains.of(client) for client in clients}
    models = {
        domain: algorithm.model_of(state.weights, state.buffers, state.record, domain) for domain in {*own.values()}
    }
    return [
        FitTask(
            client=client,
            round=context.number,
            seed=context.seed,
            weights=models[own[client]][0],
            buffers=models[own[client]][1],
            server=broadcast,
            rounds=experiment.rounds,
            weight=len(sizes) * sizes[client] / total if by_size else 1.0,
            domain=0 if in_head is None else own[client],
            since=state.clients.get(client, 0),
            attempt=context.attempt,
            learned=learned,
        )
        for client in clients
    ]


def sharing(tasks: Sequence[FitTask]) -> list[list[FitTask]]:
    """Group tasks that share their model, in the order of their first clients; a runner fits one group at a time."""
    groups: dict[int, list[FitTask]] = {}
    for task in tasks:
        groups.setdefault(id(task.weights), []).append(task)
    return list(groups.values())
