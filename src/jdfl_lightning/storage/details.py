"""Small files of a run folder: what its images are, its details, why it stopped, and the results of a sweep.

``data.json``, ``evaluation.json``, ``confusion.csv``, ``clients.csv``, ``stopped.json`` and ``diagnosis.csv``.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from jdfl_lightning.core.errors import InputError, plain, reading
from jdfl_lightning.core.files import checked, read_json, read_text, write_csv, write_whole
from jdfl_lightning.storage.metrics import last_round
from jdfl_lightning.storage.names import CONFUSION, DIAGNOSIS, EVALUATION, STOPPED, Count, Text


def save_details(folder: Path, details: Mapping[str, Any], class_names: Sequence[str]) -> None:
    """Write the details of a run's weights; the confusion matrices go to tables of their own.

    Args:
        folder: the run folder.
        details: which weights they are, and for each part, test or unseen, what `examine` returns.
        class_names: the classes.
    """
    rest: dict[str, Any] = {}
    for name, value in details.items():
        if isinstance(value, dict) and "confusion" in value:
            rows = [dict(zip(class_names, counts, strict=True)) for counts in value["confusion"]]
            labelled = [{"true \\ predicted": label} | row for label, row in zip(class_names, rows, strict=True)]
            write_csv(folder / (CONFUSION if name == "test" else CONFUSION.replace(".", f"-{name}.")), labelled)
            value = {key: inner for key, inner in value.items() if key != "confusion"}
        rest[name] = value
    write_whole(folder / EVALUATION, json.dumps(rest, indent=1).encode())


def read_details(folder: Path) -> dict[str, Any] | None:
    """Read ``evaluation.json``; None if the run has none."""
    if not (folder / EVALUATION).exists():
        return None
    with reading("the details of a run", folder / EVALUATION):
        found: dict[str, Any] = read_json(folder / EVALUATION)
    return found


@dataclass(frozen=True)
class Stop:
    """After which round a run was stopped, by which callback and why."""

    round: Count
    callback: Text
    reason: Text

    def __str__(self) -> str:
        """Return who stopped the run, and why, as one line."""
        return plain(f"{self.callback}: {self.reason}")


def read_stop(folder: Path) -> Stop | None:
    """Read how a run was stopped; None if it was not, or if it has gone on since."""
    if not (folder / STOPPED).exists():
        return None
    with reading("why the run stopped", folder / STOPPED):
        stop = checked(Stop, read_json(folder / STOPPED))
    return stop if stop.round == last_round(folder) else None


@dataclass(frozen=True)
class Finding:
    """The result of clustering in one case."""

    clients: int
    domains: int
    """Number of true domains."""
    seed: int
    batch_size: int
    epochs: int
    """E_0."""
    layers: str
    """A, B or C."""
    length: int
    """Entries of an update vector."""
    ari: float
    """Agreement with the true domains (ARI), with M set to their number."""
    elbow: int | None
    """The M that the elbow picks."""
    silhouette: int | None
    """The M that the silhouette picks."""
    sketch_dim: int | None = None
    sketch_ari: float | None = None
    """`ari` of sketches."""
    sketch_elbow: int | None = None
    sketch_silhouette: int | None = None


def write_findings(folder: Path, findings: Sequence[Finding]) -> None:
    """Write all of ``diagnosis.csv``."""
    columns = [entry.name for entry in fields(Finding)]
    write_csv(folder / DIAGNOSIS, [asdict(finding) for finding in findings], columns)


def read_findings(folder: Path) -> list[Finding]:
    """Read ``diagnosis.csv``."""
    missing = InputError(f"Expected the folder of a diagnosis but {folder} has no {DIAGNOSIS}.")
    with reading("a table", folder / DIAGNOSIS, missing):
        rows = csv.DictReader(io.StringIO(read_text(folder / DIAGNOSIS), newline=""))
        given = [{name: text or None for name, text in row.items()} for row in rows]
        return checked(list[Finding], given, strict=False)
