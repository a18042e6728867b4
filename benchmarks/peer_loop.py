"""The hand-written loop of `peers.py`: plain PyTorch, clients one after the other."""

from __future__ import annotations

import torch
from peer_job import Prepared, Rounds


def run(job: Prepared) -> Rounds:
    """Do the job."""
    network, weights, rounds = job.network(), job.weights, Rounds(job.job.rounds)
    for round in range(1, job.job.rounds + 1):
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in weights.items()}
        total = 0
        for client in range(job.job.clients):
            network.load_state_dict(weights)
            count = job.train(network, round, client)
            for name, value in network.state_dict().items():
                sums[name] += value.double() * count
            total += count
        weights = {name: (value / total).float() for name, value in sums.items()}
        rounds.note(lambda: weights)  # noqa: B023 - it is called at once
    return rounds
