"""A comparison as one flat table of numbers, a line for each quantity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import pandas as pd

from jdfl_lightning.report.comparison import Row, Section
from jdfl_lightning.report.markup import csv_cell
from jdfl_lightning.report.statistics import Spread

COLUMNS = (
    *("experiment", "table", "algorithm", "supervision", "num_domains", "settings", "seeds", "quantity", "domain"),
    *("target", "mean", "std", "count", "difference", "difference_low", "difference_high", "difference_seeds"),
    *("verdict", "paper", "paper_gain", "paper_doubtful", "differs_from_paper"),
)
"""Accuracies are shares, the paper's too; a quantity is accuracy, rounds, bytes_up or bytes_down."""

Record: TypeAlias = dict[str, str | float | None]


def records(sections: Sequence[Section], targets: Sequence[float]) -> list[Record]:
    """Return all numbers of a comparison, a record for each quantity of each row.

    Args:
        sections: the experiments.
        targets: accuracies to reach; the baseline's mean if there are none.
    """
    found: list[Record] = []
    for section in sections:
        for table, rows in (("main", section.rows), ("num_domains", section.sweep)):
            for row in rows:
                about = {"experiment": section.about, "table": table, **_about(row)}
                lines = [_overall(row), *(_measured(section, row, targets) if table == "main" else ())]
                found += [dict.fromkeys(COLUMNS) | about | line for line in lines]
    return found


def _about(row: Row) -> Record:
    return {
        "algorithm": row.algorithm,
        "supervision": row.supervision,
        "num_domains": " ".join(map(str, row.num_domains)),
        "settings": row.settings,
        "seeds": " ".join(map(str, row.seeds)),
    }


def _overall(row: Row) -> Record:
    """Return the accuracy, with the difference to the baseline and the paper's gain."""
    line = _accuracy(row, row.accuracy) | {"verdict": row.verdict}
    if (found := row.difference) is not None:
        line |= {"difference": found.mean, "difference_low": found.low, "difference_high": found.high}
        line |= {"difference_seeds": " ".join(map(str, found.seeds))}
    if row.published is not None and row.published.gain is not None:
        line |= {"paper_gain": _share(row.published.gain)}
    return line


def _measured(section: Section, row: Row, targets: Sequence[float]) -> Iterator[Record]:
    """Yield each domain's accuracy, and what it took to reach the targets."""
    for name in section.domains:
        yield _accuracy(row, row.domain(name), name)
    for cost in row.costs(targets):
        for quantity, value in (("rounds", cost.rounds), ("bytes_up", cost.up), ("bytes_down", cost.down)):
            if value is not None:
                yield _quantity(quantity, value) | {"target": cost.target}


def _accuracy(row: Row, value: Spread, domain: str | None = None) -> Record:
    line = _quantity("accuracy", value) | {"domain": domain}
    if (printed := row.paper(domain)) is not None:
        line |= {"paper": _share(printed[0]), "paper_doubtful": "yes" if printed[1] else "no"}
        line |= {"differs_from_paper": row.differs}
    return line


def _quantity(name: str, value: Spread) -> Record:
    mean = None if math.isnan(value.mean) else value.mean
    return {"quantity": name, "mean": mean, "std": value.std, "count": float(value.count)}


def _share(percent: float) -> float:
    """Return a printed percentage, of two digits, as a share."""
    return round(percent / 100, 4)


def as_csv(found: Iterable[Record]) -> str:
    """Return records as CSV."""
    cells = [{name: csv_cell(value) for name, value in record.items()} for record in found]
    text: str = pd.DataFrame(cells, dtype=object).to_csv(index=False, lineterminator="\n")
    return text
