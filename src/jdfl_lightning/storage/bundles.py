"""Bundles: the states of clients that were trained together, in one file that is written and synced at once."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Len

from jdfl_lightning.core.errors import StorageError, reading
from jdfl_lightning.core.files import checked, write_whole
from jdfl_lightning.core.tensors import Record, Tensors, digest_tensors, stack_rows
from jdfl_lightning.storage.records import KEY, as_file, as_groups, flat_names, open_record

_BUNDLE = re.compile(r"bundle-(\d+)-\d+-\d+\.safetensors")


@dataclass(frozen=True)
class _Header:
    """What a bundle stores besides tensors, whose first dimension is the clients."""

    round: Annotated[int, Ge(1)]
    clients: Annotated[list[int], Len(1)]
    digests: list[str]
    """A checksum for each client, so that one state can be read without the others."""


@dataclass(eq=False)
class Bundle:
    """A file with the states of several clients after a round."""

    file: Path
    round: int
    clients: set[int]
    """Those whose states in it are still needed."""
    size: int
    """The number of states in the file; 0 if it is damaged, so that nobody knows whose they are."""


class Bundles:
    """The bundles in a folder of clients' states.

    Tensors of a bundle are stacked, one tensor for each name. A bundle is removed with its last state that is needed,
    and written again without the others when they are more than half of it.

    Args:
        folder: the folder; it is made by whoever saves the first state.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: defaultdict[int, dict[Path, Bundle]] | None = None
        """By round and file; None before the first look at the folder, as most runs have no bundles."""

    @property
    def _all(self) -> defaultdict[int, dict[Path, Bundle]]:
        if self._known is None:
            self._known = defaultdict(dict)
            names = os.listdir(self._folder) if self._folder.is_dir() else []  # noqa: PTH208 - there may be many
            for found in filter(None, map(_BUNDLE.fullmatch, sorted(names))):
                file, round = self._folder / found[0], int(found[1])
                try:
                    clients = set(_read(file, round)[0].clients)
                except StorageError:
                    clients = set()
                self._known[round][file] = Bundle(file, round, clients, len(clients))
        return self._known

    def find(self, client: int, round: int) -> Bundle | None:
        """Return the bundle with a client's state of a round, or one that is damaged and may have it; None if none."""
        damaged = None
        for bundle in self._all[round].values():
            if client in bundle.clients:
                return bundle
            if not bundle.size:
                damaged = bundle
        return damaged

    def kept(self) -> list[tuple[int, int]]:
        """Return (client, round) of all states."""
        self._known = None  # another process may have been here
        bundles = [bundle for some in self._all.values() for bundle in some.values()]
        return [(client, bundle.round) for bundle in bundles for client in bundle.clients]

    def save(self, round: int, states: Mapping[int, Record], durable: bool) -> bool:
        """Save states in one file; return False if they are too few or of different forms, and nothing is saved.

        Args:
            round: the round.
            states: the clients' states after it.
            durable: whether it survives a power cut at once.
        """
        flat = {client: flat_names(state) for client, state in states.items()}
        own = list(flat.values())
        forms = {tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(one.items())) for one in own}
        if len(own) < 2 or len(forms) > 1:
            return False
        self.discard(round, list(states))
        digests = [_digest(client, round, tensors) for client, tensors in flat.items()]
        stacked = {name: stack_rows([one[name] for one in own]) for name in own[0]}
        self._write(_Header(round, list(states), digests), stacked, durable)
        return True

    def _write(self, header: _Header, stacked: Tensors, durable: bool) -> None:
        round, clients = header.round, header.clients
        file = self._folder / f"bundle-{round}-{min(clients)}-{len(clients)}.safetensors"
        write_whole(file, as_file(stacked, json.dumps(vars(header))), private=True, durable=durable)
        self._all[round][file] = Bundle(file, round, set(clients), len(clients))

    def load(self, bundle: Bundle, clients: Collection[int]) -> dict[int, Record | StorageError]:
        """Read states of a bundle; a client whose state is damaged has an error instead."""
        if not bundle.file.exists():  # another process may have written it again, with fewer states
            self._known = None
            bundle = self.find(next(iter(clients)), bundle.round) or bundle
        try:
            header, stacked = _read(bundle.file, bundle.round)
        except StorageError as error:
            return dict.fromkeys(clients, error)
        rows = {client: row for row, client in enumerate(header.clients)}
        found: dict[int, Record | StorageError] = {}
        for client in clients:
            own = {name: tensor[rows[client]] for name, tensor in stacked.items()}
            if _digest(client, bundle.round, own) == header.digests[rows[client]]:
                found[client] = as_groups(own)
            else:
                what = f"Expected the state of client {client} but {bundle.file} is damaged"
                found[client] = StorageError(f"{what}: its checksum does not match.")
        return found

    def discard(self, round: int, clients: Collection[int]) -> None:
        """Remove the bundles with states of a round that are saved anew: they are of an attempt that was void."""
        for bundle in list(self._all[round].values()):
            if not bundle.clients.isdisjoint(clients):
                self._drop(bundle)

    def _drop(self, bundle: Bundle) -> None:
        bundle.file.unlink(missing_ok=True)
        del self._all[bundle.round][bundle.file]

    def shrink(self, fully: bool) -> None:
        """Free the place of states that are no longer needed.

        Args:
            fully: also in bundles that are at least half full, so that what is left in the end does not depend on when
                a state was removed.
        """
        for bundle in [bundle for some in self._all.values() for bundle in some.values()]:
            left = len(bundle.clients)
            if bundle.size and not left:
                self._drop(bundle)
            elif left < bundle.size if fully else 2 * left < bundle.size:
                self._rewrite(bundle)

    def _rewrite(self, bundle: Bundle) -> None:
        """Write a bundle again with the states that are needed; it is durable before the old one is removed."""
        try:
            header, stacked = _read(bundle.file, bundle.round)
        except StorageError:  # damaged: it is reported when it is used
            return
        rows = [row for row, client in enumerate(header.clients) if client in bundle.clients]
        clients, digests = [header.clients[row] for row in rows], [header.digests[row] for row in rows]
        stacked = {name: tensor[rows] for name, tensor in stacked.items()}
        self._write(_Header(bundle.round, clients, digests), stacked, durable=True)
        self._drop(bundle)


def _digest(client: int, round: int, tensors: Tensors) -> str:
    """Return the checksum that a client's state has in a file of its own too."""
    return digest_tensors(tensors, json.dumps({"client": client, "round": round}))


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
