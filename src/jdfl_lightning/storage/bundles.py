"""Bundles: the states of clients that were trained together, in one file that is written and synced at once."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge
from numpy.typing import NDArray
from torch import Tensor

from jdfl_lightning.core.errors import StorageError, reading
from jdfl_lightning.core.files import checked, in_threads, write_whole
from jdfl_lightning.core.tensors import Record, Tensors, stack_rows
from jdfl_lightning.storage.records import KEY, as_groups, flat_names, open_record, without_copies

_AT_ONCE = 32
"""Clients whose checksums a thread computes before it takes others."""
_BUNDLE = re.compile(r"bundle-(\d+)-\d+-\d+\.safetensors")


@dataclass(frozen=True)
class _Header:
    """What a bundle stores besides tensors, whose first dimension is the clients."""

    round: Annotated[int, Ge(1)]
    clients: list[int]
    digests: list[str]
    """A checksum for each client, so that one state can be read without the others."""


@dataclass(eq=False)
class Bundle:
    """A file with the states of several clients after a round."""

    file: Path
    round: int
    clients: set[int] | None
    """Those whose states in it are still needed; None if the file is damaged, so that nobody knows."""
    size: int = 0
    """The number of states in the file."""


class Bundles:
    """The bundles in a folder of clients' states.

    Tensors of a bundle are stacked, one tensor for each name. A bundle is removed with its last state that is needed,
    and written again without the others when they are more than half of it. One that need not be durable at once is
    written while the next clients train, and is there for all who ask this object for it.

    Args:
        folder: the folder; it is made by whoever saves the first state.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[int, list[Bundle]] | None = None
        """By round; None before the first look at the folder, as most runs have no bundles."""
        self._writing: Future[None] | None = None

    def finish(self) -> None:
        """Wait until the last bundle is written; raise a `StorageError` if it could not be, now and from now on."""
        if (writing := self._writing) is None:  # read once: several threads may wait
            return
        try:
            writing.result()
        except StorageError:
            raise
        except Exception as error:  # memory or threads are used up: no client's fault
            raise StorageError(f"Expected to write clients' states but got {type(error).__name__}: {error}.") from error
        self._writing = None

    def find(self, client: int, round: int) -> Bundle | None:
        """Return the bundle with a client's state of a round, or one that is damaged and may have it; None if none."""
        bundles = self._of(round)
        return next(
            (bundle for bundle in bundles if bundle.clients is not None and client in bundle.clients),
            next((bundle for bundle in bundles if bundle.clients is None), None),
        )

    def kept(self) -> Iterator[tuple[int, int]]:
        """Yield (client, round) of all states."""
        self.finish()
        self._known = None  # another process may have been here
        for round in list(self._all):
            yield from ((client, round) for bundle in self._of(round) for client in bundle.clients or ())

    @property
    def _all(self) -> dict[int, list[Bundle]]:
        if self._known is None:
            self._known = {}
            names = os.listdir(self._folder) if self._folder.is_dir() else []  # noqa: PTH208 - there may be many
            for found in filter(None, map(_BUNDLE.fullmatch, sorted(names))):
                file, round = self._folder / found[0], int(found[1])
                try:
                    clients: set[int] | None = set(_read(file, round)[0].clients)
                except StorageError:
                    clients = None
                self._add(Bundle(file, round, clients, len(clients or ())))
        return self._known

    def _of(self, round: int) -> list[Bundle]:
        return self._all.get(round, [])

    def _add(self, bundle: Bundle) -> None:
        others = [other for other in self._of(bundle.round) if other.file != bundle.file]
        self._all[bundle.round] = [*others, bundle]

    def _drop(self, bundle: Bundle) -> None:
        self.finish()
        bundle.file.unlink(missing_ok=True)
        left = [other for other in self._of(bundle.round) if other is not bundle]
        if left:
            self._all[bundle.round] = left
        else:
            self._all.pop(bundle.round, None)

    def save(self, round: int, states: Mapping[int, Record], durable: bool) -> bool:
        """Save states in one file; return False if they are too few or of different forms, and nothing is saved.

        Args:
            round: the round.
            states: the clients' states after it.
            durable: whether it survives a power cut at once.
        """
        flat = [flat_names(state) for state in states.values()]
        forms = {tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(own.items())) for own in flat}
        if len(flat) < 2 or len(forms) > 1:
            return False
        for client in states:
            self.discard(client, round)
        self.finish()  # at most one waits, with its states in memory
        clients = list(states)
        stacked = {name: stack_rows([own[name] for own in flat]) for name in flat[0]}

        def write() -> None:
            digests = _digests(round, stacked, {client: row for row, client in enumerate(clients)})
            _write(bundle.file, _Header(round, clients, list(digests.values())), stacked, durable)

        bundle = self._new(round, clients)
        writer = ThreadPoolExecutor(1, "jdfl-bundles")  # one for a file: a process that was forked has no threads
        self._writing = writer.submit(write)
        writer.shutdown(wait=False)
        self._add(bundle)
        if durable:
            self.finish()
        return True

    def _new(self, round: int, clients: Collection[int]) -> Bundle:
        name = f"bundle-{round}-{min(clients)}-{len(clients)}.safetensors"
        return Bundle(self._folder / name, round, set(clients), len(clients))

    def load(self, bundle: Bundle, clients: Collection[int]) -> dict[int, Record | StorageError]:
        """Read states of a bundle; a client whose state is damaged has an error instead."""
        self.finish()
        if not bundle.file.exists():  # another process may have written it again, with fewer states
            self._known = None
            bundle = self.find(next(iter(clients)), bundle.round) or bundle
        file, round = bundle.file, bundle.round
        try:
            header, stacked = _read(file, round)
            rows = {client: row for row, client in enumerate(header.clients) if client in clients}
            digests = _digests(round, stacked, rows)
            found: dict[int, Record | StorageError] = {}
            for client in clients:
                row = rows[client]
                if digests[client] == header.digests[row]:
                    found[client] = as_groups({name: tensor[row] for name, tensor in stacked.items()})
                else:
                    what = f"Expected the state of client {client} but {file} is damaged"
                    found[client] = StorageError(f"{what}: its checksum does not match.")
            return found
        except StorageError as error:
            return dict.fromkeys(clients, error)

    def discard(self, client: int, round: int) -> None:
        """Remove a bundle with a client's state of a round that is saved anew: it is of an attempt that was void."""
        for bundle in self._of(round):
            if client in (bundle.clients or ()):
                self._drop(bundle)

    def remove(self, client: int, round: int) -> bool:
        """Remove a state; return whether there was one. Its place on the disk is freed by `shrink`."""
        held = [bundle.clients for bundle in self._of(round) if bundle.clients is not None and client in bundle.clients]
        for clients in held:
            clients.remove(client)
        return bool(held)

    def shrink(self, rounds: Collection[int] | None = None) -> None:
        """Free the place of removed states.

        Args:
            rounds: look only at bundles of these rounds, and leave those that are at least half full; None for all,
                so that what is left in the end does not depend on when it was removed.
        """
        for round in list(self._all) if rounds is None else rounds:
            for bundle in self._of(round):
                left = None if bundle.clients is None else len(bundle.clients)
                if left == 0:
                    self._drop(bundle)
                elif left is not None and (2 * left < bundle.size if rounds is not None else left < bundle.size):
                    self._rewrite(bundle)

    def _rewrite(self, bundle: Bundle) -> None:
        """Write a bundle again with the states that are needed; it is durable before the old one is removed."""
        self.finish()
        try:
            header, stacked = _read(bundle.file, bundle.round)
        except StorageError:  # damaged: it is reported when it is used
            return
        rows = [row for row, client in enumerate(header.clients) if client in (bundle.clients or ())]
        stacked = {name: tensor[rows] for name, tensor in stacked.items()}
        clients, digests = [header.clients[row] for row in rows], [header.digests[row] for row in rows]
        smaller = self._new(bundle.round, clients)
        _write(smaller.file, _Header(bundle.round, clients, digests), stacked, durable=True)
        self._add(smaller)
        self._drop(bundle)


def _write(file: Path, header: _Header, stacked: Tensors, durable: bool) -> None:
    write_whole(file, without_copies(stacked, json.dumps(vars(header))), private=True, durable=durable)


def _digests(round: int, stacked: Tensors, rows: Mapping[int, int]) -> dict[int, str]:
    """Return the checksums of clients' states, each that of a file of its own, without a tensor for each of them.

    Args:
        round: the round.
        stacked: the tensors.
        rows: the place of each client in them.
    """
    parts = [
        (f"{name} {tensor.dtype} {tuple(tensor.shape[1:])}\n".encode(), _bytes(tensor))
        for name, tensor in sorted(stacked.items())
    ]

    def digest(client: int) -> str:
        found = hashlib.blake2b(json.dumps({"client": client, "round": round}).encode(), digest_size=16)
        for form, values in parts:
            found.update(form)
            found.update(values[rows[client]])
        return found.hexdigest()

    clients = list(rows)
    some = [clients[start : start + _AT_ONCE] for start in range(0, len(clients), _AT_ONCE)]
    found = in_threads(lambda own: [digest(client) for client in own], some)  # hashing leaves Python's lock
    return dict(zip(clients, chain.from_iterable(found), strict=True))


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a stacked tensor, a row for each client."""
    values: NDArray[np.uint8] = tensor.reshape(len(tensor), tensor[0].numel()).view(torch.uint8).numpy()
    return values


def _read(file: Path, round: int) -> tuple[_Header, Tensors]:
    """Return the header and the tensors of a bundle: mapped, so that only what is used is read."""
    with reading(f"clients' states of round {round}", file):
        with open_record(file) as stored:
            header = checked(_Header, json.loads(stored.metadata()[KEY]))
            stacked = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a dict
        size = len(header.clients)
        same = len(set(header.clients)) == len(header.digests) == size and {len(t) for t in stacked.values()} <= {size}
        if header.round != round or not same:
            raise ValueError("its name, its lists or its tensors do not agree")
    return header, stacked
