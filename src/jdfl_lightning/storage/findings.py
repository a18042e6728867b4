"""Results of a sweep over Phase 1: writing and reading ``diagnosis.csv``."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from jdfl_lightning.core.errors import InputError, StorageError
from jdfl_lightning.core.files import read_text, write_whole
from jdfl_lightning.storage.names import DIAGNOSIS


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
    out = io.StringIO()
    writer = csv.DictWriter(out, [entry.name for entry in fields(Finding)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(finding) for finding in findings)
    write_whole(folder / DIAGNOSIS, out.getvalue().encode())


def read_findings(folder: Path) -> list[Finding]:
    """Read ``diagnosis.csv``."""
    try:
        lines = io.StringIO(read_text(folder / DIAGNOSIS), newline="")
        return [_parse(row) for row in csv.DictReader(lines)]
    except FileNotFoundError as error:
        raise InputError(f"Expected the folder of a diagnosis but {folder} has no {DIAGNOSIS}.") from error
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise StorageError(f"Expected a table but {folder / DIAGNOSIS} cannot be read: {error}.") from error


def _parse(row: dict[str, str]) -> Finding:
    values: dict[str, Any] = {}
    for entry in fields(Finding):
        text = row[entry.name]
        if entry.name == "layers":
            values[entry.name] = text
        elif text == "":
            values[entry.name] = None
        else:
            values[entry.name] = float(text) if "ari" in entry.name else int(text)
    return Finding(**values)
