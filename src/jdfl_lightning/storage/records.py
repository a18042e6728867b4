"""Records, groups of named tensors, in files with a checksum and plain values; the header of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from safetensors import safe_open
from safetensors.torch import save

from jdfl_lightning.core.errors import StorageError, reading
from jdfl_lightning.core.files import checked, require_regular, write_whole
from jdfl_lightning.core.tensors import Record, Tensors, digest_tensors

KEY = "jdfl"
"""The one key of a file's metadata (safetensors writes several in random order): a digest, a space, JSON."""


def save_record(
    file: Path,
    record: Record,
    about: Mapping[str, Any] | None = None,
    private: bool = False,
    durable: bool = True,
) -> None:
    """Write a record with a checksum, atomically.

    Args:
        file: the file to write.
        record: groups of named tensors; stored as ``group/name``.
        about: plain values to store with it.
        private: whether only this user may read the file.
        durable: whether it survives a power cut at once.
    """
    tensors, text = flat_names(record), json.dumps(about or {})
    write_whole(file, as_file(tensors, f"{digest_tensors(tensors, text)} {text}"), private, durable)


def as_file(tensors: Tensors, metadata: str) -> bytes:
    """Return the content of a file with some tensors, and with the value of `KEY`."""
    apart: Tensors = {}
    stored: set[int] = set()
    for name, tensor in tensors.items():
        shared = tensor.untyped_storage().data_ptr() in stored  # safetensors rejects shared storage
        apart[name] = tensor.clone() if shared else tensor.contiguous()
        stored.add(tensor.untyped_storage().data_ptr())
    return save(apart, {KEY: metadata})


def flat_names(record: Record) -> Tensors:
    """Return all tensors of a record by the names that they have in a file."""
    return {f"{group}/{name}": tensor for group, named in record.items() for name, tensor in named.items()}


def as_groups(tensors: Tensors) -> Record:
    """Return the record whose tensors have these names in a file."""
    record: Record = {}
    for key, tensor in tensors.items():
        group, _, name = key.partition("/")
        record.setdefault(group, {})[name] = tensor
    return record


def open_record(file: Path) -> safe_open:
    """Open the file of a record, to read parts of it."""
    require_regular(file)
    return safe_open(file, framework="pt")


def load_record(file: Path) -> tuple[Record, dict[str, Any]]:
    """Read a record and the values stored with it; an error names a file that is missing, damaged or not a record."""
    missing = StorageError(f"Expected saved tensors but there is no file {file}.")
    with reading("saved tensors", file, missing):
        with open_record(file) as stored:
            digest, _, text = (stored.metadata() or {})[KEY].partition(" ")
            tensors: Tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118 - not a dict
        if digest_tensors(tensors, text) != digest:
            raise StorageError(f"Expected saved tensors but {file} is damaged: its checksum does not match.")
        about = json.loads(text)
        if not isinstance(about, dict):
            raise ValueError("no settings")
    return as_groups(tensors), about


def stored_digest(file: Path) -> str:
    """Return the checksum that is stored in a record's file, without reading its tensors."""
    with reading("saved tensors", file), open_record(file) as stored:
        return str((stored.metadata() or {})[KEY].partition(" ")[0])


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
    with reading("a checkpoint", file), open_record(file) as stored:
        about = json.loads((stored.metadata() or {})[KEY].partition(" ")[2])
        clients, joined = (
            {name: stored.get_tensor(f"{group}/{name}") for name in ("client", "value")}
            for group in ("clients", "joined")
        )
        return parse_header(file, about, clients, joined)


def parse_header(file: Path, about: object, clients: Tensors, joined: Tensors) -> CheckpointHeader:
    """Return the header of what is stored in a checkpoint.

    Args:
        file: the checkpoint, for messages.
        about: its plain values.
        clients: the table of the clients' newest states.
        joined: the table of the newcomers' pseudo-domains.
    """
    with reading("a checkpoint", file):
        header = checked(CheckpointHeader, about)
        return replace(header, clients=_from_table(clients), joined=_from_table(joined))
