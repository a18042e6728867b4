"""The header of a checkpoint: everything but the server's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from safetensors import SafetensorError

from jdfl_lightning.core.errors import StorageError
from jdfl_lightning.core.files import checked, parse_json
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.storage.records import KEY, open_record


@dataclass(frozen=True)
class CheckpointHeader:
    """The contents of a checkpoint besides the server's tensors."""

    round: Annotated[int, Ge(1)]
    metrics: dict[str, int | float]
    """Metrics of the round, without its scores."""
    data: str
    """Fingerprint of the images and their partition."""
    logger: str | None
    """Class of the logger and id of its run."""
    settings: dict[str, Any]
    """The settings that the rounds so far depend on, by dotted name."""
    rows: str
    """Digest of the rows of ``metrics.csv`` before this round's."""
    discovery: str | None
    """Digest of the discovery; None for the baseline."""
    versions: dict[str, str]
    """Versions of the packages on which the exact bits depend."""
    clients: dict[int, int] = field(default_factory=dict)
    """The round of each client's newest state."""
    joined: dict[int, int] = field(default_factory=dict)
    """The pseudo-domains of newcomers."""


def as_table(numbers: Mapping[int, int]) -> Tensors:
    """Return numbers by client as tensors, 16 bytes each: there may be many clients."""
    return {"client": torch.tensor(list(numbers)).long(), "value": torch.tensor(list(numbers.values())).long()}


def _from_table(table: Tensors) -> dict[int, int]:
    keys, values = table["client"], table["value"]
    if any(column.dtype != torch.long or column.ndim != 1 for column in (keys, values)):
        raise ValueError("its clients are no numbers")
    return dict(zip(keys.tolist(), values.tolist(), strict=True))


def read_header(file: Path) -> CheckpointHeader:
    """Read a checkpoint's header without the server's tensors."""
    try:
        with open_record(file) as stored:
            about = parse_json((stored.metadata() or {})[KEY].partition(" ")[2])
            clients, joined = (
                {name: stored.get_tensor(f"{group}/{name}") for name in ("client", "value")}
                for group in ("clients", "joined")
            )
        return parse_header(file, about, clients, joined)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"Expected a checkpoint but {file} cannot be read: {error}.") from error


def parse_header(file: Path, about: object, clients: Tensors, joined: Tensors) -> CheckpointHeader:
    """Return the header of what is stored in a checkpoint.

    Args:
        file: the checkpoint, for messages.
        about: its plain values.
        clients: the table of the clients' newest states.
        joined: the table of the newcomers' pseudo-domains.
    """
    try:
        return replace(
            checked(CheckpointHeader, about),
            clients=_from_table(clients),
            joined=_from_table(joined),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"Expected a checkpoint but {file} is something else: {error}.") from error
