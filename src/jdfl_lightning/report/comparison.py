"""Finished runs -> experiments, rows of tables, differences to the baseline, and what the paper reports for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jdfl_lightning import published
from jdfl_lightning.report.collect import SUPERVISIONS, Finished, Settings, Value
from jdfl_lightning.report.statistics import Difference, Spread, paired_difference, spread
from jdfl_lightning.run_folder import DOMAIN_PREFIX

_PAPER_ORDER = ("FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON")
_NOT_IN_PAPER: dict[str, Value] = {
    "algorithm.weighting": "samples",
    "evaluate_every": 1,
    "max_update_norm": None,
    "privacy.clip_norm": None,
    "trainer.gradient_clip_val": None,
    "alpha": None,
}
"""Settings that the paper does not have, or that follow a rule there, and what they are without or by that rule."""


@dataclass(frozen=True)
class Row:
    """Runs that differ in the seed alone."""

    runs: tuple[Finished, ...]
    """In the order of their seeds."""
    base: tuple[Finished, ...]
    """Runs of the same algorithm and settings without a joint head; empty if there are none."""
    settings: str
    """The settings that tell this row from others of the experiment."""
    published: published.Result | None
    """What the paper reports where data set, clients, epochs and share of clients are the same."""
    differs: str
    """What else is not as in the paper."""

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return self.runs[0].algorithm

    @property
    def supervision(self) -> str:
        """base, hard, graded or random."""
        return self.runs[0].supervision

    @property
    def given_domains(self) -> int | None:
        """M, if it was set."""
        return self.runs[0].given_domains

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order."""
        return [run.seed for run in self.runs]

    @property
    def accuracy(self) -> Spread:
        """Accuracy of the best round over the seeds."""
        return spread([run.accuracy for run in self.runs])

    @property
    def difference(self) -> Difference | None:
        """Accuracy minus the baseline's over the seeds that both have; nothing for the baseline."""
        if self.supervision == "base":
            return None
        return paired_difference(
            {run.seed: run.accuracy for run in self.runs}, {run.seed: run.accuracy for run in self.base}
        )

    @property
    def setup(self) -> tuple[str, Settings]:
        """What a row has in common with its baseline."""
        return self.runs[0].algorithm, self.runs[0].training

    def domain(self, name: str) -> Spread:
        """Return a domain's accuracy in the round that is best overall, over the seeds."""
        return spread([run.run.best[DOMAIN_PREFIX + name] for run in self.runs])

    def curve(self) -> list[tuple[float, Spread]]:
        """Return the accuracy over the rounds that every seed evaluated."""
        curves = [{row["round"]: row["test/acc"] for row in run.run.rows} for run in self.runs]
        rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
        values = [(number, [curve[number] for curve in curves]) for number in rounds]
        return [(number, spread(accuracies)) for number, accuracies in values if not math.isnan(sum(accuracies))]


@dataclass(frozen=True)
class Section:
    """An experiment: data set, clients, local epochs, share of clients."""

    title: str
    about: str
    """Its settings, in words."""
    domains: list[str]
    experiment: str | None
    """The paper's experiment with these settings."""
    rows: list[Row]
    """The main table."""
    sweep: list[Row]
    """Rows with a given M, where there are several of one kind: the curve over M."""


def compare(runs: Iterable[Finished]) -> list[Section]:
    """Sort finished runs into experiments and rows."""
    sections: dict[Settings, dict[tuple[object, ...], list[Finished]]] = {}
    for run in runs:
        sections.setdefault(run.section, {}).setdefault(run.key, []).append(run)
    found = [_section(dict(key), list(groups.values())) for key, groups in sections.items()]
    return sorted(
        found, key=lambda section: (list(published.TITLES).index(section.experiment or "pacs_c"), section.about)
    )


def _section(settings: dict[str, Value], groups: Sequence[list[Finished]]) -> Section:
    domains = json.loads(str(settings["domains"]))
    data = str(settings["data"])
    experiment = published.find_experiment(data, *map(settings.get, ("data.num_clients", "epochs", "client_fraction")))
    bases = {(group[0].algorithm, group[0].training): group for group in groups if group[0].supervision == "base"}
    rows = sorted((_row(group, groups, bases, experiment) for group in groups), key=_order)
    shown = [f"{name} {value}" for name, value in settings.items() if name not in ("data", "domains")]
    return Section(
        title=data if experiment is None else published.TITLES[experiment],
        about=", ".join([data, *(text.removeprefix("data.") for text in shown), f"domains {' / '.join(domains)}"]),
        domains=domains,
        experiment=experiment,
        rows=[row for row in rows if not _belongs_to_sweep_alone(row, rows)],
        sweep=[
            _with_curve(row, experiment) for row in rows if len(_given(row, rows)) > 1 and row.given_domains is not None
        ],
    )


def _row(
    group: Sequence[Finished],
    groups: Sequence[Sequence[Finished]],
    bases: dict[tuple[str, Settings], list[Finished]],
    experiment: str | None,
) -> Row:
    runs = tuple(sorted(group, key=lambda run: run.seed))
    first = runs[0]
    result = None if experiment is None else published.find_result(experiment, first.algorithm, first.supervision)
    return Row(
        runs=runs,
        base=tuple(sorted(bases.get((first.algorithm, first.training), []), key=lambda run: run.seed)),
        settings=_own_settings(first, [group[0] for group in groups]),
        published=result,
        differs="" if experiment is None or result is None else _differs(experiment, runs, m_is_chosen=True),
    )


def _order(row: Row) -> tuple[object, ...]:
    known = _PAPER_ORDER.index(row.algorithm) if row.algorithm in _PAPER_ORDER else len(_PAPER_ORDER)
    first = row.runs[0]
    supervision = SUPERVISIONS.index(row.supervision)
    return known, row.algorithm, str(first.training), supervision, row.given_domains or 0, str(first.joint)


def _kind(row: Row) -> tuple[object, ...]:
    """What rows share that differ in a given M alone."""
    ignored = ("num_domains", "clustering.criterion", "clustering.max_domains")
    return (*row.setup, row.supervision, tuple(pair for pair in row.runs[0].joint if pair[0] not in ignored))


def _given(row: Row, rows: Sequence[Row]) -> set[int | None]:
    return {other.given_domains for other in rows if _kind(other) == _kind(row)} - {None}


def _with_curve(row: Row, experiment: str | None) -> Row:
    """Put what the paper reports for the row's M in the place of its main table."""
    value = published.num_domains_curve().get((row.supervision, row.given_domains or 0))
    if value is None or experiment != published.M_CURVE or row.algorithm != "FedAvg":
        return replace(row, published=None, differs="")
    result = published.Result(row.algorithm, row.supervision, value)
    return replace(row, published=result, differs=_differs(experiment, row.runs, m_is_chosen=False))


def _belongs_to_sweep_alone(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether a row has a given M, and another of its kind, with M chosen by clustering, stands for it."""
    chosen = any(_kind(other) == _kind(row) and other.given_domains is None for other in rows)
    return row.given_domains is not None and chosen


def _own_settings(run: Finished, others: Sequence[Finished]) -> str:
    """Name the settings by which a row differs from others of its experiment, but for M, which has its own column."""
    same_algorithm = [dict(other.training) for other in others if other.algorithm == run.algorithm]
    same_supervision = [dict(other.joint) for other in others if other.supervision == run.supervision]
    everyone = [dict(other.training) for other in others]
    parts = []
    for name, value in run.training:
        rivals = same_algorithm if name.startswith("algorithm") else everyone
        if any(rival.get(name, ...) != value for rival in rivals):
            parts.append(f"{name} {_shown(value)}")
    for name, value in run.joint:
        if name != "num_domains" and any(rival.get(name, value) != value for rival in same_supervision):
            parts.append(f"{name} {_shown(value)}")
    return ", ".join(parts)


def _shown(value: Value) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _differs(experiment: str, runs: Sequence[Finished], m_is_chosen: bool) -> str:
    """Name what differs from the paper, with the paper's value; in its main table M was chosen by the elbow."""
    first = runs[0]
    mine: dict[str, Value] = dict((*first.section, *first.training, *first.joint)) | {"seeds": len(runs)}
    stated = published.stated_settings(experiment, first.algorithm)
    parts = [
        f"{name.removeprefix('data.')} {_shown(mine[name])} (paper {_shown(value)})"
        for name, value in stated.items()
        if name in mine and mine[name] != value
    ]
    parts += [
        f"{name} {_shown(mine[name])} (not in the paper)"
        for name, value in _NOT_IN_PAPER.items()
        if name in mine and mine[name] != value
    ]
    if m_is_chosen and first.given_domains is not None:
        parts.append(f"M {first.given_domains} given (paper by elbow)")
    return ", ".join(parts)
