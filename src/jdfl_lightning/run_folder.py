"""What a run leaves behind, written and read: config, metrics, discovery, weights."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from jdfl_lightning.checkpoint import load_record, save_record
from jdfl_lightning.discovery import PseudoDomains
from jdfl_lightning.errors import InputError
from jdfl_lightning.tensors import Tensors

CONFIG, METRICS, CURVES = "config.yaml", "metrics.csv", "curves.png"
DISCOVERY, DISCOVERY_FIGURE, CENTROIDS = "discovery.json", "discovery.png", "discovery.safetensors"
DOMAIN_PREFIX = "test/acc/"
"""Start of the names of a domain's accuracy in ``metrics.csv``."""

Which = Literal["best", "last"]


def make_run_folder(run_dir: str | None, name: str) -> Path:
    """Make the folder of a run, by default a new one in ``runs``; one that holds something is never touched."""
    folder = Path(run_dir) if run_dir else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    if run_dir and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
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


def append_metrics(folder: Path, row: Mapping[str, float]) -> None:
    """Add a round's row to ``metrics.csv``; a column that is new is NaN in the rows before."""
    file = folder / METRICS
    before: list[dict[str, Any]] = []
    if file.exists():
        with file.open(newline="") as lines:
            before = list(csv.DictReader(lines))
    columns = list(before[0]) if before else []
    added = [name for name in row if name not in columns]
    with file.open("w" if added else "a", newline="") as out:
        writer = csv.DictWriter(out, columns + added, restval="nan", lineterminator="\n")
        if added:
            writer.writeheader()
            writer.writerows(before)
        writer.writerow(row)


def save_discovery(folder: Path, found: PseudoDomains, true_domains: list[str]) -> dict[str, Any]:
    """Write ``discovery.json`` and the centroids beside it; return what was written."""
    record = found.as_json(true_domains) | {"centroids": CENTROIDS}
    save_record(folder / CENTROIDS, {"centroids": {"mu": found.centroids}})
    (folder / DISCOVERY).write_text(json.dumps(record, indent=1))
    return record


@dataclass(frozen=True)
class SavedModel:
    """A model with all that is needed to use it."""

    weights: Tensors
    buffers: Tensors
    backbone: str
    size: int
    class_names: list[str]

    def save(self, folder: Path, which: Which) -> None:
        """Write the model as the run's best or last one."""
        about = {"backbone": self.backbone, "size": self.size, "class_names": self.class_names}
        record = {"weights": self.weights, "buffers": self.buffers}
        save_record(folder / f"{which}.safetensors", record, {"jdfl": json.dumps(about)})


def load_model(folder: Path, which: Which) -> SavedModel:
    """Read a run's best or last model."""
    file = folder / f"{which}.safetensors"
    record, metadata = load_record(file)
    try:
        return SavedModel(record["weights"], record.get("buffers", {}), **json.loads(metadata["jdfl"]))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"Expected the weights of a run but {file} is something else.") from error


@dataclass(frozen=True)
class Run:
    """A run folder, read."""

    folder: Path
    config: dict[str, Any]
    """The complete settings."""
    rows: list[dict[str, float]]
    """``metrics.csv``, a row for each round."""
    discovery: dict[str, Any] | None
    """``discovery.json``; none for the baseline."""

    @property
    def domains(self) -> list[str]:
        """Names of the domains."""
        return [name.removeprefix(DOMAIN_PREFIX) for name in self.rows[0] if name.startswith(DOMAIN_PREFIX)]

    @property
    def best(self) -> dict[str, float]:
        """The row of the best round: the first with the highest accuracy."""
        return max(self.rows, key=lambda row: row["test/acc"])

    @property
    def last(self) -> dict[str, float]:
        """The row of the last round."""
        return self.rows[-1]

    @property
    def ends(self) -> dict[Which, dict[str, float]]:
        """The rows whose weights are saved."""
        return {"best": self.best, "last": self.last}


def read_run(folder: Path) -> Run:
    """Read a run folder; what is missing or damaged is named in the error."""
    try:
        config = yaml.safe_load((folder / CONFIG).read_text())
        with (folder / METRICS).open(newline="") as lines:
            rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]
        found = folder / DISCOVERY
        discovery = json.loads(found.read_text()) if found.exists() else None
    except FileNotFoundError as error:
        raise InputError(f"Expected a run folder but {folder} has no {Path(error.filename).name}.") from error
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise InputError(f"Expected a run folder but {folder} cannot be read: {error}.") from error
    if not rows:
        raise InputError(f"Expected a run with a finished round but {folder} has none.")
    if missing := {"round", "test/acc", "test/acc_worst", "train/loss"} - set(rows[0]):
        raise InputError(f"Expected a run folder but {folder / METRICS} has no column {missing.pop()}.")
    return Run(folder, config, rows, discovery)
