"""The server's state, how a checkpoint holds it, what clients are asked, and what is learned from their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from jdfl_lightning.clustering.clusters import PseudoDomains
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import reading
from jdfl_lightning.core.messages import SUPERVISION, UNKNOWN, FitTask, RoundContext
from jdfl_lightning.core.tensors import Record, Tensors
from jdfl_lightning.supervision import ClientSums, RoundInfo


@dataclass(frozen=True)
class ServerState:
    """The server's state after a round."""

    round: int
    weights: Tensors
    buffers: Tensors
    record: Record
    """The algorithm's."""
    learned: Record = field(default_factory=dict)
    """The supervision's and the regularizers'."""
    clients: dict[int, int] = field(default_factory=dict)
    """The round of the newest state of each client that keeps one."""
    domains: PseudoDomains | None = None
    """The pseudo-domains, with the newcomers so far; None for the baseline."""
    taken: dict[int, tuple[int, float]] = field(default_factory=dict)
    """For each client that has taken part, in how many rounds and its last loss; empty in a private run."""

    def as_record(self) -> Record:
        """Return all tensors as one record."""
        found = packed(self.weights, self.buffers, server=self.record, learned=self.learned)
        if self.domains is not None and self.domains.moved:
            found["domains"] = {"mu": self.domains.centroids}
        if self.taken:
            rounds, losses = zip(*self.taken.values(), strict=True)
            found["taken"] = {"client": torch.tensor(list(self.taken)), "rounds": torch.tensor(rounds)}
            found["taken"]["loss"] = torch.tensor(losses, dtype=torch.float64)
        return found


def packed(weights: Tensors, buffers: Tensors, **records: Record) -> Record:
    """Return weights, buffers and some records as one record, in which a group has its record's name before its own."""
    inner = {f"{name}.{group}": tensors for name, record in records.items() for group, tensors in record.items()}
    return {"weights": weights, "buffers": buffers, **inner}


def unpacked(record: Record, name: str) -> Record:
    """Return one of the records that were packed into a record."""
    return {group.removeprefix(f"{name}."): record[group] for group in record if group.startswith(f"{name}.")}


def read_taken(file: Path, table: Tensors) -> dict[int, tuple[int, float]]:
    """Return how often clients have taken part and their last losses, from the table in a checkpoint."""
    if not table:  # no client has yet, or the run is private or older
        return {}
    with reading("a checkpoint with its clients", file):
        columns = [table[name].tolist() for name in ("client", "rounds", "loss")]
        return {int(client): (int(rounds), float(loss)) for client, rounds, loss in zip(*columns, strict=True)}


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
    info = RoundInfo(context.number, experiment.rounds, _centroids(in_head))
    parts = experiment.learned.items()
    learned = _filled({name: part.broadcast(state.learned.get(name, {}), info) for name, part in parts})
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


def _centroids(domains: PseudoDomains | None) -> torch.Tensor:
    return torch.empty(1, 0) if domains is None else domains.centroids


def init_learned(experiment: Experiment, weights: Tensors, domains: PseudoDomains | None) -> Record:
    """Return the records of supervision and regularizers before the first round; parts without one are left out."""
    num_classes = len(experiment.data.class_names)
    centroids, features = _centroids(domains), weights["head.weight"].shape[1]
    records = {SUPERVISION: experiment.supervision.init(centroids, num_classes)}
    for name, part in experiment.regularizers_by_name.items():
        records[name] = part.init(len(centroids), num_classes, features)
    return _filled(records)


def learned_form(experiment: Experiment, sent: Record) -> Record:
    """Return the form of what clients send back, as tensors that may be without values."""
    num_classes = len(experiment.data.class_names)
    bare = {group: {name: tensor.to("meta") for name, tensor in tensors.items()} for group, tensors in sent.items()}
    return _filled({n: part.upload_form(bare.get(n, {}), num_classes) for n, part in experiment.learned.items()})


def update_learned(experiment: Experiment, record: Record, answers: Sequence[tuple[int, int, Record]]) -> Record:
    """Return the records after a round.

    Args:
        experiment: the run's settings.
        record: the records before the round.
        answers: pseudo-domain, number of images and sums of each client whose answer counts, in the order of ids.
    """
    updated = {}
    for name, part in experiment.learned.items():
        sums = [ClientSums(domain, count, sent[name]) for domain, count, sent in answers if name in sent]
        updated[name] = part.update(record.get(name, {}), sums)
    return _filled(updated)


def _filled(records: Record) -> Record:
    """Leave out groups without tensors."""
    return {name: tensors for name, tensors in records.items() if tensors}
