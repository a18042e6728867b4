"""A run's state on disk: safetensors only, each file whole or not there at all."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from jdfl_lightning.errors import InputError
from jdfl_lightning.tensors import Record, Tensors


def save_record(file: Path, record: Record, metadata: dict[str, str] | None = None) -> None:
    """Write a record aside, then put it in the file's place.

    Args:
        file: where the record goes.
        record: groups of named tensors; stored as ``group/name``.
        metadata: plain text to store with it.
    """
    tensors: Tensors = {}
    stored: set[int] = set()
    for group, named in record.items():
        for name, tensor in named.items():
            shared = tensor.untyped_storage().data_ptr() in stored  # safetensors takes no storage twice
            tensors[f"{group}/{name}"] = tensor.clone() if shared else tensor.contiguous()
            stored.add(tensor.untyped_storage().data_ptr())
    aside = file.with_name(f".{file.name}.tmp")
    try:
        with aside.open("wb") as out:
            out.write(save(tensors, metadata))
            out.flush()
            os.fsync(out.fileno())
        aside.replace(file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def load_record(file: Path) -> tuple[Record, dict[str, str]]:
    """Read a record and its metadata; a missing or damaged file is named in the error."""
    record: Record = {}
    try:
        with safe_open(file, framework="pt") as stored:
            for key in stored.keys():  # noqa: SIM118 - not a dict
                group, _, name = key.partition("/")
                record.setdefault(group, {})[name] = stored.get_tensor(key)
            return record, stored.metadata() or {}
    except FileNotFoundError as error:
        raise InputError(f"Expected saved weights but there is no file {file}.") from error
    except (OSError, SafetensorError) as error:
        raise InputError(f"Expected saved weights but {file} cannot be read: {error}.") from error


class ClientStates:
    """What clients keep between their participations: one file each, read only when the client is sampled.

    Args:
        folder: where the files are; made when the first state is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, client: int) -> Path:
        return self.folder / f"{client}.safetensors"

    def load(self, client: int) -> Record | None:
        """Return a client's state, or nothing if it has not taken part yet."""
        file = self._file(client)
        return load_record(file)[0] if file.exists() else None

    def save(self, client: int, state: Record) -> None:
        """Keep a client's state; an algorithm without state leaves no file."""
        if not state:
            self._file(client).unlink(missing_ok=True)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_record(self._file(client), state)
