"""`suite`: algorithms x supervisions x numbers of pseudo-domains x unseen domains x seeds, each run once."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdfl_lightning import algorithms as algorithms_room
from jdfl_lightning.algorithms import Algorithm
from jdfl_lightning.config import Experiment, as_dict, given_values, joined, split_options
from jdfl_lightning.core.errors import InputError, StorageError, require, require_choice, require_type
from jdfl_lightning.core.files import is_aside
from jdfl_lightning.data import DomainDataModule
from jdfl_lightning.server.resume import check_same, check_updates
from jdfl_lightning.server.run import discover, fit
from jdfl_lightning.storage.details import read_stop
from jdfl_lightning.storage.folder import lock_run
from jdfl_lightning.storage.metrics import last_round
from jdfl_lightning.storage.names import CLIENT_ROWS, CURVES, DISCOVERY, DISCOVERY_FIGURE, METRICS, RUNS, VECTORS
from jdfl_lightning.storage.trust import CONFIG, saved_settings
from jdfl_lightning.studies.run import Run
from jdfl_lightning.supervision import SUPERVISIONS, Plain, Supervision, short_names
from jdfl_lightning.ui.display import Display, progress_display
from jdfl_lightning.ui.loggers import in_group

if TYPE_CHECKING:
    from jdfl_lightning.report.write import Report

DISCOVERIES = "discovery"
"""Subfolder of the suite with the discoveries, each shared by the runs of a seed."""

Parse = Callable[[Sequence[str]], Experiment]
"""Turns command-line arguments into settings."""
Pairs = Mapping[tuple[str, str], Experiment]
"""Settings by algorithm (empty for that of the settings) and supervision."""


@dataclass(frozen=True)
class Combinations:
    """The combinations to compare."""

    algorithms: Sequence[str] | None = None
    """Names or import paths; None for the algorithm of the settings."""
    supervisions: Sequence[str] = ("base", "graded", "random")
    """Short names, or import paths."""
    seeds: Sequence[int] = (0, 1, 2)
    num_domains: Sequence[int] | None = None
    """Numbers of pseudo-domains to try; None for the number of the settings."""
    unseen: Sequence[str] | None = None
    """Domains to leave out, one in each run; ``each`` for all that there are. None for those of the settings."""

    def __post_init__(self) -> None:
        for name in ("algorithms", "supervisions", "seeds", "num_domains", "unseen"):
            values = getattr(self, name)
            distinct = values is None or 0 < len(values) == len(set(values))
            require(distinct, f"--{name}", "different values", list(values or ()))
        for supervision in self.supervisions:
            if "." not in supervision:
                require_choice("every one of --supervisions", supervision, list(short_names()))
        require(min(self.seeds) >= 0, "--seeds", "0 or more", list(self.seeds))
        require(min(self.num_domains or [1]) >= 1, "--num_domains", "1 or more", list(self.num_domains or ()))


def folder_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the name of each class in folder names: its own, with its module if another class has it too.

    >>> folder_names(["base", "graded", "mine.Graded"])
    {'base': 'base', 'graded': 'graded', 'mine.Graded': 'mine-graded'}
    """
    own = [path.rpartition(".")[2].lower() for path in paths]
    return {p: n if own.count(n) == 1 else p.replace(".", "-").lower() for p, n in zip(paths, own, strict=True)}


@dataclass(frozen=True)
class Outcome:
    """How a run of the suite ended."""

    name: str
    folder: Path
    failure: str = ""
    """Why it has no result; empty if it has."""


@dataclass(frozen=True)
class Suite:
    """A suite of runs in one folder."""

    folder: Path
    """The folder of all of them."""
    outcomes: list[Outcome]
    """How each of them ended."""

    @property
    def runs(self) -> dict[str, Run]:
        """The finished runs by name, such as ``fedavg-base-seed0``."""
        return {outcome.name: Run.read(outcome.folder) for outcome in self.outcomes if not outcome.failure}

    @property
    def failures(self) -> dict[str, str]:
        """Why runs failed, by name."""
        return {outcome.name: outcome.failure for outcome in self.outcomes if outcome.failure}

    def report(self) -> Report:
        """Compare the finished runs and write the report into the suite's folder."""
        from jdfl_lightning.report.write import write_report

        return write_report(self.folder, self.folder / "report")


def plan(parse: Parse, args: Sequence[str], matrix: Combinations) -> tuple[Path, list[Experiment]]:
    """Return the suite's folder and the settings of every run, in the order in which they are run.

    Before anything runs, every combination is checked, and existing runs must have the same settings. The baseline has
    no pseudo-domains, so it is run once for all numbers of them.

    Args:
        parse: turns arguments into settings.
        args: the arguments that all runs share; ``--run_dir`` is the suite's folder.
        matrix: the combinations to compare.
    """
    args = joined(args)
    alone = [("algorithm", "algorithms"), ("supervision", "supervisions"), ("seed_everything", "seeds")]
    for one, many in [*alone, *([] if matrix.unseen is None else [("data.unseen", "unseen")])]:
        given, _ = split_options(args, {one})
        require(not given, f"--{one}", f"left out: --{many} says it,", *(given[:1] or [""]))
    pairs: dict[tuple[str, str], Experiment] = {}
    for algorithm, supervision in product(matrix.algorithms or [""], matrix.supervisions):
        first = [f"--algorithm={algorithm}"] if algorithm else []  # a class before its options
        pairs[algorithm, supervision] = parse([*first, *args, f"--supervision={supervision}"])
    return arrange(pairs, matrix, "".join(Path(config).stem for config in given_values(args, "config")[-1:]))


def arrange(pairs: Pairs, matrix: Combinations, name: str = "") -> tuple[Path, list[Experiment]]:
    """Return the suite's folder and the settings of every run, in the order in which they are run.

    Args:
        pairs: the settings of each algorithm with each supervision; all else they share.
        matrix: the combinations to compare.
        name: part of the folder's name, if ``run_dir`` does not say it; that of the data set if empty.
    """
    common = next(iter(pairs.values()))
    require(common.resume is None, "--resume", "left out: the same command resumes a suite,", common.resume)
    folder = Path(common.run_dir or f"{RUNS}/suite-{name or type(common.data).__name__.lower()}")
    a_run = any((folder / name).exists() for name in (CONFIG, METRICS))
    require(not a_run, "--run_dir", "a folder for runs", f"{folder}, which is that of a run")
    runs: list[Experiment] = []
    names = folder_names(matrix.algorithms or ()) or {"": type(common.algorithm).__name__.lower()}
    targets = folder_names(matrix.supervisions)
    datas = _left_out(common.data, matrix.unseen)
    # by seed first: if time runs out, the comparison is complete up to some seed
    for seed, unseen, (algorithm, supervision) in product(matrix.seeds, datas, pairs):
        numbers = [None] if matrix.num_domains is None or supervision == Plain.short else matrix.num_domains
        for number in numbers:
            run = pairs[algorithm, supervision]
            run = run if number is None else replace(run, num_domains=number)
            words = [names[algorithm], targets[supervision]]
            words += [*([] if number is None else [f"m{number}"]), *([] if unseen is None else [_word(unseen)])]
            target = "-".join([*words, f"seed{seed}"])
            logger = in_group(run.logger, folder.name, f"{type(run.data).__name__.lower()}-{target}")
            place, data = str(folder / target), datas[unseen]  # runs share it, so that images are loaded once
            runs.append(replace(run, seed_everything=seed, data=data, run_dir=place, logger=logger))
    for run in runs:
        _check_what_is_there(folder, run)
    return folder, runs


def _left_out(data: DomainDataModule, unseen: Sequence[str] | None) -> dict[str | None, DomainDataModule]:
    """Return the data without each of some domains; by None the data itself, if no domains are given."""
    if unseen is None:
        return {None: data}
    require(data.unseen is None, "--data.unseen", "left out: --unseen says it,", data.unseen)
    if list(unseen) == ["each"]:
        if not data.domain_names:  # those of a folder are known when it is listed
            data.load_once()
        unseen = list(data.domain_names)
    return {name: data.with_unseen(name) for name in unseen}


def _word(domain: str) -> str:
    """Return a domain that is left out as part of a folder name.

    >>> _word("art painting")
    'without_art_painting'
    """
    return f"without_{re.sub('[^a-z0-9]+', '_', domain.lower())}"


def _check_what_is_there(folder: Path, run: Experiment) -> None:
    """Refuse to resume a run or reuse a discovery with other settings."""
    target, shared = Path(str(run.run_dir)), _shared(folder, run)
    try:
        if (target / CONFIG).is_file():
            check_same(run, target)
        elif run.needs_discovery and run.discovery is None and (shared / DISCOVERY).is_file():
            check_updates(run, shared)
    except StorageError:  # damaged: fails that run, not the suite
        return
    except InputError as error:
        raise InputError(f"{error} Another --run_dir is another suite.") from error


def run_suite(folder: Path, runs: Sequence[Experiment], display: Display | None = None) -> list[Outcome]:
    """Run all that is not finished yet; a run that fails does not stop the others.

    Args:
        folder: the suite's folder.
        runs: the settings of its runs.
        display: where progress is shown; nothing is shown if not given.
    """
    display = display or Display()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Expected --run_dir to be writable but got {folder}: {error}.") from error
    with lock_run(folder):
        left = [run for run in runs if not _is_finished(run)]
        if len(left) < len(runs):
            display.say(f"{len(runs) - len(left)} of {len(runs)} runs are finished")
        if left:
            _load_images(left[0].data, display)
        failures: dict[str, str] = {}
        for number, run in enumerate(left, start=1):
            name = Path(str(run.run_dir)).name
            display.run(number, len(left), name)
            try:
                fit(replace(run, resume="auto", discovery=_discovery(folder, run, display)), display)
            except Exception as error:  # whatever a user's algorithm, network or data raises
                reason = f"{'' if isinstance(error, InputError) else type(error).__name__ + ': '}{error}"
                failures[name] = " ".join(reason.split()) or "no reason was given"
                display.say(f"{name} failed: {failures[name]}")
        return [
            Outcome(target.name, target, failures.get(target.name, ""))
            for target in (Path(str(run.run_dir)) for run in runs)
        ]


def _load_images(data: DomainDataModule, display: Display) -> None:
    """Load the images of the first run; raise an `InputError` if there are none, which each run would say again."""
    data.progress = display.step
    try:
        data.load_once()
    except InputError:
        raise
    except Exception:  # of the user's own class: the runs report it
        return


def _is_finished(run: Experiment) -> bool:
    """Return whether a run is finished: it has its last file, and all rounds or the mark of these callbacks' stop."""
    folder = Path(str(run.run_dir))
    try:
        if not (folder / (CURVES if run.figures else CLIENT_ROWS)).is_file():
            return False
        stopped = read_stop(folder) is not None and saved_settings(folder).get("callbacks") == as_dict(run.callbacks)
        return stopped or last_round(folder) >= run.rounds
    except StorageError:  # damaged: resuming it reports that
        return False


def _shared(folder: Path, run: Experiment) -> Path:
    unseen = run.data.unseen
    words = [_word(unseen)] if isinstance(unseen, str) else []
    return folder / DISCOVERIES / "-".join([*words, f"seed{run.seed_everything}"])


def _discovery(folder: Path, run: Experiment, display: Display) -> str | None:
    """Return the folder of the discovery shared by all runs of a seed; make the discovery if it is missing."""
    if not run.needs_discovery or run.discovery is not None:
        return run.discovery
    shared = _shared(folder, run)
    if not (shared / DISCOVERY).is_file():
        if shared.is_dir():  # an unfinished discovery, if there is nothing else in it
            pictures = {Path(DISCOVERY_FIGURE).with_suffix(end).name for end in (".png", ".pdf", ".svg")}
            ours = {CONFIG, VECTORS, *pictures}
            strange = [file.name for file in shared.iterdir() if file.name not in ours and not is_aside(file.name)]
            require(not strange, "--run_dir", f"without files of others in {shared}", ", ".join(strange))
            shutil.rmtree(shared)
        discover(replace(run, run_dir=str(shared)), display)
    return str(shared)


def suite(
    experiment: Experiment,
    algorithms: Sequence[Algorithm | str] | Mapping[str, Algorithm] | None = None,
    supervisions: Sequence[str | Supervision] = ("base", "graded", "random"),
    seeds: Sequence[int] = (0, 1, 2),
    num_domains: Sequence[int] | None = None,
    unseen: Sequence[str] | str | None = None,
    progress: bool | Display = True,
) -> Suite:
    """Run a matrix of algorithms, supervisions and seeds, or what is left of it; a failed run does not stop the others.

    Args:
        experiment: the settings of every run; ``run_dir`` is the folder of the suite, whose finished runs are kept.
        algorithms: federated optimizers, as objects or by name; by a name of your own if two are of one class
            (``{"weak": FedProx(mu=0.1), "strong": FedProx(mu=1.0)}``). The experiment's if not given.
        supervisions: by short name (base, hard, graded, random, uniform, em, online), or as objects, at most one of a
            class.
        seeds: the seeds.
        num_domains: numbers of pseudo-domains to try; the experiment's if not given.
        unseen: domains to leave out, one in each run; ``"each"`` for all that there are. Those of the experiment's
            data if not given.
        progress: whether progress is shown, as in `fit`.

    Returns:
        The runs; ``suite(...).report().results`` compares them.
    """
    chosen = _named(algorithms)
    objects = {_path(given): given for given in supervisions if isinstance(given, Supervision)}
    kinds = [_path(given) if isinstance(given, Supervision) else given for given in supervisions]
    matrix = Combinations(
        list(chosen) or None, kinds, seeds, num_domains, [unseen] if isinstance(unseen, str) else unseen
    )
    pairs: dict[tuple[str, str], Experiment] = {}
    for (name, algorithm), kind in product((chosen or {"": experiment.algorithm}).items(), kinds):
        target: Any = objects.get(kind, kind)  # or a short name
        pairs[name, kind] = replace(experiment, algorithm=algorithm, supervision=target)
    folder, runs = arrange(pairs, matrix)
    with progress_display(progress) as display:
        return Suite(folder, run_suite(folder, runs, display))


def _path(supervision: Supervision) -> str:
    """Return the short name of a supervision, or the import path of one that is not of this package."""
    kind = type(supervision)
    return kind.short if kind in SUPERVISIONS else f"{kind.__module__}.{kind.__qualname__}"


def _named(algorithms: Sequence[Algorithm | str] | Mapping[str, Algorithm] | None) -> dict[str, Algorithm]:
    """Return algorithms by their names, which are part of folder names."""
    if isinstance(algorithms, Mapping):
        for name, algorithm in algorithms.items():
            a_word, wanted = re.fullmatch("[a-z0-9_-]+", name), "a word of lower-case letters and digits"
            require(a_word is not None, "every name in argument `algorithms`", wanted, name)
            require_type(f"argument `algorithms`, {name},", algorithm, Algorithm)
        return dict(algorithms)
    found: dict[str, Algorithm] = {}
    known = {name: kind for name, kind in vars(algorithms_room).items() if name in algorithms_room.__all__}
    known = {name: kind for name, kind in known.items() if issubclass(kind, Algorithm) and kind is not Algorithm}
    for given in algorithms or ():
        if isinstance(given, str):
            require_choice("every one of argument `algorithms`", given, list(known))
        algorithm = known[given]() if isinstance(given, str) else given
        require_type("every one of argument `algorithms`", algorithm, Algorithm)
        name = type(algorithm).__name__
        alone = name not in found
        require(alone, "argument `algorithms`", "a dict of names, as two of a class need one each,", name)
        found[name] = algorithm
    return found
