"""Named tensors on disk, whole or not there at all: records, clients' states, and checkpoints of a run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from jdfl_lightning.errors import StorageError
from jdfl_lightning.tensors import Record, Tensors

_KEY = "jdfl"
"""The one key of a file's metadata (safetensors writes several in random order): a digest, a space, JSON."""


def write_whole(file: Path, content: bytes) -> None:
    """Write a file aside and put it in its place: whoever reads it finds the old content or the new, never a part."""
    aside = file.with_name(f".{file.name}.tmp")
    try:
        try:
            with aside.open("wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            aside.replace(file)
            _sync_folder(file.parent)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError(f"Expected to write {file} but: {error.strerror or error}.") from error


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _digest(tensors: Mapping[str, torch.Tensor], about: str) -> str:
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_record(file: Path, record: Record, about: Mapping[str, Any] | None = None) -> None:
    """Write a record with a checksum, whole or not at all.

    Args:
        file: where the record goes.
        record: groups of named tensors; stored as ``group/name``.
        about: plain values to store with it.
    """
    tensors: Tensors = {}
    stored: set[int] = set()
    for group, named in record.items():
        for name, tensor in named.items():
            shared = tensor.untyped_storage().data_ptr() in stored  # safetensors takes no storage twice
            tensors[f"{group}/{name}"] = tensor.clone() if shared else tensor.contiguous()
            stored.add(tensor.untyped_storage().data_ptr())
    text = json.dumps(about or {})
    write_whole(file, save(tensors, {_KEY: f"{_digest(tensors, text)} {text}"}))


def load_record(file: Path) -> tuple[Record, dict[str, Any]]:
    """Read a record and what is stored with it; a file that is missing, damaged or foreign is named in the error."""
    tensors: Tensors = {}
    try:
        with safe_open(file, framework="pt") as stored:
            digest, _, text = (stored.metadata() or {})[_KEY].partition(" ")
            for key in stored.keys():  # noqa: SIM118 - not a dict
                tensors[key] = stored.get_tensor(key)
        if _digest(tensors, text) != digest:
            raise StorageError(f"Expected saved tensors but {file} is damaged: its checksum does not match.")
        about = json.loads(text)
        if not isinstance(about, dict):
            raise ValueError("no settings")
    except FileNotFoundError as error:
        raise StorageError(f"Expected saved tensors but there is no file {file}.") from error
    except StorageError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise StorageError(f"Expected saved tensors but {file} cannot be read: {error}.") from error
    record: Record = {}
    for key, tensor in tensors.items():
        group, _, name = key.partition("/")
        record.setdefault(group, {})[name] = tensor
    return record, about


class ClientStates:
    """What clients keep between their participations: a file for each client and round, read when it is needed.

    A state is written as soon as the client has trained; it counts once the server has accepted the round and names it
    in a checkpoint. Until then the one before stays where it is.

    Args:
        folder: where the files are; made when the first state is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _file(self, client: int, round: int) -> Path:
        return self.folder / f"{client}-{round}.safetensors"

    def load(self, client: int, round: int) -> Record:
        """Return the state that a client was left with in a round."""
        record, about = load_record(self._file(client, round))
        if about != {"client": client, "round": round}:
            raise StorageError(f"Expected the state of client {client} but {self._file(client, round)} is of {about}.")
        return record

    def save(self, client: int, round: int, state: Record) -> None:
        """Keep a client's state."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"Expected to write {self.folder} but: {error.strerror or error}.") from error
        save_record(self._file(client, round), state, {"client": client, "round": round})

    def settle(self, client: int, since: int, oldest: int) -> None:
        """Remove the states of a client that nobody will ask for.

        Args:
            client: its id.
            since: the last round whose state was accepted; states of later rounds are of rounds that never were.
            oldest: the round before which only the newest state can still be needed.
        """
        names = [file.stem.partition("-")[2] for file in self.folder.glob(f"{client}-*.safetensors")]
        rounds = sorted(int(name) for name in names if name.isdecimal())
        accepted = [round for round in rounds if round <= since]
        for round in [*rounds[len(accepted) :], *[round for round in accepted if round < oldest][:-1]]:
            self.remove(client, round)

    def remove(self, client: int, round: int) -> None:
        """Remove a client's state of a round."""
        self._file(client, round).unlink(missing_ok=True)

    def retain(self, wanted: Iterable[tuple[int, int]], under_way: int | None = None) -> None:
        """Remove all files but the states of these (client, round), and those of rounds that are under way.

        Args:
            wanted: the states to keep.
            under_way: the first round that may be; none if there is none.
        """
        keep = {self._file(*key).name for key in wanted}
        if self.folder.is_dir():
            for name in os.listdir(self.folder):  # noqa: PTH208 - there may be many, and no path is needed for most
                number = name.partition("-")[2].partition(".")[0]
                later = under_way is not None and number.isdecimal() and int(number) >= under_way
                if name not in keep and not later:
                    (self.folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class About:
    """What a checkpoint holds beside tensors."""

    round: int
    clients: dict[int, int]
    """The round of each client's newest state."""
    metrics: dict[str, float]
    """The round's, without its scores."""
    data: str
    """Fingerprint of the images and of who holds them."""
    logger: str | None
    """Id of the logger's run."""
    joined: dict[int, int] = field(default_factory=dict)
    """The pseudo-domains of clients that came after Phase 1."""


_SCAN = 20
"""Checkpoints from one look through all files to the next; in between, only what a removed one named is removed."""


class Checkpoints:
    """The checkpoints of a run: one file each, and the clients' states that it names.

    Args:
        folder: the run folder.
        keep: how many to keep.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder / "checkpoints", keep
        self.states = ClientStates(folder / "clients")
        self._named: dict[int, dict[int, int]] = {}
        """The states that the kept checkpoints name, as far as this process has read or written them."""
        self._saved = 0

    def file(self, round: int) -> Path:
        """Return the file of a round's checkpoint."""
        return self.folder / f"{round}.safetensors"

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, the newest first."""
        names = [file.stem for file in self.folder.glob("*.safetensors")]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def save(self, record: Record, about: About, last: bool = False) -> None:
        """Write a checkpoint, then remove what neither it nor those kept beside it need.

        Args:
            record: the server's tensors.
            about: what is stored with them.
            last: whether it is the run's last, after which nothing that nobody needs stays.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"Expected to write {self.folder} but: {error.strerror or error}.") from error
        stored = asdict(replace(about, clients={}, joined={}))
        tables = {"clients": _as_table(about.clients), "joined": _as_table(about.joined)}
        save_record(self.file(about.round), record | tables, stored)
        self._named[about.round] = about.clients
        if last or self._saved % _SCAN == 0:
            self.clean(about.round, over=last)
        else:
            self._drop()
        self._saved += 1

    def _drop(self) -> None:
        """Remove the oldest checkpoints, with the states that the next one does not name either."""
        while len(self._named) > self.keep:
            oldest, following = sorted(self._named)[:2]
            for client, round in self._named.pop(oldest).items():
                if self._named[following].get(client) != round:
                    self.states.remove(client, round)
            self.file(oldest).unlink(missing_ok=True)

    def supersede(self, before: Mapping[int, int], state: dict[int, int], round: int) -> None:
        """Remove the states that a round has replaced, unless a kept checkpoint names them.

        Args:
            before: the round of each client's state before the round.
            state: after it; those of the round come last.
            round: the round.
        """
        for client, newest in reversed(state.items()):
            if newest != round:
                return
            old = before.get(client)
            if old is not None and all(named.get(client) != old for named in self._named.values()):
                self.states.remove(client, old)

    def clean(self, newest: int, over: bool = True) -> None:
        """Look through all files and remove those that the kept checkpoints, from one round back, do not need.

        Args:
            newest: the last round that counts.
            over: whether nobody is at a later round, whose states are then of rounds that never were.
        """
        kept = [round for round in self.rounds() if round <= newest][: self.keep]
        named: dict[int, dict[int, int]] = {}
        for round in kept:
            try:
                named[round] = self._named[round] if round in self._named else read_about(self.file(round)).clients
            except StorageError:  # damaged: its states go with it
                self.file(round).unlink(missing_ok=True)
        for file in self.folder.iterdir():
            if file not in map(self.file, kept):
                file.unlink(missing_ok=True)
        self._named = named
        self.states.retain(
            (pair for clients in named.values() for pair in clients.items()), None if over else newest + 1
        )

    def load(self, file: Path, states_here: bool = True) -> tuple[Record, About]:
        """Read a checkpoint and make sure that every state it names is whole, if they are here."""
        record, about = load_record(file)
        found = _parse_about(file, about, record.pop("clients", {}), record.pop("joined", {}))
        for client, round in found.clients.items() if states_here else ():
            self.states.load(client, round)
        return record, found


def _as_table(numbers: Mapping[int, int]) -> Tensors:
    """Return numbers by client as tensors, 16 bytes each: there may be many clients."""
    return {"client": torch.tensor(list(numbers)).long(), "value": torch.tensor(list(numbers.values())).long()}


def read_about(file: Path) -> About:
    """Read what a checkpoint holds beside tensors, and not the tensors."""
    try:
        with safe_open(file, framework="pt") as stored:
            about = json.loads((stored.metadata() or {})[_KEY].partition(" ")[2])
            clients, joined = (
                {name: stored.get_tensor(f"{group}/{name}") for name in ("client", "value")}
                for group in ("clients", "joined")
            )
        return _parse_about(file, about, clients, joined)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"Expected a checkpoint but {file} cannot be read: {error}.") from error


def _parse_about(file: Path, about: Mapping[str, Any], clients: Tensors, joined: Tensors) -> About:
    try:
        return About(
            round=int(about["round"]),
            clients=dict(zip(clients["client"].tolist(), clients["value"].tolist(), strict=True)),
            metrics={
                str(name): value if type(value) is int else float(value) for name, value in about["metrics"].items()
            },
            data=str(about["data"]),
            logger=None if about["logger"] is None else str(about["logger"]),
            joined=dict(zip(joined["client"].tolist(), joined["value"].tolist(), strict=True)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"Expected a checkpoint but {file} is something else.") from error
