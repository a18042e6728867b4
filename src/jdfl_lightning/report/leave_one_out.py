"""Leave-one-domain-out: experiments that differ in the unseen domain alone, in one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jdfl_lightning.report.collect import Settings
from jdfl_lightning.report.comparison import COLUMNS, Line, Method, Section
from jdfl_lightning.report.markup import NONE, Column, Table
from jdfl_lightning.report.statistics import Spread, spread
from jdfl_lightning.report.tables import accuracy_cell, method_columns, percent
from jdfl_lightning.storage.names import UNSEEN_PREFIX

_DOMAINS = ("domains", "unseen", "data.unseen")
"""Settings that say which domain is left out."""


@dataclass(frozen=True)
class LeftOutRow:
    """A method's accuracies on the domains that were left out, one after the other."""

    line: Line
    """The method, as in the tables of each experiment."""
    domains: dict[str, Spread]
    """Over seeds, for each domain that was left out."""
    mean: Spread
    """Over seeds, of the mean of all domains; of the seeds that all domains have."""

    @property
    def worst(self) -> float:
        """The lowest of the domains' means."""
        return min(found.mean for found in self.domains.values())


@dataclass(frozen=True)
class LeaveOneOut:
    """Experiments that differ in the unseen domain alone."""

    title: str
    about: str
    picked: str
    """Which round the accuracies are of, in words."""
    domains: list[str]
    rows: list[LeftOutRow]

    def table(self) -> Table:
        """Return the table: accuracy on each domain that was left out, their mean, and the worst."""
        lines = [row.line for row in self.rows]
        columns = method_columns((line.algorithm, line.supervision, line.settings) for line in lines)
        columns.append(Column("seeds", [str(row.mean.count) for row in self.rows]))
        for name in self.domains:
            columns.append(Column(name, [accuracy_cell(row.domains.get(name)) for row in self.rows]))
        whole = [row if len(row.domains) == len(self.domains) else None for row in self.rows]
        columns.append(Column("mean", [accuracy_cell(row and row.mean) for row in whole]))
        columns.append(Column("worst", [NONE if row is None else percent(row.worst) for row in whole]))
        caption = (
            f"Accuracy (%) on a domain that no client has, {self.picked}: a column for each domain that was left out"
        )
        return Table(f"{caption}, mean and standard deviation over seeds; their mean; the lowest.", columns)

    def results(self) -> list[dict[str, Any]]:
        """Return the lines of ``report.csv``: the mean and the worst of the domains that were left out."""
        empty: dict[str, Any] = dict.fromkeys(COLUMNS)
        found = []
        for row in self.rows:
            if len(row.domains) < len(self.domains):
                continue
            names = ("algorithm", "supervision", "num_domains", "settings", "seeds")
            line = empty | {name: getattr(row.line, name) for name in names}
            line |= {"experiment": self.about, "protocol": "unseen each", "table": "leave_one_out"}
            count = float(row.mean.count)
            found.append(line | {"quantity": "unseen_mean", "mean": row.mean.mean, "std": row.mean.std, "count": count})
            found.append(line | {"quantity": "unseen_worst", "mean": row.worst, "count": count})
        return found


def leave_one_out(sections: Sequence[Section]) -> Iterator[LeaveOneOut]:
    """Yield the groups of experiments that leave out a domain each, where there are several."""
    groups: dict[Settings, dict[str, Section]] = {}
    for section in sections:
        if len(section.unseen) == 1:
            rest = tuple(pair for pair in section.settings if pair[0] not in _DOMAINS)
            groups.setdefault(rest, {})[section.unseen[0]] = section
    for rest, by_domain in groups.items():
        if len(by_domain) > 1:
            domains = sorted(by_domain)
            methods: dict[Method, Line] = {}
            for name in domains:
                for line in by_domain[name].rows:
                    methods.setdefault(line.method, line)
            rows = [_row(line, {name: by_domain[name] for name in domains}) for line in methods.values()]
            words = [f"{name.removeprefix('data.')} {value}" for name, value in rest if name != "data"]
            about = ", ".join([str(dict(rest)["data"]), *words, "unseen each"])
            title = str(dict(rest)["data"]).rpartition(".")[2]
            yield LeaveOneOut(title, about, by_domain[domains[0]].protocol.picked, domains, rows)


def _row(line: Line, by_domain: dict[str, Section]) -> LeftOutRow:
    values: dict[str, dict[int, float]] = {}
    for name, section in by_domain.items():
        runs = section.runs.get(line.method)
        if runs is not None:
            values[name] = runs[runs["best"]].set_index("seed")[UNSEEN_PREFIX + name].to_dict()
    shared = sorted(set.intersection(*(set(found) for found in values.values())))
    means = [sum(found[seed] for found in values.values()) / len(values) for seed in shared]
    return LeftOutRow(line, {name: spread(list(found.values())) for name, found in values.items()}, spread(means))
