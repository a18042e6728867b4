"""``metrics.csv``: a row for each round."""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdfl_lightning.core.errors import StorageError, reading
from jdfl_lightning.core.files import read_text, write_csv
from jdfl_lightning.storage.names import METRICS, Selection

if TYPE_CHECKING:
    from jdfl_lightning.storage.weights import ModelHeader

_PARTS = ("test", "val", "unseen")
"""The parts that a model may be evaluated on, which begin the names of its accuracies."""


def append_metrics(folder: Path, row: Mapping[str, float]) -> None:
    """Add a round's row to ``metrics.csv``; a new column is NaN in earlier rows."""
    write_metrics(folder, [*read_rows(folder), row])


def write_metrics(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write all of ``metrics.csv``; missing values are NaN."""
    write_csv(folder / METRICS, rows, missing="nan")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read ``metrics.csv`` with its cells as strings; no rows if it does not exist."""
    if not (folder / METRICS).exists():
        return []
    with reading("a table", folder / METRICS):
        rows: list[dict[str, Any]] = list(csv.DictReader(io.StringIO(read_text(folder / METRICS), newline="")))
        if any(None in row or None in row.values() for row in rows):
            raise ValueError("a row has more or fewer cells than the first line")
    return rows


def read_numbers(folder: Path) -> list[dict[str, float]]:
    """Read ``metrics.csv`` with its cells as numbers."""
    return [{name: _number(folder, row, name) for name in row} for row in read_rows(folder)]


def digest_rows(rows: Iterable[Mapping[str, Any]], before: str = "") -> str:
    """Return a digest of a table's rows, without the times.

    Args:
        rows: numbers, or their strings in ``metrics.csv``.
        before: the digest of the rows before these.
    """
    for row in rows:
        cells = sorted(f"{n}={v}" for n, v in row.items() if not n.startswith("time/") and str(v) != "nan")
        before = hashlib.blake2b("\n".join([before, *cells]).encode(), digest_size=16).hexdigest()
    return before


def digest_metrics(folder: Path, until: int) -> str:
    """Return the digest of the rows of ``metrics.csv`` up to a round."""
    return digest_rows(row for row in read_rows(folder) if _number(folder, row, "round") <= until)


def same_scores(folder: Path, header: ModelHeader) -> bool:
    """Return whether the row of a saved model's round has the accuracies that are saved with the model."""
    row = next((row for row in read_rows(folder) if _number(folder, row, "round") == header.round), None)
    if row is None or math.isnan(_number(folder, row, "test/acc")) == ("test/acc" in header.scores):
        return False
    return all(_number(folder, row, name) == value for name, value in header.scores.items())


def is_score(name: str) -> bool:
    """Return whether a metric is an accuracy of the round's model: overall, of the worst domain, or of a domain.

    >>> is_score("test/acc"), is_score("val/acc/photo"), is_score("test/acc_best")
    (True, True, False)
    """
    part, _, rest = name.partition("/")
    return part in _PARTS and (rest in ("acc", "acc_worst") or rest.startswith("acc/"))


def was_evaluated(folder: Path, round: int) -> bool | None:
    """Return whether the row of a round has accuracies; None if there is no such row."""
    row = next((row for row in read_rows(folder) if _number(folder, row, "round") == round), None)
    if row is None:
        return None
    return not all(math.isnan(_number(folder, row, name)) for name in row if is_score(name))


def _number(folder: Path, row: Mapping[str, Any], column: str) -> float:
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(f"Expected a number for {column} in every row of {folder / METRICS}.") from error


def last_round(folder: Path) -> float:
    """Return the last round in ``metrics.csv``; 0 if it has none."""
    return max((_number(folder, row, "round") for row in read_rows(folder)), default=0)


def forget_rounds(folder: Path, after: int, select: Selection) -> int:
    """Remove the rows of rounds after a given one from ``metrics.csv``; return the best remaining round.

    Returns:
        The first round with the highest accuracy on the images that decide; 0 if none was evaluated, or none decide.
    """
    rows = read_rows(folder)
    stay = [row for row in rows if _number(folder, row, "round") <= after]
    if len(stay) < len(rows):
        if stay:
            write_metrics(folder, stay)
        else:
            (folder / METRICS).unlink()
    best = 0, float("-inf")
    for row in stay if select != "last" else ():
        if (accuracy := _number(folder, row, f"{select}/acc")) > best[1]:
            best = int(_number(folder, row, "round")), accuracy
    return best[0]
