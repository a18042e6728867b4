"""Results of a sweep over Phase 1: writing and reading ``diagnosis.csv``."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter

from jdfl_lightning.core.errors import InputError, StorageError
from jdfl_lightning.core.files import read_text, write_csv
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
    columns = [entry.name for entry in fields(Finding)]
    write_csv(folder / DIAGNOSIS, [asdict(finding) for finding in findings], columns)


def read_findings(folder: Path) -> list[Finding]:
    """Read ``diagnosis.csv``."""
    try:
        rows = csv.DictReader(io.StringIO(read_text(folder / DIAGNOSIS), newline=""))
        given = [{name: text or None for name, text in row.items()} for row in rows]
        return TypeAdapter(list[Finding]).validate_python(given)
    except FileNotFoundError as error:
        raise InputError(f"Expected the folder of a diagnosis but {folder} has no {DIAGNOSIS}.") from error
    except (OSError, ValueError, csv.Error) as error:
        raise StorageError(f"Expected a table but {folder / DIAGNOSIS} cannot be read: {error}.") from error
