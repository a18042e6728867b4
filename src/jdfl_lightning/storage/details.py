"""Files of a finished run: ``evaluation.json``, ``confusion.csv`` and ``clients.csv``; and ``data.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jdfl_lightning.core.errors import StorageError
from jdfl_lightning.core.files import read_json, write_csv, write_whole
from jdfl_lightning.storage.names import CLIENT_ROWS, CONFUSION, DATA, EVALUATION


def save_data(folder: Path, about: Mapping[str, Any]) -> None:
    """Write what a run's images are: ``data.json``."""
    write_whole(folder / DATA, json.dumps(about, indent=1).encode())


def save_details(folder: Path, details: Mapping[str, Any], class_names: Sequence[str]) -> None:
    """Write the details of a run's weights; the confusion matrices go to tables of their own.

    Args:
        folder: the run folder.
        details: which weights they are, and for each part, test or unseen, what `examine` returns.
        class_names: the classes.
    """
    plain: dict[str, Any] = {}
    for name, value in details.items():
        if isinstance(value, dict) and "confusion" in value:
            rows = [dict(zip(class_names, counts, strict=True)) for counts in value["confusion"]]
            labelled = [{"true \\ predicted": label} | row for label, row in zip(class_names, rows, strict=True)]
            write_csv(folder / confusion_file(name), labelled)
            value = {key: inner for key, inner in value.items() if key != "confusion"}
        plain[name] = value
    write_whole(folder / EVALUATION, json.dumps(plain, indent=1).encode())


def confusion_file(part: str) -> str:
    """Return the name of the file with a part's confusion matrix."""
    return CONFUSION if part == "test" else CONFUSION.replace(".", f"-{part}.")


def read_details(folder: Path) -> dict[str, Any] | None:
    """Read ``evaluation.json``; None if the run has none."""
    if not (folder / EVALUATION).exists():
        return None
    try:
        found: dict[str, Any] = read_json(folder / EVALUATION)
        return found
    except (OSError, ValueError) as error:
        raise StorageError(
            f"Expected the details of a run but {folder / EVALUATION} cannot be read: {error}."
        ) from error


def save_client_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``clients.csv``: a row for each client."""
    write_csv(folder / CLIENT_ROWS, rows)
