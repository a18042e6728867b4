"""``discovery.json`` and the vectors beside it: the result of Phase 1."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Interval, Len
from pydantic import FiniteFloat, StringConstraints

from jdfl_lightning.clustering.clusters import PseudoDomains, project
from jdfl_lightning.clustering.updates import Updates
from jdfl_lightning.core.errors import InputError, last_line, plain, reading
from jdfl_lightning.core.files import checked, read_json, write_whole
from jdfl_lightning.storage.names import DISCOVERY, VECTORS, Count, Text
from jdfl_lightning.storage.records import load_record, save_record, stored_digest


def digest_discovery(folder: Path) -> str | None:
    """Return a digest of the discovery; None if there is none."""
    if not (folder / DISCOVERY).exists():
        return None
    found = json.dumps({name: value for name, value in read_discovery(folder).items() if name != "joined"})
    return hashlib.blake2b(f"{found} {stored_digest(folder / VECTORS)}".encode(), digest_size=16).hexdigest()


def save_discovery(
    folder: Path, updates: Updates, found: PseudoDomains, true_domains: Sequence[str] | None, data: str
) -> None:
    """Write ``discovery.json`` and the update vectors beside it.

    Args:
        folder: the run folder.
        updates: the clients' updates.
        found: the pseudo-domains.
        true_domains: the true domain of each client, if known.
        data: fingerprint of the images.
    """
    record = found.as_json(true_domains) | {
        "projection": dict(zip(map(str, updates.clients), project(updates.vectors), strict=True)),
        "left_out": {str(client): plain(last_line(reason)) for client, reason in updates.left_out.items()},
        "vector_length": updates.vectors.shape[1],
        "bytes_down": updates.bytes_down,
        "bytes_up": updates.bytes_up,
        "vectors": VECTORS,
        "data": data,
    }
    clients = torch.tensor(updates.clients)
    save_record(
        folder / VECTORS, {"centroids": {"mu": found.centroids}, "updates": {"u": updates.vectors, "clients": clients}}
    )
    write_whole(folder / DISCOVERY, json.dumps(record, indent=1).encode())


def save_joined(folder: Path, found: PseudoDomains, true_domains: Sequence[str] | None) -> None:
    """Add the newcomers to ``discovery.json``."""
    record = read_discovery(folder)
    record["joined"] = {
        str(client): {"domain": domain} | ({} if true_domains is None else {"true_domain": true_domains[client]})
        for client, domain in found.newcomers.items()
    }
    write_whole(folder / DISCOVERY, json.dumps(record, indent=1).encode())


@dataclass(frozen=True)
class _Member:
    """A client in ``discovery.json``."""

    domain: Count
    true_domain: Text | None = None


@dataclass(frozen=True)
class Summary:
    """The part of ``discovery.json`` that a report reads."""

    num_domains: Annotated[int, Interval(ge=1, le=100_000)]
    data: Text


@dataclass(frozen=True)
class _Found(Summary):
    """The whole of ``discovery.json``."""

    criterion: Annotated[str, StringConstraints(pattern=r"^\w{1,100}$")]
    note: Text
    picks: dict[Text, Count | None]
    assignments: dict[int, Count]
    inertias: dict[int, FiniteFloat]
    silhouettes: dict[int, FiniteFloat]
    similarities: list[list[FiniteFloat]]
    projection: dict[int, Annotated[list[FiniteFloat], Len(2, 2)]]
    left_out: dict[int, Text]
    vector_length: Count
    bytes_down: Count
    bytes_up: Count
    true_domains: dict[int, Text] = field(default_factory=dict)
    ari: FiniteFloat = 0.0
    nmi: FiniteFloat = 0.0
    joined: dict[int, _Member] = field(default_factory=dict)


def read_discovery(folder: Path) -> dict[str, Any]:
    """Read ``discovery.json``."""
    return read_as(folder, _Found)


def read_as(folder: Path, kind: type[Summary]) -> dict[str, Any]:
    """Read ``discovery.json`` and check the fields of `kind`."""
    missing = InputError(f"Expected a folder with pseudo-domains but {folder} has no {DISCOVERY}.")
    with reading("pseudo-domains", folder / DISCOVERY, missing):
        record: dict[str, Any] = read_json(folder / DISCOVERY)
        if isinstance(checked(kind, record), _Found):
            _check_agreement(record)
            record["note"] = plain(record["note"])
    return record


def _check_agreement(record: dict[str, Any]) -> None:
    """Raise a ValueError unless all parts of ``discovery.json`` have the same clients and pseudo-domains."""
    count, clients = record["num_domains"], set(record["assignments"])
    if any(domain >= count for domain in record["assignments"].values()):
        raise ValueError(f"assignments: there are {count} pseudo-domains")
    if [len(row) for row in record["similarities"]] != [count] * count:
        raise ValueError(f"similarities: there are {count} pseudo-domains")
    for name in ("projection", "true_domains"):
        if set(record.get(name, clients)) != clients:
            raise ValueError(f"{name}: its clients are not those of assignments")
    agreement = {"true_domains", "ari", "nmi"} & set(record)
    if len(agreement) not in (0, 3):
        raise ValueError(f"{min(agreement)}: true_domains, ari and nmi come together")


def load_discovery(folder: Path, data: str, num_clients: int) -> tuple[Updates, PseudoDomains] | None:
    """Read a discovery; None if there is none yet, or if it was made with other images.

    Args:
        folder: folder of a run or of `discover`.
        data: fingerprint of the images.
        num_clients: N; all client ids must be below it.
    """
    if not (folder / DISCOVERY).exists():
        return None
    found = checked(_Found, read_discovery(folder))
    record = load_record(folder / VECTORS)[0]
    if found.data != data:
        return None
    with reading("pseudo-domains", folder / DISCOVERY):
        clients, vectors, centroids = record["updates"]["clients"], record["updates"]["u"], record["centroids"]["mu"]
        _check_vectors(clients, vectors, centroids, num_clients)
        if list(found.assignments) != clients.tolist() or len(centroids) != found.num_domains:
            raise ValueError(f"{VECTORS} is of another discovery")
    updates = Updates(clients.tolist(), vectors, found.left_out, found.bytes_down, found.bytes_up)
    chosen = found.criterion, found.inertias, found.silhouettes, found.note
    return updates, PseudoDomains(found.assignments, centroids, *chosen)


def _check_vectors(clients: torch.Tensor, vectors: torch.Tensor, centroids: torch.Tensor, num_clients: int) -> None:
    """Raise a ValueError unless these are client ids, a vector for each of them, and centroids of the same length."""
    ids = clients.dtype == torch.long and clients.ndim == 1 and 0 < len(clients) == len(clients.unique())
    if not ids or clients.min() < 0 or clients.max() >= num_clients:
        raise ValueError(f"{VECTORS} has vectors of other clients")
    sizes = vectors.ndim == centroids.ndim == 2 and len(vectors) == len(clients) and len(centroids) > 0
    if not (sizes and vectors.shape[1] == centroids.shape[1]):
        raise ValueError(f"{VECTORS} has no vector for each client")
    if not all(part.dtype == torch.float32 and part.isfinite().all() for part in (vectors, centroids)):
        raise ValueError(f"{VECTORS} has vectors that are not finite, or not of {torch.float32}")
