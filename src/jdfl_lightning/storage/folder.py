"""What a run leaves behind, written and read: config, metrics, discovery, weights."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval, Len
from matplotlib.figure import Figure
from pydantic import FiniteFloat

from jdfl_lightning.clustering.clusters import PseudoDomains, project
from jdfl_lightning.clustering.updates import Updates
from jdfl_lightning.core.errors import InputError, StorageError, last_line, plain
from jdfl_lightning.core.files import checked, is_aside, read_json, read_settings, read_text, refuse_links, write_whole
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import Score
from jdfl_lightning.storage.checkpoint import CHECKPOINTS, CLIENTS, load_record, save_record, stored_digest
from jdfl_lightning.storage.trust import CONFIG

RUNS = "runs"
"""Where new run folders are made."""
METRICS, CURVES = "metrics.csv", "curves.png"
DISCOVERY, DISCOVERY_FIGURE, VECTORS = "discovery.json", "discovery.png", "discovery.safetensors"
ALONE = "-discovery"
"""End of the name of a folder of Phase 1 alone."""
DIAGNOSIS, DIAGNOSIS_FIGURE = "diagnosis.csv", "diagnosis.png"
DOMAIN_PREFIX = "test/acc/"
"""Start of the names of a domain's accuracy in ``metrics.csv``."""

_DPI = 130
"""Of the pictures in a run folder."""

Which = Literal["best", "last"]


def make_run_folder(run_dir: str | None, name: str) -> Path:
    """Make the folder of a run, by default a new one in ``runs``; one that holds something is never touched."""
    folder = Path(run_dir) if run_dir else Path(RUNS) / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    if (
        run_dir
        and folder.exists()
        and (not folder.is_dir() or any(not is_aside(file.name) for file in folder.iterdir()))
    ):
        raise InputError(f"Expected --run_dir to be new or empty but {folder} exists: choose another, or remove it.")
    try:
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=bool(run_dir))
                return folder
            except FileExistsError:  # two runs in one second
                folder = folder.with_name(f"{folder.name}-again")
    except OSError as error:
        raise InputError(f"Expected --run_dir to be writable but got {folder}: {error}.") from error


def require_own_files(folder: Path) -> None:
    """Raise an `InputError` if what a run has in its folder is a link to something elsewhere."""
    refuse_links(folder, (CHECKPOINTS, CLIENTS))


def save_figure(figure: Figure, file: Path) -> None:
    """Write a picture of a run folder."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=_DPI)
    write_whole(file, out.getvalue())


class RunLock:
    """Keeps a second process from going on with a run; the system lets go of it when this process ends."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        """Let go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def lock_run(folder: Path) -> RunLock:
    """Lock a run folder, where the system can; raise an `InputError` if another process has."""
    if os.name != "posix":
        return RunLock(None)
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise InputError(f"Expected a run that nobody is at but another process is writing {folder}.") from error
    except OSError:  # a file system without locks
        pass
    return RunLock(descriptor)


def append_metrics(folder: Path, row: Mapping[str, float]) -> None:
    """Add a round's row to ``metrics.csv``; a column that is new is NaN in the rows before."""
    write_metrics(folder, [*_read_rows(folder), row])


def write_metrics(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``metrics.csv`` whole; a column that a row has not is NaN in it."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="nan", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(folder / METRICS, out.getvalue().encode())


def _read_rows(folder: Path) -> list[dict[str, Any]]:
    if not (folder / METRICS).exists():
        return []
    try:
        rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(read_text(folder / METRICS), newline="")))
        if any(None in row or None in row.values() for row in rows):
            raise ValueError("a row has more or fewer cells than the first line")
        return rows
    except (OSError, ValueError, csv.Error) as error:
        raise StorageError(f"Expected a table but {folder / METRICS} cannot be read: {error}.") from error


def digest_rows(rows: Iterable[Mapping[str, Any]], before: str = "") -> str:
    """Return a digest of a table's rows: what they say, not how long it took.

    Args:
        rows: numbers, or the texts that ``metrics.csv`` has for them.
        before: the digest of the rows before these.
    """
    for row in rows:
        cells = sorted(f"{n}={v}" for n, v in row.items() if not n.startswith("time/") and str(v) != "nan")
        before = hashlib.blake2b("\n".join([before, *cells]).encode(), digest_size=16).hexdigest()
    return before


def digest_metrics(folder: Path, until: int) -> str:
    """Return the digest of the rows of ``metrics.csv`` up to a round."""
    return digest_rows(row for row in _read_rows(folder) if _number(folder, row, "round") <= until)


def same_scores(folder: Path, header: ModelHeader) -> bool:
    """Return whether the row of a saved model's round has the accuracies that are saved with the model."""
    row = next((row for row in _read_rows(folder) if _number(folder, row, "round") == header.round), None)
    if row is None or math.isnan(_number(folder, row, "test/acc")) == ("test/acc" in header.scores):
        return False
    return all(_number(folder, row, name) == value for name, value in header.scores.items())


def was_evaluated(folder: Path, round: int) -> bool | None:
    """Return whether the row of a round has accuracies; none if there is no such row."""
    row = next((row for row in _read_rows(folder) if _number(folder, row, "round") == round), None)
    if row is None:
        return None
    names = [name for name in row if name == "test/acc" or name.startswith(DOMAIN_PREFIX)]
    return not all(math.isnan(_number(folder, row, name)) for name in names)


def digest_discovery(folder: Path) -> str | None:
    """Return a digest of what Phase 1 found; none if there is nothing."""
    if not (folder / DISCOVERY).exists():
        return None
    found = json.dumps({name: value for name, value in read_discovery(folder).items() if name != "joined"})
    return hashlib.blake2b(f"{found} {stored_digest(folder / VECTORS)}".encode(), digest_size=16).hexdigest()


def _number(folder: Path, row: Mapping[str, Any], column: str) -> float:
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"Expected a number for {column} in every row of {folder / METRICS}.") from error


def last_round(folder: Path) -> float:
    """Return the last round in ``metrics.csv``; 0 if it has none."""
    return max((_number(folder, row, "round") for row in _read_rows(folder)), default=0)


def forget_rounds(folder: Path, after: int) -> tuple[int, float]:
    """Remove the rows of rounds after one from ``metrics.csv``; return the best of those that stay, and its accuracy.

    Returns:
        The first round with the highest accuracy, and that; 0 and minus infinity if none was evaluated.
    """
    rows = _read_rows(folder)
    stay = [row for row in rows if _number(folder, row, "round") <= after]
    if len(stay) < len(rows):
        if stay:
            write_metrics(folder, stay)
        else:
            (folder / METRICS).unlink()
    best = 0, float("-inf")
    for row in stay:
        if (accuracy := _number(folder, row, "test/acc")) > best[1]:
            best = int(_number(folder, row, "round")), accuracy
    return best


def save_discovery(
    folder: Path, updates: Updates, found: PseudoDomains, true_domains: Sequence[str] | None, data: str
) -> None:
    """Write ``discovery.json``, and beside it the vectors that it comes from.

    Args:
        folder: the run folder.
        updates: what the clients sent.
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
    """Add the clients that joined later to ``discovery.json``."""
    record = read_discovery(folder)
    record["joined"] = {
        str(client): {"domain": domain} | ({} if true_domains is None else {"true_domain": true_domains[client]})
        for client, domain in found.newcomers.items()
    }
    write_whole(folder / DISCOVERY, json.dumps(record, indent=1).encode())


Count = Annotated[int, Interval(ge=0, lt=2**63)]
Text = Annotated[str, Len(0, 10_000)]


@dataclass(frozen=True)
class _Member:
    """A client in ``discovery.json``."""

    domain: Count
    true_domain: Text | None = None


@dataclass(frozen=True)
class _Summary:
    """What a report looks for in ``discovery.json``."""

    num_domains: Annotated[int, Interval(ge=1, le=100_000)]
    data: Text


@dataclass(frozen=True)
class _Found(_Summary):
    """All that ``discovery.json`` says."""

    criterion: Literal["given", "elbow", "silhouette"]
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
    return _read_discovery(folder, _Found)


def _read_discovery(folder: Path, kind: type[_Summary]) -> dict[str, Any]:
    try:
        record: dict[str, Any] = read_json(folder / DISCOVERY)
        if isinstance(checked(kind, record), _Found):
            _check_agreement(record)
            record["note"] = plain(record["note"])
        return record
    except FileNotFoundError as error:
        raise InputError(f"Expected a folder with pseudo-domains but {folder} has no {DISCOVERY}.") from error
    except (OSError, ValueError) as error:
        raise StorageError(f"Expected pseudo-domains but {folder / DISCOVERY} cannot be read: {error}.") from error


def _check_agreement(record: dict[str, Any]) -> None:
    """Raise a ValueError unless all parts of ``discovery.json`` are of the same clients and pseudo-domains."""
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
    """Read what Phase 1 gave; nothing if there is nothing yet, or if it is of other images.

    Args:
        folder: of a run, or of a discovery alone.
        data: fingerprint of the images.
        num_clients: N; who is in it has to be one of them.
    """
    if not (folder / DISCOVERY).exists():
        return None
    found = read_discovery(folder)
    record = load_record(folder / VECTORS)[0]
    try:
        if found["data"] != data:
            return None
        clients, vectors, centroids = record["updates"]["clients"], record["updates"]["u"], record["centroids"]["mu"]
        _check_vectors(clients, vectors, centroids, num_clients)
        domains = {int(client): int(domain) for client, domain in found["assignments"].items()}
        same = list(domains) == clients.tolist() and len(centroids) == found["num_domains"]
        if not same or max(domains.values()) >= len(centroids):
            raise ValueError(f"{VECTORS} is of another discovery")
        updates = Updates(
            clients=clients.tolist(),
            vectors=vectors,
            left_out={int(client): str(reason) for client, reason in found["left_out"].items()},
            bytes_down=int(found["bytes_down"]),
            bytes_up=int(found["bytes_up"]),
        )
        return updates, PseudoDomains(
            assignments=domains,
            centroids=centroids,
            criterion=str(found["criterion"]),
            inertias={int(m): float(value) for m, value in found["inertias"].items()},
            silhouettes={int(m): float(value) for m, value in found["silhouettes"].items()},
            note=str(found["note"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"Expected pseudo-domains but {folder / DISCOVERY} cannot be read: {error}.") from error


def _check_vectors(clients: torch.Tensor, vectors: torch.Tensor, centroids: torch.Tensor, num_clients: int) -> None:
    """Raise a ValueError unless these are ids, a vector for each of them, and centroids of such vectors."""
    ids = clients.dtype == torch.long and clients.ndim == 1 and 0 < len(clients) == len(clients.unique())
    if not ids or clients.min() < 0 or clients.max() >= num_clients:
        raise ValueError(f"{VECTORS} has vectors of other clients")
    sizes = vectors.ndim == centroids.ndim == 2 and len(vectors) == len(clients) and len(centroids) > 0
    if not (sizes and vectors.shape[1] == centroids.shape[1]):
        raise ValueError(f"{VECTORS} has no vector for each client")
    if not all(part.dtype == torch.float32 and part.isfinite().all() for part in (vectors, centroids)):
        raise ValueError(f"{VECTORS} has vectors that are not finite, or not of {torch.float32}")


@dataclass(frozen=True)
class ModelHeader:
    """What is known of saved weights."""

    backbone: Annotated[str, Len(1, 300)]
    size: Annotated[int, Interval(ge=1, le=10_000)]
    """Height and width of the images."""
    class_names: Annotated[list[Text], Len(1, 1_000_000)]
    score: Score = "max"
    """How it was evaluated."""
    round: Count = 0
    """After which round."""
    scores: dict[Text, float] = field(default_factory=dict)
    """Its accuracies, by their names in ``metrics.csv``; empty if it was not evaluated."""


@dataclass(frozen=True)
class SavedModel:
    """A model with all that is needed to use it."""

    weights: Tensors
    buffers: Tensors
    header: ModelHeader

    def save(self, folder: Path, which: Which) -> None:
        """Write the model as the run's best or last one."""
        record = {"weights": self.weights, "buffers": self.buffers}
        save_record(folder / f"{which}.safetensors", record, asdict(self.header))


def kept_weights(folder: Path) -> Which:
    """Return which of a run's weights to use: the best, or the last if it keeps no best."""
    files = {which: folder / f"{which}.safetensors" for which in ("best", "last")}
    return "last" if files["last"].exists() and not files["best"].exists() else "best"


def load_model(folder: Path, which: Which) -> SavedModel:
    """Read a run's best or last model."""
    require_own_files(folder)
    file = folder / f"{which}.safetensors"
    if which == "best" and kept_weights(folder) == "last":
        raise InputError(
            f"Expected the best weights of a run but {folder} has only its last, as a private run does: "
            "use --weights last."
        )
    record, about = load_record(file)
    try:
        return SavedModel(record["weights"], record.get("buffers", {}), checked(ModelHeader, about))
    except (KeyError, ValueError) as error:
        raise InputError(f"Expected the weights of a run but {file} is something else: {error}.") from error


@dataclass(frozen=True, repr=False)
class Run:
    """A run folder, read."""

    folder: Path
    config: dict[str, Any]
    """The complete settings."""
    rows: list[dict[str, float]]
    """``metrics.csv``, a row for each round."""
    discovery: dict[str, Any] | None
    """``discovery.json``; none for the baseline."""

    def __repr__(self) -> str:
        """Say which run it is: all that it holds would fill pages."""
        return f"Run({self.folder}, {len(self.rows)} rounds, best test/acc {self.best['test/acc']:.4f})"

    @property
    def domains(self) -> list[str]:
        """Names of the domains."""
        return [name.removeprefix(DOMAIN_PREFIX) for name in self.rows[0] if name.startswith(DOMAIN_PREFIX)]

    @property
    def best(self) -> dict[str, float]:
        """The row of the best round: the first with the highest accuracy of those that were evaluated.

        The last one's in a run that keeps no best weights.
        """
        if not self.keeps_best:
            return self.last
        return max(self.rows, key=lambda row: -1.0 if math.isnan(row["test/acc"]) else row["test/acc"])

    @property
    def last(self) -> dict[str, float]:
        """The row of the last round."""
        return self.rows[-1]

    @property
    def keeps_best(self) -> bool:
        """Whether the weights of the best round are saved: not in a private run, which has no best accuracy."""
        return not all(math.isnan(row.get("test/acc_best", 0.0)) for row in self.rows)

    @property
    def ends(self) -> dict[Which, dict[str, float]]:
        """The rows whose weights are saved."""
        return {"best": self.best, "last": self.last} if self.keeps_best else {"last": self.last}


def read_run(folder: Path) -> Run:
    """Read a run folder; what is missing or damaged is named in the error."""
    try:
        require_own_files(folder)
        config = read_settings(folder / CONFIG)
        (folder / METRICS).stat()  # has to be there
        rows = [{name: float(value) for name, value in row.items()} for row in _read_rows(folder)]
        discovery = _read_discovery(folder, _Summary) if (folder / DISCOVERY).exists() else None
    except FileNotFoundError as error:
        raise InputError(f"Expected a run folder but {folder} has no {Path(error.filename).name}.") from error
    except InputError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"Expected a run folder but {folder} cannot be read: {error}.") from error
    if not rows:
        raise InputError(f"Expected a run with a finished round but {folder} has none.")
    if missing := {"round", "test/acc", "test/acc_worst", "train/loss"} - set(rows[0]):
        raise InputError(f"Expected a run folder but {folder / METRICS} has no column {missing.pop()}.")
    return Run(folder, config, rows, discovery)
