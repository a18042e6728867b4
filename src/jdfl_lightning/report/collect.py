"""Run folders -> the runs that can be compared, and why the others cannot."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from jdfl_lightning.core.errors import InputError, StorageError, without_stop
from jdfl_lightning.storage.checkpoint import Checkpoints, read_header
from jdfl_lightning.storage.folder import DIAGNOSIS, DISCOVERY, METRICS, Run, flat_settings, read_run
from jdfl_lightning.storage.trust import CONFIG

Value: TypeAlias = str | int | float | bool | None
Settings: TypeAlias = tuple[tuple[str, Value], ...]
"""Settings by their names, sorted: equal and hashable if the settings are equal."""

PACKAGE = "jdfl_lightning."
"""Start of the import paths of classes that are not the user's own."""
SUPERVISIONS = ("base", "hard", "graded", "random")
_NO_RUNS_INSIDE = ("wandb", "checkpoints", "clients", "discovery")
_FREE = (
    "seed_everything",
    "supervision",
    "presets",
    "discovery",
    "checkpoint",
    "backend",
    "logger",
    "run_dir",
    "resume",
    "trainer.accelerator",
    "trainer.devices",
    "data.root",
    "data.download",
)
"""Settings that make no other experiment of a run, or are looked at by themselves."""
_SECTION = ("data", "epochs", "client_fraction")
"""Settings of which each combination is an experiment of its own."""
_JOINT = ("num_domains", "alpha", "tau", "phi", "score", "clustering")
_JOINT_OF = {
    "base": (),
    "hard": ("num_domains", "clustering", "score"),
    "graded": ("num_domains", "clustering", "alpha", "tau", "score"),
    "random": ("num_domains", "clustering", "phi", "score"),
}
"""Settings of the joint head, and which of them a supervision looks at."""


@dataclass(frozen=True)
class LeftOut:
    """A run that does not count."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class Finished:
    """A run that counts, with what makes it comparable to others."""

    run: Run
    seed: int
    algorithm: str
    """Name of the algorithm's class."""
    supervision: str
    section: Settings
    """Data set, clients, local epochs, share of clients: the experiment."""
    training: Settings
    """All other settings that the baseline shares."""
    joint: Settings
    """Settings of the joint head that the supervision looks at; none for the baseline."""
    given_domains: int | None
    """M, if it was set."""
    num_domains: int
    """M, as set or found."""
    fingerprint: str | None
    """Checksum of the images and of who holds them; none if the folder does not say."""

    @property
    def key(self) -> tuple[object, ...]:
        """What all seeds of one row of a table share."""
        return self.section, self.algorithm, self.training, self.supervision, self.joint

    @property
    def accuracy(self) -> float:
        """The best round's."""
        return self.run.best["test/acc"]


def find_run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders that are named or lie below one that is, each once, in the order of their names."""
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
    if folder.resolve() in seen:  # a link that leads in a circle
        return
    seen.add(folder.resolve())
    if (folder / METRICS).exists():
        yield folder
        return
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name not in _NO_RUNS_INSIDE]
    found = [run for path in inner for run in _below(path, seen)]
    yield from found
    begun = (folder / CONFIG).exists() and not (folder / DIAGNOSIS).exists()
    if not found and begun:  # a run that ended before its first round was over
        yield folder


def read_finished(folders: Iterable[Path]) -> tuple[list[Finished], list[LeftOut]]:
    """Read run folders; leave out what is unreadable, unfinished, of another split, or there twice."""
    finished: list[Finished] = []
    left_out: list[LeftOut] = []
    for folder in folders:
        try:
            finished.append(_read(folder))
        except InputError as error:
            left_out.append(LeftOut(folder, without_stop(error)))
    finished = _without_other_splits(finished, left_out)
    finished = _without_repetitions(finished, left_out)
    return finished, sorted(left_out, key=lambda entry: entry.folder)


def _read(folder: Path) -> Finished:
    if not (folder / METRICS).exists() and (folder / DISCOVERY).exists():
        raise InputError("no round is finished: a discovery alone, or a run that was cut off after it")
    run = read_run(folder)
    try:
        settings = _settings(run.config)
        supervision = str(run.config["supervision"])
        rounds, seed = int(run.config["rounds"]), int(run.config["seed_everything"])
        algorithm = str(settings["algorithm"]).rpartition(".")[2]
        data = str(settings["data"])
        data = data.rpartition(".")[2] if data.startswith(PACKAGE) else data
        given = settings.get("num_domains") if supervision != "base" else None
        section = _pick(settings, _SECTION) | {"data": data, "domains": json.dumps(run.domains)}
        return Finished(
            run=_checked(run, rounds),
            seed=seed,
            algorithm=algorithm,
            supervision=supervision,
            section=_sorted(section),
            training=_sorted(_without(settings, (*_FREE, *_SECTION, *_JOINT))),
            joint=_sorted(_joint(settings, _JOINT_OF[supervision], given)),
            given_domains=None if given is None else int(given),
            num_domains=1 if supervision == "base" else _num_domains(run),
            fingerprint=_fingerprint(run),
        )
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"its {CONFIG} is not one of a run: {type(error).__name__} {error}") from error


def _checked(run: Run, rounds: int) -> Run:
    done = len({row["round"] for row in run.rows})
    if done < rounds:
        raise InputError(f"unfinished: {done} of {rounds} rounds")
    if done > rounds:
        raise InputError(f"its {METRICS} has {done} rounds but its {CONFIG} {rounds}")
    evaluated = [row["test/acc"] for row in run.rows if not math.isnan(row["test/acc"])]
    if not evaluated:
        raise InputError("no round was evaluated")
    if not all(0 <= accuracy <= 1 for accuracy in evaluated):
        raise InputError(f"its {METRICS} has an accuracy that is not between 0 and 1")
    return run


def _num_domains(run: Run) -> int:
    """Return M from the discovery that every run with a joint head has."""
    found = run.discovery.get("num_domains") if isinstance(run.discovery, dict) else None
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise InputError(f"its {DISCOVERY} does not say the number of pseudo-domains")
    return found


def _settings(config: dict[str, Any]) -> dict[str, Value]:
    """Return a run's settings by the names they have on the command line."""
    found: dict[str, Value] = {}
    for key, value in flat_settings(config):
        name = key.replace(".init_args", "").removesuffix(".class_path")
        if isinstance(value, (str, int, float, bool)) or value is None:
            found[name] = value
        elif value != {}:
            found[name] = json.dumps(value, default=str)
    return found


def _under(name: str, prefixes: Sequence[str]) -> bool:
    return f"{name}.".startswith(tuple(f"{prefix}." for prefix in prefixes))


def _pick(settings: dict[str, Value], prefixes: Sequence[str]) -> dict[str, Value]:
    return {name: value for name, value in settings.items() if _under(name, prefixes) and not _under(name, _FREE)}


def _without(settings: dict[str, Value], prefixes: Sequence[str]) -> dict[str, Value]:
    return {name: value for name, value in settings.items() if not _under(name, prefixes)}


def _joint(settings: dict[str, Value], prefixes: Sequence[str], given: Value) -> dict[str, Value]:
    unused = () if given is None else ("clustering.criterion", "clustering.max_domains")
    return _without(_pick(settings, prefixes), unused)


def _sorted(settings: dict[str, Value]) -> Settings:
    return tuple(sorted(settings.items()))


def _fingerprint(run: Run) -> str | None:
    """Return the checksum of a run's images: from its discovery, or, for a baseline, from its newest checkpoint."""
    if run.discovery and "data" in run.discovery:
        return str(run.discovery["data"])
    checkpoints = Checkpoints(run.folder, 1)
    try:
        return read_header(checkpoints.file(checkpoints.rounds()[0])).data
    except (IndexError, StorageError):
        return None


def _without_other_splits(runs: Sequence[Finished], left_out: list[LeftOut]) -> list[Finished]:
    """Keep, of each experiment and seed, the runs that share most runs' images; those that do not say stay.

    Where there is no majority, none of those that say is kept: nothing tells which are the right ones.
    """
    kept = []
    shared: dict[tuple[Settings, int], Counter[str]] = {}
    for run in runs:
        if run.fingerprint is not None:
            shared.setdefault((run.section, run.seed), Counter())[run.fingerprint] += 1
    for run in runs:
        counts = shared.get((run.section, run.seed), Counter())
        most = max(counts.values(), default=0)
        usual = [name for name, count in counts.items() if count == most]
        if run.fingerprint is None or usual == [run.fingerprint]:
            kept.append(run)
        elif len(usual) > 1:
            reason = (
                f"the runs of seed {run.seed} differ in images, or in how they are dealt out, and no majority agrees"
            )
            left_out.append(LeftOut(run.run.folder, f"{reason}: report those that belong together"))
        else:
            others = "1 run" if most == 1 else f"{most} runs"
            reason = f"other images, or dealt out otherwise, than in the {others} of seed {run.seed} kept"
            left_out.append(LeftOut(run.run.folder, reason))
    return kept


def _without_repetitions(runs: Sequence[Finished], left_out: list[LeftOut]) -> list[Finished]:
    """Keep the first of the runs that have all settings and the seed in common."""
    kept: dict[tuple[object, ...], Finished] = {}
    for run in runs:
        first = kept.setdefault((run.key, run.seed), run)
        if first is not run:
            same = "the same" if first.run.best == run.run.best else "another"
            reason = f"repeats {first.run.folder}: the same settings and seed, with {same} best round"
            left_out.append(LeftOut(run.run.folder, reason))
    return list(kept.values())
