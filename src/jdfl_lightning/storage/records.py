"""Records, groups of named tensors, in files with a checksum and plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save

from jdfl_lightning.core.errors import StorageError, reading
from jdfl_lightning.core.files import require_regular, write_whole
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
