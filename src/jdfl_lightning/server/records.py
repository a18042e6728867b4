"""The server's state as the tensors of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from jdfl_lightning.core.errors import StorageError
from jdfl_lightning.core.tensors import Record, Tensors
from jdfl_lightning.server.rounds import ServerState


def as_record(state: ServerState) -> Record:
    """Return the server's tensors as one record."""
    server = {f"server.{group}": tensors for group, tensors in state.record.items()}
    moved = {} if state.domains is None or not state.domains.moved else {"domains": {"mu": state.domains.centroids}}
    learned = {f"learned.{name}": tensors for name, tensors in state.learned.items()}
    taken = {}
    if state.taken:
        rounds, losses = zip(*state.taken.values(), strict=True)
        clients = torch.tensor(list(state.taken))
        taken = {
            "taken": {
                "client": clients,
                "rounds": torch.tensor(rounds),
                "loss": torch.tensor(losses, dtype=torch.float64),
            }
        }
    return {"weights": state.weights, "buffers": state.buffers, **server, **learned, **moved, **taken}


def read_taken(file: Path, table: Tensors) -> dict[int, tuple[int, float]]:
    """Return how often clients have taken part and their last losses, from the table in a checkpoint."""
    if not table:  # no client has yet, or the run is private or older
        return {}
    try:
        columns = [table[name].tolist() for name in ("client", "rounds", "loss")]
        return {int(client): (int(rounds), float(loss)) for client, rounds, loss in zip(*columns, strict=True)}
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"Expected a checkpoint but the clients in {file} cannot be read: {error!r}.") from error
