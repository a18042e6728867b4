"""The hand-written loop of `peers.py`: plain PyTorch, clients one after the other."""

from __future__ import annotations

import time

import torch
from peer_job import Prepared
from torch import Tensor


def run(job: Prepared) -> tuple[list[float], dict[str, Tensor]]:
    """Do the job; return when each round ended, and the last weights."""
    network, weights, ends = job.network(), job.weights, []
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
        ends.append(time.monotonic())
    return ends, weights
