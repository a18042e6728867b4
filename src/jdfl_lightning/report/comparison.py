"""The table of runs -> experiments, rows of tables, differences to the baseline, and what the paper reports of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import pandas as pd

from jdfl_lightning.joint.targets import default_alpha
from jdfl_lightning.report import published
from jdfl_lightning.report.collect import METHOD, PACKAGE, SUPERVISIONS, Settings, Value
from jdfl_lightning.report.published.differences import differences, shown
from jdfl_lightning.report.statistics import Difference, Spread, paired_difference, spread
from jdfl_lightning.storage.folder import DOMAIN_PREFIX

Method: TypeAlias = tuple[str, Settings, str, Settings]
"""Algorithm, training, supervision, joint: `METHOD` of the table of runs."""
_PAPER_ORDER = ("FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON")
_ROUNDING = 1e-9  # a mean of equal accuracies may be larger than each of them


@dataclass(frozen=True)
class Cost:
    """What the seeds of a row needed to reach an accuracy; means are over those that did."""

    target: float
    reached: int
    rounds: Spread | None
    up: Spread | None
    """Bytes sent by clients; none if no seed got there, or if the runs did not count them."""
    down: Spread | None
    """Bytes sent to clients."""


@dataclass(frozen=True, eq=False)
class Row:
    """Runs that differ in the seed alone."""

    algorithm: str
    training: Settings
    supervision: str
    joint: Settings
    rounds: pd.DataFrame
    """Their lines of the table of runs, in the order of seeds."""
    base: pd.DataFrame
    """The best rounds of the same algorithm and settings without a joint head; empty if there are none."""
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
    def given_domains(self) -> int | None:
        """M, if it was set."""
        given = dict(self.joint).get("num_domains")
        return None if given is None else int(given)

    @property
    def name(self) -> str:
        """Algorithm, supervision, M if it was set, and settings."""
        given = "" if self.given_domains is None else f"M = {self.given_domains}"
        return " ".join(filter(None, (self.algorithm, self.supervision, given, self.settings)))

    @property
    def runs(self) -> pd.DataFrame:
        """The best round of each run, in the order of seeds."""
        return self.rounds[self.rounds["best"]]

    @property
    def seeds(self) -> list[int]:
        """The seeds, in order."""
        return list(self.runs["seed"])

    @property
    def num_domains(self) -> list[int]:
        """Each M that was set or found, in order."""
        return sorted(set(self.runs["num_domains"]))

    @property
    def accuracy(self) -> Spread:
        """Accuracy of the best round over the seeds."""
        return spread(list(self.runs["test/acc"]))

    @property
    def difference(self) -> Difference | None:
        """Accuracy minus the baseline's over the seeds that both have; nothing for the baseline."""
        if self.supervision == "base":
            return None
        values, base = (runs.set_index("seed")["test/acc"].to_dict() for runs in (self.runs, self.base))
        return paired_difference(values, base)

    @property
    def verdict(self) -> str | None:
        """What the seeds say of the difference to the baseline; nothing for the baseline."""
        if self.supervision == "base":
            return None
        return self.difference.verdict if self.difference else "no base to compare"

    @property
    def setup(self) -> tuple[str, Settings]:
        """What a row has in common with its baseline."""
        return self.algorithm, self.training

    @property
    def kind(self) -> tuple[object, ...]:
        """What rows share that differ in a given M alone."""
        ignored = ("num_domains", "clustering.criterion", "clustering.max_domains")
        return (*self.setup, self.supervision, tuple(pair for pair in self.joint if pair[0] not in ignored))

    def domain(self, name: str) -> Spread:
        """Return a domain's accuracy in the round that is best overall, over the seeds."""
        return spread(list(self.runs[DOMAIN_PREFIX + name]))

    def paper(self, domain: str | None = None) -> tuple[float, bool] | None:
        """Return what the paper prints, overall or for a domain, and whether it may be a misprint."""
        found = self.published
        if found is None or (domain is not None and domain not in found.domains):
            return None
        return (
            (found.overall, found.doubts("overall"))
            if domain is None
            else (found.domains[domain], found.doubts(domain))
        )

    def curve(self) -> pd.DataFrame:
        """Return mean and deviation (0 for one seed) of the accuracy over the rounds that every seed evaluated."""
        found = self.rounds.groupby("round")["test/acc"].agg(["mean", "std", "count"])
        return found[found["count"] == len(self.seeds)].fillna(0.0)

    def cost(self, target: float) -> Cost:
        """Return what it took to reach an accuracy."""
        reached = self.rounds[self.rounds["test/acc"] >= target - _ROUNDING].drop_duplicates("seed")
        found = [spread(list(reached[name])) if len(reached) else None for name in ("round", "bytes/up", "bytes/down")]
        return Cost(target, len(reached), *(None if s is None or math.isnan(s.mean) else s for s in found))

    def costs(self, targets: Sequence[float]) -> list[Cost]:
        """Return what it took to reach accuracies; if none is given, the mean of the baseline's best ones."""
        default = [spread(list(self.base["test/acc"])).mean] if len(self.base) else []
        return [self.cost(target) for target in targets or default]


@dataclass(frozen=True)
class Section:
    """An experiment: data set, clients, local epochs, share of clients."""

    settings: Settings
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


def compare(table: pd.DataFrame) -> list[Section]:
    """Sort the table of runs into experiments and rows."""
    found = [_section(settings, lines) for settings, lines in table.groupby("section", sort=False)]
    order = [*published.TITLES, None]
    found.sort(key=lambda section: (order.index(section.experiment), section.about))
    titles = [
        _differing(section.settings, [other.settings for other in found if other.title == section.title])
        for section in found
    ]
    return [
        replace(section, title=", ".join(filter(None, (section.title, told_apart))))
        for section, told_apart in zip(found, titles, strict=True)
    ]


def _section(settings: Settings, lines: pd.DataFrame) -> Section:
    known = dict(settings)
    domains, data = json.loads(str(known["domains"])), str(known["data"])
    experiment = published.find_experiment(data, *map(known.get, ("data.num_clients", "epochs", "client_fraction")))
    lines = lines.sort_values("seed", kind="stable")
    methods = dict(iter(lines.groupby(METHOD, sort=False)))
    rows = sorted((_row(method, methods, experiment) for method in methods), key=_order)
    given = {row.kind: {other.given_domains for other in rows if other.kind == row.kind} for row in rows}
    about = [f"{name.removeprefix('data.')} {value}" for name, value in settings if name not in ("data", "domains")]
    return Section(
        settings=settings,
        title=data.rpartition(".")[2] if experiment is None else published.TITLES[experiment],
        about=", ".join([data, *about, f"domains {' / '.join(domains)}"]),
        domains=domains,
        experiment=experiment,
        # a row whose M was chosen by clustering stands for those of its kind with a given M
        rows=[row for row in rows if row.given_domains is None or None not in given[row.kind]],
        sweep=[
            _with_curve(row, experiment)
            for row in rows
            if row.given_domains is not None and len(given[row.kind] - {None}) > 1
        ],
    )


def _row(method: Method, methods: dict[Method, pd.DataFrame], experiment: str | None) -> Row:
    """Return the row of a method beside all methods of its experiment."""
    algorithm, training, supervision, joint = method
    rounds = methods[method]
    base = methods.get((algorithm, training, "base", ()), rounds.iloc[:0])
    own = not str(dict(training)["algorithm"]).startswith(PACKAGE)  # the paper's is another class of that name
    experiment = None if own else experiment
    of_algorithm = [(name, value) for name, value in training if name.startswith("algorithm")]
    rivals = [other for name, other, _, _ in methods if name == algorithm]
    settings = [_differing(of_algorithm, rivals)]
    settings.append(_differing([pair for pair in training if pair not in of_algorithm], [key[1] for key in methods]))
    rivals = [(*joint, *other) for _, _, name, other in methods if name == supervision]  # absent is not different
    row = Row(
        *method,
        rounds=rounds,
        base=base[base["best"]],
        training_settings=", ".join(filter(None, settings)),
        joint_settings=_differing([pair for pair in joint if pair[0] != "num_domains"], rivals),
        published=None if experiment is None else published.find_result(experiment, algorithm, supervision),
        differs="",
    )
    return row if experiment is None or row.published is None else replace(row, differs=_differs(row, experiment))


def _differing(settings: Iterable[tuple[str, Value]], rivals: Sequence[Settings]) -> str:
    """Name the settings that not all have, or have otherwise."""
    return ", ".join(
        f"{name.removeprefix('data.')} {shown(value)}"
        for name, value in settings
        if any(dict(rival).get(name, ...) != value for rival in rivals)
    )


def method_order(row: Row) -> tuple[int, str, int]:
    """Return what methods are sorted by: the paper's order of algorithms, then of supervisions."""
    known = _PAPER_ORDER.index(row.algorithm) if row.algorithm in _PAPER_ORDER else len(_PAPER_ORDER)
    return known, row.algorithm, SUPERVISIONS.index(row.supervision)


def _order(row: Row) -> tuple[object, ...]:
    known, algorithm, supervision = method_order(row)
    return known, algorithm, str(row.training), supervision, row.given_domains or 0, str(row.joint)


def _with_curve(row: Row, experiment: str | None) -> Row:
    """Put what the paper reports for the row's M in the place of its main table."""
    value = published.num_domains_curve().get((row.supervision, row.given_domains or 0))
    if value is None or row.published is None or experiment != published.M_CURVE or row.algorithm != "FedAvg":
        return replace(row, published=None, differs="")
    result = published.Result(row.algorithm, row.supervision, value)
    return replace(row, published=result, differs=_differs(row, experiment, m_is_chosen=False))


def _differs(row: Row, experiment: str, m_is_chosen: bool = True) -> str:
    """Name what differs from the paper, with the paper's value; in its main table M was chosen by the elbow."""
    section = row.rounds["section"].iloc[0]
    mine: dict[str, Value] = dict((*section, *row.training, *row.joint)) | {"seeds": len(row.seeds)}
    parts = differences(experiment, row.algorithm, mine, set(map(default_alpha, row.num_domains)))
    if m_is_chosen and row.given_domains is not None:
        parts.append(f"M {row.given_domains} given (paper by elbow)")
    return ", ".join(parts)
