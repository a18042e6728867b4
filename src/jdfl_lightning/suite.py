"""Many runs: algorithms x supervisions x numbers of pseudo-domains x seeds, each once, in one folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jdfl_lightning.config import Experiment, as_dict
from jdfl_lightning.display import Display
from jdfl_lightning.errors import InputError, require
from jdfl_lightning.experiment import discover, fit
from jdfl_lightning.loggers import in_group
from jdfl_lightning.resume import check_same
from jdfl_lightning.run_folder import CONFIG, CURVES, DISCOVERY, RUNS, last_round

DISCOVERIES = "discovery"
"""Folder, in that of the suite, of the discoveries that runs of a seed share."""
SUPERVISIONS = ("base", "hard", "graded", "random")

Parse = Callable[[Sequence[str]], Experiment]
"""Turns command-line arguments into settings."""


@dataclass(frozen=True)
class Matrix:
    """What is to be compared."""

    algorithms: Sequence[str] = ("FedAvg",)
    supervisions: Sequence[str] = ("base", "graded", "random")
    seeds: Sequence[int] = (0, 1, 2)
    num_domains: Sequence[int] | None = None
    """Numbers of pseudo-domains to try; none for what the settings say."""

    def __post_init__(self) -> None:
        for name in ("algorithms", "supervisions", "seeds", "num_domains"):
            values = getattr(self, name)
            distinct = values is None or 0 < len(values) == len(set(values))
            require(distinct, f"--{name}", "different values", list(values or ()))
        for supervision in self.supervisions:
            known = supervision in SUPERVISIONS
            require(known, "--supervisions", f"some of {', '.join(SUPERVISIONS)}", supervision)
        require(min(self.seeds) >= 0, "--seeds", "0 or more", list(self.seeds))
        require(min(self.num_domains or [1]) >= 1, "--num_domains", "1 or more", list(self.num_domains or ()))


@dataclass(frozen=True)
class Outcome:
    """How a run of the suite ended."""

    name: str
    folder: Path
    failure: str = ""
    """Why it has no result; empty if it has."""


def plan(parse: Parse, args: Sequence[str], matrix: Matrix) -> tuple[Path, list[Experiment]]:
    """Return the suite's folder and the settings of every run, in the order in which they are run.

    All are checked before anything is begun: every combination, and that runs which are there already are of the same
    settings. The baseline has no pseudo-domains, so that it is run once whatever numbers of them are tried.

    Args:
        parse: turns arguments into settings.
        args: the arguments that all runs share; ``--run_dir`` is the suite's folder.
        matrix: what is to be compared.
    """
    common = parse(args)
    require(common.resume is None, "--resume", "left out: the same command goes on with a suite,", common.resume)
    folder = Path(common.run_dir or f"{RUNS}/suite-{type(common.data).__name__.lower()}")
    runs: list[Experiment] = []
    for seed in matrix.seeds:  # by seed first: whatever time there is, the comparison is whole up to some seed
        for algorithm in matrix.algorithms:
            for supervision in matrix.supervisions:
                numbers = [None] if matrix.num_domains is None or supervision == "base" else matrix.num_domains
                for number in numbers:
                    words = [algorithm.rpartition(".")[2].lower(), supervision, f"seed{seed}"]
                    words[2:2] = [] if number is None else [f"m{number}"]
                    chosen = [f"--algorithm={algorithm}", f"--supervision={supervision}", f"--seed_everything={seed}"]
                    chosen += [] if number is None else [f"--num_domains={number}"]
                    run = parse([*args, *chosen])
                    name = "-".join(words)
                    logger = in_group(run.logger, folder.name, f"{type(run.data).__name__.lower()}-{name}")
                    run = replace(run, run_dir=str(folder / name), logger=logger)
                    if as_dict(run.data) == as_dict(common.data):
                        run = replace(run, data=common.data)  # images are loaded once
                    runs.append(run)
    for run in runs:
        if (Path(str(run.run_dir)) / CONFIG).is_file():
            check_same(run, Path(str(run.run_dir)))
    return folder, runs


def run_suite(folder: Path, runs: Sequence[Experiment], display: Display | None = None) -> list[Outcome]:
    """Run all that is not finished yet; one that fails does not keep the others from being run.

    Args:
        folder: the suite's folder.
        runs: the settings of its runs.
        display: where progress is shown; nothing is shown if not given.
    """
    display = display or Display()
    outcomes = []
    for number, run in enumerate(runs, start=1):
        target = Path(str(run.run_dir))
        display.run(number, len(runs), target.name)
        if _is_finished(run, target):
            display.say(f"{target.name} is finished")
            outcomes.append(Outcome(target.name, target))
            continue
        try:
            shared = _discovery(folder, run, display)
            fit(replace(run, resume="auto", discovery=shared), display)
            outcomes.append(Outcome(target.name, target))
        except Exception as error:  # whatever a user's algorithm, network or data raises
            reason = f"{'' if isinstance(error, InputError) else type(error).__name__ + ': '}{error}"
            outcomes.append(Outcome(target.name, target, " ".join(reason.split()) or "no reason was given"))
            display.say(f"{target.name} failed: {outcomes[-1].failure}")
    return outcomes


def _is_finished(run: Experiment, folder: Path) -> bool:
    """Return whether a run has left all that it leaves; its curves come last."""
    return (folder / CURVES).is_file() and last_round(folder) >= run.rounds


def _discovery(folder: Path, run: Experiment, display: Display) -> str | None:
    """Return the folder of the discovery that all runs of a seed share, which is made if it is not there."""
    if run.supervision == "base" or run.discovery is not None:
        return run.discovery
    shared = folder / DISCOVERIES / f"seed{run.seed_everything}"
    if not (shared / DISCOVERY).is_file():
        if shared.is_dir():  # one that was cut off
            shutil.rmtree(shared)
        discover(replace(run, run_dir=str(shared)), display)
    return str(shared)
