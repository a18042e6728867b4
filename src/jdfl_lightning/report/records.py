"""A comparison as one flat table of numbers, a line for each quantity."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jdfl_lightning.report.comparison import Row, Section
from jdfl_lightning.report.document import row_costs, verdict
from jdfl_lightning.report.markup import csv_cell
from jdfl_lightning.report.statistics import Spread

COLUMNS = (
    "experiment",
    "table",
    "algorithm",
    "supervision",
    "num_domains",
    "settings",
    "seeds",
    "quantity",
    "domain",
    "target",
    "mean",
    "std",
    "count",
    "difference",
    "difference_low",
    "difference_high",
    "difference_seeds",
    "verdict",
    "paper",
    "paper_gain",
    "paper_doubtful",
    "differs_from_paper",
)
"""Accuracies are shares, the paper's too; a quantity is accuracy, rounds, bytes_up or bytes_down."""

Record = dict[str, str | float | None]


@dataclass(frozen=True)
class _Line:
    """One quantity of a row, with what stands beside it."""

    quantity: str
    value: Spread
    domain: str | None = None
    target: float | None = None
    paper: float | None = None
    doubtful: bool = False


def records(sections: Sequence[Section], targets: Sequence[float]) -> list[Record]:
    """Return all numbers of a comparison, a record for each quantity of each row.

    Args:
        sections: the experiments.
        targets: accuracies to reach; the baseline's mean if there are none.
    """
    found = []
    for section in sections:
        for row in section.rows:
            found += [_record(section, "main", row, line) for line in _lines(section, row, targets)]
        for row in section.sweep:
            found += [_record(section, "num_domains", row, line) for line in _overall(row)]
    return found


def _share(percent: float) -> float:
    """Return a printed percentage, of two digits, as a share."""
    return round(percent / 100, 4)


def _overall(row: Row) -> list[_Line]:
    printed = row.published
    if printed is None:
        return [_Line("accuracy", row.accuracy)]
    return [_Line("accuracy", row.accuracy, paper=_share(printed.overall), doubtful=printed.doubts("overall"))]


def _lines(section: Section, row: Row, targets: Sequence[float]) -> list[_Line]:
    lines = _overall(row)
    for name in section.domains:
        if row.published is None or name not in row.published.domains:
            lines.append(_Line("accuracy", row.domain(name), name))
        else:
            paper, doubtful = _share(row.published.domains[name]), row.published.doubts(name)
            lines.append(_Line("accuracy", row.domain(name), name, paper=paper, doubtful=doubtful))
    for cost in row_costs(row, targets):
        for quantity, value in (("rounds", cost.rounds), ("bytes_up", cost.up), ("bytes_down", cost.down)):
            if value is not None:
                lines.append(_Line(quantity, value, target=cost.target))
    return lines


def _record(section: Section, table: str, row: Row, line: _Line) -> Record:
    overall = line.quantity == "accuracy" and line.domain is None
    difference = row.difference if overall else None
    gain = row.published.gain if overall and row.published else None
    return {
        "experiment": section.about,
        "table": table,
        "algorithm": row.algorithm,
        "supervision": row.supervision,
        "num_domains": " ".join(map(str, sorted({run.num_domains for run in row.runs}))),
        "settings": row.settings,
        "seeds": " ".join(map(str, row.seeds)),
        "quantity": line.quantity,
        "domain": line.domain,
        "target": line.target,
        "mean": None if math.isnan(line.value.mean) else line.value.mean,
        "std": line.value.std,
        "count": float(line.value.count),
        "difference": difference.mean if difference else None,
        "difference_low": difference.low if difference else None,
        "difference_high": difference.high if difference else None,
        "difference_seeds": " ".join(map(str, difference.seeds)) if difference else None,
        "verdict": verdict(row) if overall and row.supervision != "base" else None,
        "paper": line.paper,
        "paper_gain": None if gain is None else _share(gain),
        "paper_doubtful": None if line.paper is None else "yes" if line.doubtful else "no",
        "differs_from_paper": None if line.paper is None else row.differs,
    }


def as_csv(found: Sequence[Record]) -> str:
    """Return records as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in record.items()} for record in found)
    return out.getvalue()
