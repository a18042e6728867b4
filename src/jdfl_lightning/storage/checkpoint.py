"""Clients' states, and checkpoints of a run, which refer to them."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge

from jdfl_lightning.core.errors import StorageError, reading
from jdfl_lightning.core.files import checked, remove_asides, sync
from jdfl_lightning.core.tensors import Record, Tensors
from jdfl_lightning.storage.bundles import Bundle, Bundles
from jdfl_lightning.storage.records import KEY, load_record, open_record, save_record

CHECKPOINTS, CLIENTS = "checkpoints", "clients"
"""Subfolders of a run folder."""

_STATE = re.compile(r"(\d+)-(\d+)\.safetensors")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"Expected to write {folder} but: {error.strerror or error}.") from error


class ClientStates:
    """Clients' states between participations: a file for each client and round, read when it is needed.

    States that are saved together share a file (`Bundles`). A state is written as soon as the client has trained. It
    becomes valid once the server has accepted the round and lists it in a checkpoint; until then the previous state is
    kept.

    Args:
        folder: folder of the files; made when the first state is saved.
        reset_damaged: whether a client whose state cannot be read starts with a new state.
        durable: whether a state survives a power cut as soon as it is saved; else once a checkpoint refers to it, which
            is sooner done for many.
    """

    def __init__(self, folder: Path, reset_damaged: bool = False, durable: bool = True) -> None:
        self.folder, self.reset_damaged, self.durable = folder, reset_damaged, durable
        self._bundles = Bundles(folder)

    def recall(self, client: int, round: int) -> Record | None:
        """Return a client's state after a round; None if it is damaged and may be reset."""
        try:
            return self.load(client, round)
        except StorageError as error:
            return self._reset(client, round, error)

    def _reset(self, client: int, round: int, error: StorageError) -> Record | None:
        if self.reset_damaged:
            return None
        raise StorageError(
            f"{error} {self._offer(client, round)}--checkpoint.reset_damaged_clients true lets it start afresh."
        ) from error

    def recall_all(self, wanted: Mapping[int, int]) -> dict[int, Record | None]:
        """Return the states of several clients, each after a round, as `recall` does."""
        together: dict[Bundle | None, list[int]] = {}
        for client, round in wanted.items():
            together.setdefault(self._bundle(client, round), []).append(client)
        found: dict[int, Record | None] = {}
        for bundle, clients in together.items():
            if bundle is None:
                found |= {client: self.recall(client, wanted[client]) for client in clients}
                continue
            for client, state in self._bundles.load(bundle, clients).items():
                found[client] = self._reset(client, wanted[client], state) if isinstance(state, StorageError) else state
        return found

    def _offer(self, client: int, damaged: int) -> str:
        """Name the newest checkpoint with another, undamaged state of the client, if there is one."""
        checkpoints = Checkpoints(self.folder.parent, keep=1)
        for round in checkpoints.rounds():
            try:
                known = read_header(checkpoints.file(round)).clients.get(client)
                if known != damaged:
                    if known is not None:
                        self.load(client, known)
                    return f"The checkpoint before it is whole: resume it with --resume {checkpoints.file(round)}, or "
            except StorageError:
                continue
        return ""

    def missing(self, wanted: Mapping[int, int]) -> list[int]:
        """Return the clients whose states of the given rounds are missing."""
        present = set(os.listdir(self.folder)) if self.folder.is_dir() else set()  # noqa: PTH208 - there may be many
        return [
            client
            for client, round in wanted.items()
            if self._file(client, round).name not in present and self._bundles.find(client, round) is None
        ]

    def _file(self, client: int, round: int) -> Path:
        return self.folder / f"{client}-{round}.safetensors"

    def _bundle(self, client: int, round: int) -> Bundle | None:
        """Return the bundle of a state; None if it has a file of its own, as a damaged bundle of its round has not."""
        bundle = self._bundles.find(client, round)
        damaged = bundle is not None and not bundle.size
        return None if damaged and self._file(client, round).exists() else bundle

    def load(self, client: int, round: int) -> Record:
        """Return a client's state after a round."""
        if (bundle := self._bundle(client, round)) is not None:
            state = self._bundles.load(bundle, [client])[client]
            if isinstance(state, StorageError):
                raise state
            return state
        record, about = load_record(self._file(client, round))
        if about != {"client": client, "round": round}:
            raise StorageError(f"Expected the state of client {client} but {self._file(client, round)} is of {about}.")
        return record

    def save(self, client: int, round: int, state: Record) -> None:
        """Save a client's state."""
        _make(self.folder)
        self._bundles.discard(round, [client])
        about = {"client": client, "round": round}
        save_record(self._file(client, round), state, about, private=True, durable=self.durable)

    def save_all(self, round: int, states: Mapping[int, Record]) -> None:
        """Save the states of several clients after a round: in one file, if they have the same form."""
        if not states:
            return
        _make(self.folder)
        if not self._bundles.save(round, states, self.durable):
            for client, state in states.items():
                self.save(client, round, state)

    def sync(self, states: Iterable[tuple[int, int]]) -> None:
        """Make states durable, each a (client, round); those that are not here, but at a site, are left out."""
        if self.folder.is_dir():
            files = ((self._bundle(*state), self._file(*state)) for state in states)
            sync(self.folder, {(file if bundle is None else bundle.file).name for bundle, file in files})

    def settle(self, client: int, since: int, oldest: int) -> None:
        """Remove the states of a client that are no longer needed.

        Args:
            client: its id.
            since: the last round whose state was accepted; states of later rounds were never accepted.
            oldest: the round before which only the newest state can still be needed.
        """
        names = [file.stem.partition("-")[2] for file in self.folder.glob(f"{client}-*.safetensors")]
        rounds = sorted(int(name) for name in names if name.isdecimal())
        accepted = [round for round in rounds if round <= since]
        for round in [*rounds[len(accepted) :], *[round for round in accepted if round < oldest][:-1]]:
            self._file(client, round).unlink(missing_ok=True)

    def remove(self, states: Iterable[tuple[int, int]], fully: bool = False) -> None:
        """Remove states, each a (client, round); fully: files with others too are written anew at once."""
        for client, round in states:
            bundle = self._bundles.find(client, round)
            if bundle is None or not bundle.size:
                self._file(client, round).unlink(missing_ok=True)
            else:
                bundle.clients.remove(client)
        self._bundles.shrink(fully)

    def kept(self) -> list[tuple[int, int]]:
        """Return (client, round) of all saved states, and remove temporary files left by killed processes."""
        if not self.folder.is_dir():
            return []
        remove_asides(self.folder)
        found = map(_STATE.fullmatch, os.listdir(self.folder))  # noqa: PTH208 - there may be many
        return [*((int(state[1]), int(state[2])) for state in found if state), *self._bundles.kept()]


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


def _as_table(numbers: Mapping[int, int]) -> Tensors:
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
        header = checked(CheckpointHeader, json.loads((stored.metadata() or {})[KEY].partition(" ")[2]))
        clients, joined = (
            {name: stored.get_tensor(f"{group}/{name}") for name in ("client", "value")}
            for group in ("clients", "joined")
        )
        return replace(header, clients=_from_table(clients), joined=_from_table(joined))


class Checkpoints:
    """The checkpoints of a run: one file each, and the clients' states it refers to.

    Args:
        folder: the run folder.
        keep: how many to keep.
        states: the states, if somebody else in this process uses them too.
    """

    def __init__(self, folder: Path, keep: int, states: ClientStates | None = None) -> None:
        self.folder, self.keep = folder / CHECKPOINTS, keep
        self.states = ClientStates(folder / CLIENTS) if states is None else states
        self._named: dict[int, dict[int, int]] = {}
        """The states that the kept checkpoints refer to."""
        self._newest: dict[int, int] = {}
        """The current states, whether a checkpoint refers to them yet or not."""
        self._durable = 0
        """The round up to which the states that a checkpoint refers to are durable."""

    def file(self, round: int) -> Path:
        """Return the file of a round's checkpoint."""
        return self.folder / f"{round}.safetensors"

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, the newest first."""
        names = [file.stem for file in self.folder.glob("*.safetensors")]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def save(self, record: Record, header: CheckpointHeader, last: bool = False) -> None:
        """Write a checkpoint, then remove files that no kept checkpoint needs.

        Args:
            record: the server's tensors.
            header: the values stored with them.
            last: whether it is the run's last; then all unneeded files are removed.
        """
        _make(self.folder)
        newer = itertools.takewhile(lambda state: state[1] > self._durable, reversed(header.clients.items()))
        self.states.sync(newer)  # before the checkpoint that refers to them; the states of the last rounds come last
        self._durable = header.round
        stored = asdict(replace(header, clients={}, joined={}))
        tables = {"clients": _as_table(header.clients), "joined": _as_table(header.joined)}
        save_record(self.file(header.round), record | tables, stored, private=True)
        self._named[header.round] = header.clients
        while len(self._named) > self.keep:
            oldest = min(self._named)
            self.file(oldest).unlink(missing_ok=True)
            self.forget(self._named.pop(oldest).items())
        if last:
            self.clean(header.round, header.clients)

    def forget(self, states: Iterable[tuple[int, int]], fully: bool = False) -> None:
        """Remove states, each a (client, round), except current ones and those that a kept checkpoint refers to."""
        needed = [self._newest, *self._named.values()]
        unneeded = ((client, round) for client, round in states if all(own.get(client) != round for own in needed))
        self.states.remove(unneeded, fully)

    def advance(self, round: int, newest: dict[int, int]) -> None:
        """Remove the states that a round has replaced.

        Args:
            round: the round.
            newest: the round of each client's state after it; clients of this round come last.
        """
        before, self._newest = self._newest, newest
        trained = itertools.takewhile(lambda client: newest[client] == round, reversed(newest))
        self.forget((client, before[client]) for client in trained if client in before)

    def clean(self, round: int, newest: dict[int, int]) -> None:
        """Remove all files that the kept checkpoints do not need; call it only while no client trains.

        Args:
            round: the last round to keep.
            newest: the round of each client's state after it.
        """
        kept = [number for number in self.rounds() if number <= round][: self.keep]
        named: dict[int, dict[int, int]] = {}
        for number in kept:
            try:
                named[number] = self._named[number] if number in self._named else read_header(self.file(number)).clients
            except StorageError:  # damaged: remove it with its states
                self.file(number).unlink(missing_ok=True)
        for number in set(self.rounds()) - set(kept):
            self.file(number).unlink(missing_ok=True)
        remove_asides(self.folder)
        self._named, self._newest, self._durable = named, newest, round
        self.forget(self.states.kept(), fully=True)

    def load(self, file: Path, states_here: bool = True) -> tuple[Record, CheckpointHeader]:
        """Read a checkpoint; if clients' states are in the run folder, check that those it refers to exist.

        A state's content is checked when it is used, as states may be many and large.
        """
        record, header = load_record(file)[0], read_header(file)
        del record["clients"], record["joined"]
        if states_here and (missing := self.states.missing(header.clients)):
            raise StorageError(
                f"Expected the states of all clients but that of client {missing[0]}, which {file} names, is not in "
                f"{self.states.folder}."
            )
        return record, header


def read_learned(folder: Path, part: str) -> Tensors:
    """Return what a part of the loss had learned at the newest checkpoint of a run; nothing if it does not learn.

    Args:
        folder: the run folder.
        part: name of its group in messages.
    """
    checkpoints = Checkpoints(folder, keep=1)
    for round in checkpoints.rounds():
        return load_record(checkpoints.file(round))[0].get(f"learned.{part}", {})
    return {}
