"""The server's state, and how a checkpoint holds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from jdfl_lightning.clustering.clusters import PseudoDomains
from jdfl_lightning.core.errors import reading
from jdfl_lightning.core.tensors import Record, Tensors


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
        server = {f"server.{group}": tensors for group, tensors in self.record.items()}
        learned = {f"learned.{name}": tensors for name, tensors in self.learned.items()}
        found = {"weights": self.weights, "buffers": self.buffers, **server, **learned}
        if self.domains is not None and self.domains.moved:
            found["domains"] = {"mu": self.domains.centroids}
        if self.taken:
            rounds, losses = zip(*self.taken.values(), strict=True)
            found["taken"] = {"client": torch.tensor(list(self.taken)), "rounds": torch.tensor(rounds)}
            found["taken"]["loss"] = torch.tensor(losses, dtype=torch.float64)
        return found


def read_taken(file: Path, table: Tensors) -> dict[int, tuple[int, float]]:
    """Return how often clients have taken part and their last losses, from the table in a checkpoint."""
    if not table:  # no client has yet, or the run is private or older
        return {}
    with reading("a checkpoint with its clients", file):
        columns = [table[name].tolist() for name in ("client", "rounds", "loss")]
        return {int(client): (int(rounds), float(loss)) for client, rounds, loss in zip(*columns, strict=True)}
