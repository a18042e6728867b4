"""Records, groups of named tensors, in files: written atomically, with a checksum and plain values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from jdfl_lightning.core.errors import StorageError
from jdfl_lightning.core.files import parse_json, require_regular, write_whole
from jdfl_lightning.core.tensors import Record, Tensors

KEY = "jdfl"
"""The one key of a file's metadata (safetensors writes several in random order): a digest, a space, JSON."""


def _digest(tensors: Mapping[str, torch.Tensor], about: str) -> str:
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
    tensors: Tensors = {}
    stored: set[int] = set()
    for name, tensor in flat_names(record).items():
        shared = tensor.untyped_storage().data_ptr() in stored  # safetensors rejects shared storage
        tensors[name] = tensor.clone() if shared else tensor.contiguous()
        stored.add(tensor.untyped_storage().data_ptr())
    text = json.dumps(about or {})
    write_whole(file, save(tensors, {KEY: f"{_digest(tensors, text)} {text}"}), private, durable)


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
    tensors: Tensors = {}
    try:
        with open_record(file) as stored:
            digest, _, text = (stored.metadata() or {})[KEY].partition(" ")
            for key in stored.keys():  # noqa: SIM118 - not a dict
                tensors[key] = stored.get_tensor(key)
        if _digest(tensors, text) != digest:
            raise StorageError(f"Expected saved tensors but {file} is damaged: its checksum does not match.")
        about = parse_json(text)
        if not isinstance(about, dict):
            raise ValueError("no settings")
    except FileNotFoundError as error:
        raise StorageError(f"Expected saved tensors but there is no file {file}.") from error
    except StorageError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise StorageError(f"Expected saved tensors but {file} cannot be read: {error}.") from error
    return as_groups(tensors), about


def stored_digest(file: Path) -> str:
    """Return the checksum that is stored in a record's file, without reading its tensors."""
    try:
        with open_record(file) as stored:
            return str((stored.metadata() or {})[KEY].partition(" ")[0])
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise StorageError(f"Expected saved tensors but {file} cannot be read: {error}.") from error
