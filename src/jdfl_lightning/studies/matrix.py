"""`suite`, as Python users call it: many runs, in one folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jdfl_lightning import algorithms as algorithms_room
from jdfl_lightning.algorithms import Algorithm
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import require, require_choice, require_type
from jdfl_lightning.studies.run import Run
from jdfl_lightning.studies.suite import Combinations, Outcome, arrange, run_suite
from jdfl_lightning.supervision import SUPERVISIONS, Supervision
from jdfl_lightning.ui.display import Display, progress_display

if TYPE_CHECKING:
    from jdfl_lightning.report.write import Report

_WORD = "a word of lower-case letters and digits"
"""Names of algorithms, which are part of folder names."""


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

    def make(algorithm: str, supervision: str, seed: int, number: int | None) -> Experiment:
        return replace(
            experiment,
            algorithm=chosen.get(algorithm, experiment.algorithm),
            supervision=objects.get(supervision, supervision),  # type: ignore[arg-type]  # or a short name
            seed_everything=seed,
            num_domains=experiment.num_domains if number is None else number,
        )

    folder, runs = arrange(experiment, matrix, make)
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
            require(re.fullmatch("[a-z0-9_-]+", name) is not None, "every name in argument `algorithms`", _WORD, name)
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
