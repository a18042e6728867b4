"""Run folders -> one table of the runs that can be compared, and why the others cannot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from jdfl_lightning.clustering.criteria import Criterion
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import InputError, StorageError, without_stop
from jdfl_lightning.core.settings import declared_settings, flat_settings, option_name
from jdfl_lightning.data.base import PLACES, option_defaults
from jdfl_lightning.storage.checkpoint import Checkpoints, read_header
from jdfl_lightning.storage.folder import SavedRun, read_run
from jdfl_lightning.storage.names import DIAGNOSIS, DISCOVERY, METRICS
from jdfl_lightning.storage.trust import CONFIG
from jdfl_lightning.supervision import Plain, short_names, supervision_name

Value: TypeAlias = str | int | float | bool | None
Settings: TypeAlias = tuple[tuple[str, Value], ...]
"""Settings by their names, sorted: equal and hashable if the settings are equal."""

BASELINE = Plain.short
"""Name of the supervision that others are compared with."""
PACKAGE = "jdfl_lightning."
"""Prefix of the import paths of this package's classes."""
METHOD = ["algorithm", "training", "supervision", "joint"]
"""Columns that runs of one experiment share if they differ in the seed alone."""
_NO_RUNS_INSIDE = ("wandb", "checkpoints", "clients", "discovery")
_FREE = (
    "seed_everything",
    *(setting.name for setting in declared_settings(Experiment) if setting.role in ("place", "output")),
    *(f"data.{name}" for name in PLACES),
)
"""Settings that do not define an experiment, or are handled separately."""
_SECTION = ("data", "domains", "unseen", "select", "epochs", "client_fraction")
"""Settings that define an experiment: each combination is one."""
_JOINT = ("num_domains", "score", "clustering", "head_init", "supervision")
"""Settings of the joint head, which a baseline does not share."""
_CRITERIA = {f"{known.__module__}.{known.__name__}": name for name, known in Criterion.short_names().items()}
_BYTES = ["bytes/up", "bytes/down"]


@dataclass(frozen=True)
class LeftOut:
    """A run that is left out of the report."""

    folder: Path
    reason: str


def find_run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders at or below the given paths, each once, sorted by name."""
    found: dict[Path, Path] = {}
    for path in sorted(paths):
        if not path.is_dir():
            raise InputError(f"Expected RUNS to be folders but there is no folder {path}.")
        below = list(_below(path, set()))
        if not below:
            raise InputError(f"Expected a run folder, or one that contains some, but {path} has no {CONFIG} in it.")
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return sorted(found.values())


def _below(folder: Path, seen: set[Path]) -> Iterator[Path]:
    if folder.resolve() in seen:  # a circular link
        return
    seen.add(folder.resolve())
    if (folder / METRICS).exists():
        yield folder
        return
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name not in _NO_RUNS_INSIDE]
    found = [run for path in inner for run in _below(path, seen)]
    yield from found
    begun = (folder / CONFIG).exists() and not (folder / DIAGNOSIS).exists()
    if not found and begun:  # a run that ended before its first round was finished
        yield folder


def read_runs(folders: Iterable[Path]) -> tuple[pd.DataFrame, list[LeftOut]]:
    """Return one table of all runs; leave out runs that are unreadable, unfinished, of another split, or duplicates.

    `jdfl_lightning.report` describes the columns.
    """
    tables: list[pd.DataFrame] = []
    left_out: list[LeftOut] = []
    for folder in folders:
        try:
            tables.append(_read(folder))
        except InputError as error:
            left_out.append(LeftOut(folder, without_stop(error)))
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    for find in (_other_splits, _repetitions) if tables else ():
        found = list(find(table[table["best"]]))
        table = table[~table["folder"].isin([entry.folder for entry in found])]
        left_out += found
    return table, sorted(left_out, key=lambda entry: entry.folder)


def _read(folder: Path) -> pd.DataFrame:
    if not (folder / METRICS).exists() and (folder / DISCOVERY).exists():
        raise InputError("no round is finished: a discovery alone, or a run that was cut off after it")
    run = read_run(folder)
    try:
        about = _about(run)
        _check_rounds(run, int(run.config["rounds"]))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"its {CONFIG} is not one of a run: {type(error).__name__} {error}") from error
    table = pd.DataFrame(run.rows)
    table[_BYTES] = table.reindex(columns=_BYTES).cumsum(skipna=False)
    best = run.best
    table["best"] = [row is best for row in run.rows]
    top = run.best_on("test")
    table["best_on_test"] = [row is top for row in run.rows]
    for name, value in about.items():
        table[name] = pd.Series([value] * len(table), dtype=object)
    return table


def _about(run: SavedRun) -> dict[str, object]:
    """Return the columns that are the same in all lines of a run."""
    settings = _settings(run.config)
    supervision, data = supervision_name(run.config["supervision"]), str(settings["data"])
    settings["data"] = data.rpartition(".")[2] if data.startswith(PACKAGE) else data
    settings["domains"] = json.dumps(run.domains)
    settings.pop("select", None)
    settings |= {"unseen": json.dumps(run.unseen)} if run.unseen else {}
    settings |= {"select": "last"} if run.select == "last" else {}  # else the data says it
    unused: tuple[str, ...] = ()
    settings.pop("supervision", None)  # its name is a column of its own; its options stay
    if supervision != BASELINE:
        known = short_names().get(supervision)  # one that this process does not know is assumed to have pseudo-domains
        if run.discovery is None and (known is None or known.needs_discovery):
            raise InputError(f"it has no {DISCOVERY}, which says the number of pseudo-domains")
        if (given := settings.get("num_domains")) is not None:
            settings["num_domains"], unused = int(given), ("clustering.criterion", "clustering.max_domains")
    return {
        "folder": run.folder,
        "seed": int(run.config["seed_everything"]),
        "algorithm": str(settings["algorithm"]).rpartition(".")[2],
        "supervision": supervision,
        "section": _pick(settings, _SECTION, _FREE),
        "training": _pick(settings, settings, (*_FREE, *_SECTION, *_JOINT)),
        "joint": () if supervision == BASELINE else _pick(settings, _JOINT, unused),
        "num_domains": 1 if run.discovery is None or supervision == BASELINE else run.discovery["num_domains"],
        "data": _fingerprint(run),
    }


def _check_rounds(run: SavedRun, rounds: int) -> None:
    done = len({row["round"] for row in run.rows})
    if done < rounds and run.stop is None:
        raise InputError(f"unfinished: {done} of {rounds} rounds")
    if done > rounds:
        raise InputError(f"its {METRICS} has {done} rounds but its {CONFIG} {rounds}")
    evaluated = [row["test/acc"] for row in run.rows if not math.isnan(row["test/acc"])]
    if not evaluated:
        raise InputError("no round was evaluated")
    if not all(0 <= accuracy <= 1 for accuracy in evaluated):
        raise InputError(f"its {METRICS} has an accuracy that is not between 0 and 1")


def _settings(config: dict[str, Any]) -> dict[str, Value]:
    """Return a run's settings by the names they have on the command line."""
    found: dict[str, Value] = {}
    for key, value in flat_settings(config):
        name = option_name(key)
        if name == "clustering.criterion" and isinstance(value, str):
            value = _CRITERIA.get(value, value)
        if isinstance(value, (str, int, float, bool)) or value is None:
            found[name] = value
        elif isinstance(value, list) and all(isinstance(entry, dict) and "class_path" in entry for entry in value):
            if value:
                found[name] = ", ".join(map(_class_name, value))
        elif value != {}:
            found[name] = json.dumps(value, default=str)
    unused = {f"data.{name}": value for name, value in option_defaults().items()}  # older runs do not have them
    return {name: value for name, value in found.items() if (name, value) not in unused.items()}


def _class_name(entry: dict[str, Any]) -> str:
    """Return a class and its arguments in short.

    >>> _class_name({"class_path": "jdfl_lightning.callbacks.EarlyStopping", "init_args": {"patience": 5}})
    'EarlyStopping(patience=5)'
    """
    values = ", ".join(f"{name}={value}" for name, value in entry.get("init_args", {}).items())
    return f"{entry['class_path'].rpartition('.')[2]}({values})"


def _pick(settings: dict[str, Value], names: Iterable[str], but: Iterable[str]) -> Settings:
    """Return the settings at or below some names, except those at or below others."""
    wanted, unwanted = (tuple(f"{name}." for name in chosen) for chosen in (names, but))
    found = {name for name in settings if f"{name}.".startswith(wanted) and not f"{name}.".startswith(unwanted)}
    return tuple((name, settings[name]) for name in sorted(found))


def _fingerprint(run: SavedRun) -> str | None:
    """Return the checksum of a run's images: from its discovery, or, for a baseline, from its newest checkpoint."""
    if run.discovery is not None:
        return str(run.discovery["data"])
    checkpoints = Checkpoints(run.folder, 1)
    try:
        return read_header(checkpoints.file(checkpoints.rounds()[0])).data
    except (IndexError, StorageError):
        return None


def _other_splits(runs: pd.DataFrame) -> Iterator[LeftOut]:
    """Find, for each experiment and seed, runs with other images than the majority; those without a fingerprint stay.

    Without a majority, all runs with a fingerprint are left out, as it is unknown which are right.
    """
    for _, group in runs.dropna(subset="data").groupby(["section", "seed"], sort=False):
        usual = group["data"].mode()
        for run in group.itertuples():
            if len(usual) > 1:
                reason = f"the runs of seed {run.seed} differ in images, or in how they are dealt out, and no majority"
                yield LeftOut(run.folder, f"{reason} agrees: report those that belong together")
            elif run.data != usual[0]:
                kept = f"the {(group['data'] == usual[0]).sum()} runs of seed {run.seed} kept"
                yield LeftOut(run.folder, f"other images, or dealt out otherwise, than in {kept}")


def _repetitions(runs: pd.DataFrame) -> Iterator[LeftOut]:
    """Find the runs with the same settings and seed as an earlier one."""
    for _, group in runs.groupby(["section", *METHOD, "seed"], sort=False):
        numbers = group.drop(columns=["folder", "data"])
        for place in range(1, len(group)):
            same = "the same" if numbers.iloc[place].equals(numbers.iloc[0]) else "another"
            reason = f"repeats {group['folder'].iloc[0]}: the same settings and seed, with {same} best round"
            yield LeftOut(group["folder"].iloc[place], reason)
