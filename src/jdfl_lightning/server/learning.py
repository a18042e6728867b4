"""The server side of what is learned with the loss: the supervision and the regularizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jdfl_lightning.clustering.clusters import PseudoDomains
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.messages import SUPERVISION
from jdfl_lightning.core.tensors import Record, Tensors
from jdfl_lightning.supervision import ClientSums, RoundInfo


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


def broadcast_learned(experiment: Experiment, record: Record, domains: PseudoDomains | None, number: int) -> Record:
    """Return what the clients of a round are sent."""
    info = RoundInfo(number, experiment.rounds, _centroids(domains))
    return _filled({name: part.broadcast(record.get(name, {}), info) for name, part in experiment.learned.items()})


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


def learned_metrics(experiment: Experiment, record: Record) -> dict[str, float]:
    """Return numbers to log after a round."""
    parts = experiment.learned.items()
    return {key: value for name, part in parts for key, value in part.metrics(record.get(name, {})).items()}


def _filled(records: Record) -> Record:
    """Leave out groups without tensors."""
    return {name: tensors for name, tensors in records.items() if tensors}
