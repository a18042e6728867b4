"""Run folders in short: what `runs list`, `runs show` and `runs compare` tell, as plain values and as tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from rich.filesize import decimal
from rich.table import Column, Table
from rich.text import Text

from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import InputError, plain
from jdfl_lightning.core.settings import chosen, declared_settings, flat_settings, option_name
from jdfl_lightning.data.base import PLACES
from jdfl_lightning.report.run import percent, right, screen_table
from jdfl_lightning.storage.details import read_stop
from jdfl_lightning.storage.folder import SavedRun, is_locked, read_run
from jdfl_lightning.storage.metrics import last_round
from jdfl_lightning.storage.names import CLIENT_ROWS, DISCOVERY, METRICS
from jdfl_lightning.storage.trust import saved_settings
from jdfl_lightning.supervision import supervision_name
from jdfl_lightning.ui.display import clock

State = Literal["finished", "running", "unfinished", "discovery", "damaged"]
_UTC = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class RunSummary:
    """A run folder in one line."""

    folder: str
    state: State
    """running: another process writes it. unfinished: it can be resumed. discovery: Phase 1 alone."""
    data: str | None = None
    algorithm: str | None = None
    supervision: str | None = None
    seed: int | None = None
    round: int = 0
    """Rounds that are over."""
    rounds: int | None = None
    """Rounds that it is to have."""
    accuracy: float | None = None
    """On the test images, in the round that counts: the best one, or the last if no best is kept."""
    worst: float | None = None
    """Accuracy of the worst domain in that round."""
    num_domains: int | None = None
    """M; None for the baseline."""
    bytes: int = 0
    """Size of all files."""
    changed: str = ""
    """When a file was last written, in UTC."""
    problem: str = ""
    """What is wrong with a damaged one."""


def summarize(folder: Path) -> RunSummary:
    """Return a run folder in short; one that cannot be read is damaged."""
    files = list(_files(folder))
    changed = datetime.fromtimestamp(max((file.st_mtime for file in files), default=0.0), timezone.utc)
    found: dict[str, Any] = {"bytes": sum(file.st_size for file in files), "changed": f"{changed:{_UTC}}"}
    try:
        config = saved_settings(folder)
        found |= {
            "data": str(config["data"]["class_path"]).rpartition(".")[2],
            "algorithm": str(config["algorithm"]["class_path"]).rpartition(".")[2],
            "supervision": supervision_name(config["supervision"]),
            "seed": int(config["seed_everything"]),
            "rounds": int(config["rounds"]),
        }
        found["round"] = int(last_round(folder))
        if (folder / METRICS).exists():
            run = read_run(folder)
            found |= {"accuracy": run.best["test/acc"], "worst": run.best["test/acc_worst"]}
            found["num_domains"] = None if run.discovery is None else run.discovery["num_domains"]
        return RunSummary(str(folder), _state(folder, found["round"], found["rounds"]), **found)
    except (InputError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = str(error) if isinstance(error, InputError) else f"{type(error).__name__} {error}"
        return RunSummary(str(folder), "damaged", **found, problem=plain(why))


def _state(folder: Path, round: int, rounds: int) -> State:
    if is_locked(folder):
        return "running"
    if round == 0:
        return "discovery" if (folder / DISCOVERY).exists() else "unfinished"
    whole = round >= rounds and (folder / CLIENT_ROWS).is_file()
    return "finished" if whole or read_stop(folder) is not None else "unfinished"


def _files(folder: Path) -> Iterator[os.stat_result]:
    """Yield the sizes and times of the files below a folder; links are not followed."""
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                yield (Path(place) / name).lstat()
            except OSError:  # a temporary file that is gone
                continue


def run_record(run: SavedRun) -> dict[str, Any]:
    """Return what is known of a run as plain values: its summary, settings, discovery, and the rounds that count."""
    return asdict(summarize(run.folder)) | {
        "select": run.select,
        "best": run.best,
        "last": run.last,
        "discovery": run.discovery,
        "stopped": None if run.stop is None else asdict(run.stop),
        "settings": run.config,
    }


def differences(runs: Sequence[SavedRun]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ, by name, with the value of each run; None where it has none.

    The place of a run and where it was trained are left out.
    """
    flat = [{option_name(n): value for n, value in flat_settings(run.config) if value != {}} for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    found = {name: [settings.get(name) for settings in flat] for name in names}
    places = {setting.name for setting in declared_settings(Experiment) if setting.role == "place"}
    places |= {"run_dir", "logger", *(f"data.{name}" for name in PLACES)}
    hidden = chosen(found, places)
    return {n: values for n, values in found.items() if n not in hidden and any(v != values[0] for v in values)}


def list_table(summaries: Sequence[RunSummary], numbered: bool = False) -> Table:
    """Return a table with a line for each run.

    Args:
        summaries: the runs.
        numbered: whether they have numbers from 1 instead of their folders.
    """
    names = ("run", "state", "data", "algorithm", "supervision", "M", "seed", "round", "acc", "worst", "size")
    rows = []
    for number, run in enumerate(summaries, 1):
        rounds = "-" if run.rounds is None else f"{run.round}/{run.rounds}"
        cells = [number if numbered else run.folder, run.state, run.data, run.algorithm, run.supervision]
        cells += [run.num_domains, run.seed, rounds, percent(run.accuracy), percent(run.worst), decimal(run.bytes)]
        rows.append(map(_cell, cells))
    return screen_table(None, [*names[:5], *right(*names[5:])], rows)


def compare_table(runs: Sequence[SavedRun]) -> Table:
    """Return a table with a column for each run: the settings in which they differ, then their results."""
    table = Table("", *(Column(_cell(run.folder), justify="right") for run in runs))
    for name, values in differences(runs).items():
        table.add_row(_cell(name), *(_cell(_last_word(value)) for value in values))
    table.add_section()
    results: dict[str, list[str]] = {
        "rounds": [str(len(run.rows)) for run in runs],
        "round that counts": [f"{run.best['round']:.0f}" for run in runs],
        "M": ["-" if run.discovery is None else str(run.discovery["num_domains"]) for run in runs],
        "accuracy (%)": [percent(run.best["test/acc"]) for run in runs],
        "worst domain": [percent(run.best["test/acc_worst"]) for run in runs],
    }
    for domain in dict.fromkeys(name for run in runs for name in run.domains):
        results[domain] = [percent(run.best.get(f"test/acc/{domain}")) for run in runs]
    results["last accuracy"] = [percent(run.last["test/acc"]) for run in runs]
    results["last loss"] = [f"{run.last['train/loss']:.4f}" for run in runs]
    for name, cells in results.items():
        table.add_row(_cell(name), *cells)
    return table


def settings_table(settings: Mapping[str, Any], title: str) -> Table:
    """Return a table of settings, one in a line."""
    rows = [map(_cell, (option_name(name), value)) for name, value in flat_settings(dict(settings))]
    return screen_table(title, ["setting", Column("value", overflow="fold")], rows)


def _last_word(value: Any) -> Any:
    """Return a value, or the class alone of an import path of this package."""
    ours = isinstance(value, str) and value.startswith("jdfl_lightning.")
    return value.rpartition(".")[2] if ours else value


def _cell(value: object) -> Text:
    """Return a value of a run folder as it stands: no markup, no control characters."""
    return Text("-" if value is None else plain(str(value)))


def estimates_table(estimates: Mapping[str, tuple[float, str, str]]) -> Table:
    """Return a table of estimates.

    Args:
        estimates: value, unit (bytes, seconds, or empty for a count) and how it was obtained, by name.
    """
    rows = []
    for name, (value, unit, how) in estimates.items():
        shown = {"bytes": decimal(int(value)), "seconds": seconds_text(value)}.get(unit, f"{value:,.0f}")
        rows.append([name.replace("_", " "), shown, how])
    return screen_table(None, ["", *right("about"), Column("how it was obtained", max_width=42)], rows)


def seconds_text(seconds: float) -> str:
    """Return a duration with two digits that count.

    >>> seconds_text(0.0123), seconds_text(7.31), seconds_text(4000)
    ('12 ms', '7.3 s', '1:06:40')
    """
    return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{seconds:.2g} s" if seconds < 60 else clock(seconds)
