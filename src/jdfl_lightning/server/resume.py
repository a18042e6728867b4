"""Resuming a run: find it, check that its settings are the same, and read its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from jdfl_lightning.clustering.updates import Updates
from jdfl_lightning.config import Experiment, as_dict, free_settings, run_of
from jdfl_lightning.core.errors import InputError, StorageError, notify, plain, require
from jdfl_lightning.core.settings import chosen, declared_settings, flat_settings, option_name
from jdfl_lightning.data.base import NOT_IN_PHASE_1, option_defaults
from jdfl_lightning.server.state import ServerState, read_taken, unpacked
from jdfl_lightning.storage.checkpoint import CheckpointHeader, Checkpoints
from jdfl_lightning.storage.discoveries import digest_discovery, load_discovery
from jdfl_lightning.storage.folder import require_own_files
from jdfl_lightning.storage.metrics import digest_metrics, forget_rounds, last_round, same_scores, was_evaluated
from jdfl_lightning.storage.names import ALONE, DIAGNOSIS, DISCOVERY, METRICS, RUNS, Selection
from jdfl_lightning.storage.trust import CONFIG, saved_settings
from jdfl_lightning.storage.weights import ModelHeader, load_model

_LOOKED_INTO: dict[str, type] = {"rounds": int, "checkpoint": dict, "checkpoint.every": int, "clustering": dict}
"""Settings of a run folder whose values are used, not only compared, with their types; groups before their members."""

_NEWER: dict[str, Any] = {"select": None, "private": [], "finetune_epochs": 0, "statistics": "saved"}
"""Settings that are newer than some runs, with the values that leave them unused."""


def run_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a run folder; raise a `StorageError` if they cannot be those of a run."""
    settings = saved_settings(folder)
    for name, kind in _LOOKED_INTO.items():
        group, _, inner = name.rpartition(".")
        value: Any = (settings.get(group, {}) if group else settings).get(inner, kind())
        if type(value) is not kind:
            expected = "a number" if kind is int else "a group of settings"
            raise StorageError(f"Expected {name} in {folder / CONFIG} to be {expected} but got {plain(repr(value))}.")
    return settings


def fixed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a resumed run must share, by dotted name: those that change a round's numbers.

    Those that are left out if they are unused are newer than some runs.
    """
    flat = dict(flat_settings(settings))
    free = chosen(flat, free_settings())
    unused = {f"data.init_args.{name}": value for name, value in option_defaults().items()} | _NEWER
    return {key: value for key, value in flat.items() if key not in free and (key, value) not in unused.items()}


def require_equal(before: dict[str, Any], after: dict[str, Any], whose: object, why: str) -> None:
    """Raise an `InputError` that names the first setting that differs."""
    for key in [*before, *after]:
        if before.get(key, ...) != after.get(key, ...):
            expected = repr(before[key]) if key in before else "left out"
            found = f"got {after[key]!r}" if key in after else "it is left out"
            raise InputError(f"Expected --{option_name(key)} to be {expected} as in {whose} but {found}: {why}")


def check_same(experiment: Experiment, folder: Path) -> None:
    """Raise an `InputError` that names a setting that would have changed the finished rounds."""
    saved, now = run_settings(folder), as_dict(experiment)
    why = "the rounds that are over would have been others. Leave it out, or start a new run."
    require_equal(fixed_settings(saved), fixed_settings(now), folder, why)
    rounds = saved.get("rounds", 0)
    scheduled = experiment.algorithm.has_schedule or experiment.supervision.has_schedule
    if experiment.rounds != rounds and (scheduled or experiment.rounds < rounds):
        why = "its rounds follow a schedule" if scheduled else "rounds can only be added"
        raise InputError(f"Expected --rounds to be {rounds} as in {folder} but got {experiment.rounds}: {why}.")


def _phase_1(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what clients send in Phase 1, by their dotted names."""
    names = tuple(declared.name for declared in declared_settings(Experiment) if declared.phase_1)
    batch_size = settings.get("clustering", {}).get("batch_size") or settings.get("batch_size")
    found = chosen(fixed_settings(settings), names) | {"clustering.batch_size": batch_size}
    later = chosen(found, tuple(f"data.init_args.{name}" for name in NOT_IN_PHASE_1))
    return {key: value for key, value in found.items() if key not in later}


def check_updates(experiment: Experiment, folder: Path) -> None:
    """Raise an `InputError` that names a setting that would have changed the updates of a discovery."""
    why = "clients would have sent other updates in Phase 1, so this discovery cannot be reused."
    require_equal(_phase_1(run_settings(folder)), _phase_1(as_dict(experiment)), folder, why)


def reuse_discovery(experiment: Experiment, data: str) -> Updates | None:
    """Return the updates of the discovery named in the settings; None if there is none or none is needed.

    Args:
        experiment: its seed, data, network and Phase 1 settings must be those of the discovery.
        data: fingerprint of the images.
    """
    if experiment.discovery is None or not experiment.needs_discovery:
        return None
    folder = Path(experiment.discovery)
    if not (folder / DISCOVERY).is_file():
        raise InputError(f"Expected --discovery to be a folder with a {DISCOVERY} but got {folder}.")
    require_own_files(folder)
    check_updates(experiment, folder)
    found = load_discovery(folder, data, experiment.data.num_clients)
    if found is None:
        raise InputError(f"Expected --discovery to be of the same images but those of {folder} differ, or their split.")
    return found[0]


def find_run(experiment: Experiment, diagnosis: bool = False) -> Path | None:
    """Return the folder of the run to resume, after checking its settings; None for a new run.

    Args:
        experiment: its `resume` says which.
        diagnosis: whether it must be a run of `diagnose`, not of `fit`.
    """
    if experiment.resume is None:
        return None
    if experiment.resume != "auto":
        require(experiment.run_dir is None, "--run_dir", "left out with --resume, which names it,", experiment.run_dir)
    if experiment.resume != "auto" or experiment.run_dir is not None:
        folder = Path(experiment.run_dir) if experiment.run_dir is not None else run_of(experiment.resume)
        if not (folder / CONFIG).is_file():
            return None
        if (folder / DIAGNOSIS).is_file() != diagnosis:
            kinds = ("a run", "a diagnosis")
            raise InputError(
                f"Expected the folder of {kinds[diagnosis]} but {folder} is that of {kinds[not diagnosis]}."
            )
        check_same(experiment, folder)
        return folder
    wanted = fixed_settings(as_dict(experiment))
    for folder in sorted(Path(RUNS).glob("*/"), key=lambda folder: folder.name, reverse=True):
        try:
            other = folder.name.endswith(ALONE) or (folder / DIAGNOSIS).is_file() != diagnosis
            if other or not (folder / CONFIG).is_file() or fixed_settings(run_settings(folder)) != wanted:
                continue
        except (OSError, StorageError) as error:
            notify(f"--resume auto skips {folder}: {plain(str(error))}")
            continue
        check_same(experiment, folder)
        return folder
    return None


@dataclass(frozen=True)
class Reached:
    """The state of a run at the checkpoint it is resumed from."""

    state: ServerState
    header: CheckpointHeader
    centroids: Tensor | None
    """Centroids of the pseudo-domains, if they have moved since Phase 1."""
    evaluated: bool | None
    """Whether the last round was evaluated; None if it has no row yet."""


def read_reached(experiment: Experiment, folder: Path, data: str) -> Reached | None:
    """Read the checkpoint to resume from; None if the run ended before it wrote one.

    Args:
        experiment: its `resume` may name a checkpoint other than the newest.
        folder: the run folder.
        data: fingerprint of the images.
    """
    checkpoints = Checkpoints(folder, experiment.checkpoint.keep)
    rounds = checkpoints.rounds()
    named = Path(experiment.resume or "")
    file = named if named.is_file() else checkpoints.file(rounds[0]) if rounds else None
    if file is None:
        every = run_settings(folder).get("checkpoint", {}).get("every", 1)
        if last_round(folder) >= every:
            raise StorageError(f"Expected a checkpoint but {checkpoints.folder} has none: the run cannot be continued.")
        return None
    try:
        record, header = checkpoints.load(file, experiment.backend.states_here)
        if "weights" not in record and not experiment.private:
            raise StorageError(f"Expected a checkpoint but {file} holds no weights.")
    except StorageError as error:
        raise StorageError(f"{error} {_offer(checkpoints, file, experiment.backend.states_here)}") from error
    if header.data != data:
        raise InputError(f"Expected --data to give the images of the run {folder} but they, or their split, differ.")
    _check_beside(experiment, folder, file, header)
    state = ServerState(
        header.round,
        record.get("weights", {}),
        record.get("buffers", {}),
        unpacked(record, "server"),
        unpacked(record, "learned"),
        header.clients,
        taken=read_taken(file, record.get("taken", {})),
    )
    evaluated, last = was_evaluated(folder, header.round), _last_model(folder)
    if evaluated is False and last is not None and last.round == header.round:
        evaluated = bool(last.scores)  # its row may have lost them
    return Reached(state, header, record.get("domains", {}).get("mu"), evaluated)


@cache
def bit_versions() -> dict[str, str]:
    """Return the versions of the packages on which the exact bits of a result depend; reading them takes long."""
    return {name: version(name) for name in ("jdfl-lightning", "torch", "lightning")}


def _check_beside(experiment: Experiment, folder: Path, file: Path, header: CheckpointHeader) -> None:
    """Raise an error if the files beside a checkpoint have changed since it was written.

    These are the settings, the rows of ``metrics.csv`` and the discovery. Other package versions only give a note.
    """
    why = "the rounds that are over were run with that. Restore config.yaml, or start a new run."
    require_equal(header.settings, fixed_settings(as_dict(experiment)), file, why)
    before = header.round - 1
    if (last := last_round(folder)) < before:
        raise StorageError(
            f"Expected the rounds up to {before} in {folder / METRICS} but it ends with {last:.0f}: it is damaged, "
            "or of another run."
        )
    if digest_metrics(folder, before) != header.rows:
        raise StorageError(
            f"Expected {folder / METRICS} to be as it was when {file.name} was written but rows up to round {before} "
            "have changed since: restore it, or start a new run."
        )
    if digest_discovery(folder) != header.discovery:
        raise StorageError(
            f"Expected the discovery that {file.name} was written with but {folder / DISCOVERY} has changed since, "
            "or is missing: restore it, or start a new run."
        )
    changed = {name: old for name, old in header.versions.items() if bit_versions().get(name) != old}
    if changed:
        was = ", ".join(f"{name} {old}" for name, old in changed.items())
        now = ", ".join(f"{name} {bit_versions().get(name, 'missing')}" for name in changed)
        note = f"The run so far was made with {plain(was)}; from here on with {plain(now)}: bits may differ."
        notify(note)


def _last_model(folder: Path) -> ModelHeader | None:
    """Return the header of the last weights; None if they are missing or damaged."""
    try:
        return load_model(folder, "last", network=False).header
    except InputError:
        return None


def drop_later_rounds(folder: Path, round: int, select: Selection) -> None:
    """Remove the rows of rounds after a given one; a note says if the weights of the best that remains are lost.

    The given round's own row is kept only if the last weights, saved just before it, are of that round and have the
    same scores.

    Args:
        folder: the run folder.
        round: the last round to keep.
        select: the images by whose accuracy a round is the best; last if the run keeps no best weights.
    """
    last = _last_model(folder)
    known = last is not None and last.round == round and same_scores(folder, last)
    number = forget_rounds(folder, round if known else round - 1, select)
    if number:
        try:
            found = load_model(folder, "best", network=False).header.round
            problem = "" if found >= number else f"is of round {found}"
        except InputError:
            problem = "is missing or damaged"
        if problem:
            notify(
                f"The best round so far is {number} but {folder / 'best.safetensors'} {problem}: it will be that of "
                "the next round that is better.",
            )


def _offer(checkpoints: Checkpoints, damaged: Path, states_here: bool) -> str:
    """Name the newest undamaged checkpoint, if there is one."""
    for round in checkpoints.rounds():
        file = checkpoints.file(round)
        if file != damaged:
            try:
                checkpoints.load(file, states_here)
                return f"The one of round {round} is whole: resume it with --resume {file}"
            except StorageError:
                continue
    return "No other checkpoint is whole: start a new run."
