"""Finished runs -> experiments, rows of tables, differences to the baseline, and what the paper reports for them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jdfl_lightning.joint.targets import default_alpha
from jdfl_lightning.report import published
from jdfl_lightning.report.collect import PACKAGE, SUPERVISIONS, Finished, Settings, Value
from jdfl_lightning.report.published.differences import differences, shown
from jdfl_lightning.report.statistics import Difference, Spread, paired_difference, spread
from jdfl_lightning.storage.folder import DOMAIN_PREFIX

_PAPER_ORDER = ("FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON")


@dataclass(frozen=True)
class Row:
    """Runs that differ in the seed alone."""

    runs: tuple[Finished, ...]
    """In the order of their seeds."""
    base: tuple[Finished, ...]
    """Runs of the same algorithm and settings without a joint head; empty if there are none."""
    training_settings: str
    """The settings, other than the joint head's, that tell this row from others of the experiment."""
    joint_settings: str
    """Those of the joint head, but for M."""
    published: published.Result | None
    """What the paper reports where data set, clients, epochs and share of clients are the same."""
    differs: str
    """What else is not as in the paper."""

    @property
    def settings(self) -> str:
        """The settings that tell this row from others of the experiment."""
        return ", ".join(filter(None, (self.training_settings, self.joint_settings)))

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

    @property
    def kind(self) -> tuple[object, ...]:
        """What rows share that differ in a given M alone."""
        ignored = ("num_domains", "clustering.criterion", "clustering.max_domains")
        return (*self.setup, self.supervision, tuple(pair for pair in self.runs[0].joint if pair[0] not in ignored))

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

    @property
    def drawn(self) -> list[Row]:
        """The main table's rows, but of those that differ in a given M alone one: `_typical`."""
        return [row for row in self.rows if row.given_domains in (None, self._typical(row))]

    def _typical(self, row: Row) -> int | None:
        """Return the given M that stands for a row's kind: the number of true domains, or else the median one."""
        numbers = sorted(other.given_domains or 0 for other in self.rows if other.kind == row.kind)
        return len(self.domains) if len(self.domains) in numbers else numbers[(len(numbers) - 1) // 2]


def compare(runs: Iterable[Finished]) -> list[Section]:
    """Sort finished runs into experiments and rows."""
    sections: dict[Settings, dict[tuple[object, ...], list[Finished]]] = {}
    for run in runs:
        sections.setdefault(run.section, {}).setdefault(run.key, []).append(run)
    found = [_section(dict(key), list(groups.values())) for key, groups in sections.items()]
    order = [*published.TITLES, None]
    return _told_apart(sorted(found, key=lambda section: (order.index(section.experiment), section.about)))


def _told_apart(sections: Sequence[Section]) -> list[Section]:
    """Add to titles that occur several times what the experiments differ in."""
    found = []
    for section in sections:
        rivals = [dict(other.rows[0].runs[0].section) for other in sections if other.title == section.title]
        own = dict(section.rows[0].runs[0].section)
        parts = [
            f"{name.removeprefix('data.')} {shown(value)}"
            for name, value in own.items()
            if any(rival.get(name, ...) != value for rival in rivals)
        ]
        found.append(replace(section, title=", ".join([section.title, *parts])))
    return found


def _section(settings: dict[str, Value], groups: Sequence[list[Finished]]) -> Section:
    domains = json.loads(str(settings["domains"]))
    data = str(settings["data"])
    experiment = published.find_experiment(data, *map(settings.get, ("data.num_clients", "epochs", "client_fraction")))
    bases = {(group[0].algorithm, group[0].training): group for group in groups if group[0].supervision == "base"}
    rows = sorted((_row(group, groups, bases, experiment) for group in groups), key=_order)
    shown = [f"{name} {value}" for name, value in settings.items() if name not in ("data", "domains")]
    return Section(
        title=data.rpartition(".")[2] if experiment is None else published.TITLES[experiment],
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
    own = not str(dict(first.training)["algorithm"]).startswith(PACKAGE)  # the paper's is another class of that name
    known = None if own else experiment
    result = None if known is None else published.find_result(known, first.algorithm, first.supervision)
    rivals = [group[0] for group in groups]
    return Row(
        runs=runs,
        base=tuple(sorted(bases.get((first.algorithm, first.training), []), key=lambda run: run.seed)),
        training_settings=_training_settings(first, rivals),
        joint_settings=_joint_settings(first, rivals),
        published=result,
        differs="" if known is None or result is None else _differs(known, runs, m_is_chosen=True),
    )


def method_order(row: Row) -> tuple[int, str, int]:
    """Return what methods are sorted by: the paper's order of algorithms, then of supervisions."""
    known = _PAPER_ORDER.index(row.algorithm) if row.algorithm in _PAPER_ORDER else len(_PAPER_ORDER)
    return known, row.algorithm, SUPERVISIONS.index(row.supervision)


def _order(row: Row) -> tuple[object, ...]:
    known, algorithm, supervision = method_order(row)
    first = row.runs[0]
    return known, algorithm, str(first.training), supervision, row.given_domains or 0, str(first.joint)


def _given(row: Row, rows: Sequence[Row]) -> set[int | None]:
    return {other.given_domains for other in rows if other.kind == row.kind} - {None}


def _with_curve(row: Row, experiment: str | None) -> Row:
    """Put what the paper reports for the row's M in the place of its main table."""
    value = published.num_domains_curve().get((row.supervision, row.given_domains or 0))
    if value is None or row.published is None or experiment != published.M_CURVE or row.algorithm != "FedAvg":
        return replace(row, published=None, differs="")
    result = published.Result(row.algorithm, row.supervision, value)
    return replace(row, published=result, differs=_differs(experiment, row.runs, m_is_chosen=False))


def _belongs_to_sweep_alone(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether a row has a given M, and another of its kind, with M chosen by clustering, stands for it."""
    chosen = any(other.kind == row.kind and other.given_domains is None for other in rows)
    return row.given_domains is not None and chosen


def _training_settings(run: Finished, others: Sequence[Finished]) -> str:
    """Name the settings by which a row, and its baseline, differ from others of the experiment."""
    same_algorithm = [dict(other.training) for other in others if other.algorithm == run.algorithm]
    everyone = [dict(other.training) for other in others]
    parts = []
    for name, value in run.training:
        rivals = same_algorithm if name.startswith("algorithm") else everyone
        if any(rival.get(name, ...) != value for rival in rivals):
            parts.append(f"{name} {shown(value)}")
    return ", ".join(parts)


def _joint_settings(run: Finished, others: Sequence[Finished]) -> str:
    """Name the settings of the joint head by which a row differs from others, but for M, which has its own column."""
    rivals = [dict(other.joint) for other in others if other.supervision == run.supervision]
    return ", ".join(
        f"{name} {shown(value)}"
        for name, value in run.joint
        if name != "num_domains" and any(rival.get(name, value) != value for rival in rivals)
    )


def _differs(experiment: str, runs: Sequence[Finished], m_is_chosen: bool) -> str:
    """Name what differs from the paper, with the paper's value; in its main table M was chosen by the elbow."""
    first = runs[0]
    mine: dict[str, Value] = dict((*first.section, *first.training, *first.joint)) | {"seeds": len(runs)}
    parts = differences(experiment, first.algorithm, mine, {default_alpha(run.num_domains) for run in runs})
    if m_is_chosen and first.given_domains is not None:
        parts.append(f"M {first.given_domains} given (paper by elbow)")
    return ", ".join(parts)
