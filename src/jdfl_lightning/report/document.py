"""A comparison as paragraphs, tables and pictures, in no format yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from jdfl_lightning.report.collect import LeftOut
from jdfl_lightning.report.comparison import Row, Section, method_order
from jdfl_lightning.report.costs import Cost, cost, default_target
from jdfl_lightning.report.statistics import Difference, Spread

NONE = "-"
"""Shown where there is nothing to show."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Column:
    """A column of a table: words, numbers, sentences that may need several lines, or such that many rows share."""

    name: str
    kind: Literal["word", "number", "text", "note"] = "number"


@dataclass(frozen=True)
class Table:
    """A table with a caption."""

    caption: str
    columns: list[Column]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Picture:
    """A picture file with a caption."""

    file: Path
    caption: str
    alt: str
    """What can be seen, for those who cannot see it."""


Block: TypeAlias = str | Table | Picture
"""A paragraph, a table or a picture."""


@dataclass(frozen=True)
class Part:
    """A heading and what is below it."""

    title: str
    blocks: list[Block]


INTRODUCTION = (
    "Accuracy is class-only accuracy (%) on the test images of all domains, in each run's best round; mean and sample "
    "standard deviation over seeds. The best round is chosen on the test images, as in the paper, which flatters every "
    "row. In bold: the highest mean of an algorithm.",
    "A difference to base is taken seed by seed, between runs that share everything but the joint head. Its 95 % "
    "interval is mean ± t s / √n, with s the standard deviation of the n differences and t the 97.5 % quantile of "
    "Student's distribution with n - 1 degrees of freedom. It is called a gain, or a loss, only if the interval lies "
    "on one side of 0, and is undecided if it contains 0. With one seed nothing is judged, nor where all seeds differ "
    "by exactly the same: accuracy is a count, and a few equal ones are chance. Intervals are not corrected for their "
    "number: where nothing differs, one in twenty lies on one side by chance.",
    "Values of the paper are means of three seeds; a question mark says that a value is no count of test images, or "
    "that its row does not add up, so that it may be a misprint.",
)


def percent(value: float, sign: bool = False) -> str:
    """Return a share as per cent with two digits.

    >>> percent(0.6787), percent(-0.00251, sign=True)
    ('67.87', '-0.25')
    """
    return f"{100 * value:{'+' if sign else ''}.2f}"


def spread_text(value: Spread) -> str:
    """Return a mean and, if there are several seeds, its standard deviation; nothing if there is no number."""
    if math.isnan(value.mean):
        return NONE
    return percent(value.mean) if value.std is None else f"{percent(value.mean)} ± {percent(value.std)}"


def difference_text(row: Row) -> str:
    """Return the difference to the baseline with its interval, and over which seeds, if not over all."""
    found = row.difference
    if found is None:
        return NONE
    seeds = "" if list(found.seeds) == row.seeds else f" over seeds {', '.join(map(str, found.seeds))}"
    return f"{percent(found.mean, sign=True)}{_interval(found)}{seeds}"


def _interval(found: Difference) -> str:
    if found.low is None or found.high is None:
        return ""
    return f" [{percent(found.low, sign=True)}, {percent(found.high, sign=True)}]"


def verdict(row: Row) -> str:
    """Return what the seeds say of the difference to the baseline."""
    if row.supervision == "base":
        return NONE
    return row.difference.verdict if row.difference else "no base to compare"


def domains_text(row: Row) -> str:
    """Return M: as given, or all that clustering found."""
    if row.supervision == "base":
        return NONE
    found = ", ".join(map(str, sorted({run.num_domains for run in row.runs})))
    return found if row.given_domains is None else f"{found} given"


def _paper(row: Row) -> str:
    """Return what the paper has for a row, with its gain."""
    if row.published is None:
        return NONE
    gain = "" if row.published.gain is None else f" ({row.published.gain:+.2f})"
    return f"{row.published.overall:.2f}{'?' if row.published.doubts('overall') else ''}{gain}"


def _paper_of_domain(row: Row, domain: str) -> str:
    """Return what the paper has for a domain, in brackets; nothing if it has not."""
    if row.published is None or domain not in row.published.domains:
        return ""
    return f" [{row.published.domains[domain]:.2f}{'?' if row.published.doubts(domain) else ''}]"


def _best(rows: Sequence[Row]) -> set[int]:
    """Return which rows have the highest mean of their algorithm, where there are several."""
    best = set()
    for index, row in enumerate(rows):
        rivals = [other.accuracy.mean for other in rows if other.algorithm == row.algorithm]
        if len(rivals) > 1 and row.accuracy.mean == max(rivals):
            best.add(index)
    return best


def _who(rows: Sequence[Row]) -> tuple[list[Column], list[list[Cell]]]:
    """Return the columns that say what a row is."""
    columns = [Column("algorithm", "word"), Column("supervision", "word"), Column("M")]
    cells = [[Cell(row.algorithm), Cell(row.supervision), Cell(domains_text(row))] for row in rows]
    if any(row.settings for row in rows):
        columns.append(Column("settings", "text"))
        for row, line in zip(rows, cells, strict=True):
            line.append(Cell(row.settings or NONE))
    return columns, cells


def accuracy_table(rows: Sequence[Row], caption: str) -> Table:
    """Return the main table: accuracy, difference to base, verdict, the paper's value and what differs from it."""
    columns, cells = _who(rows)
    columns += [Column("seeds"), Column("accuracy"), Column("difference to base"), Column("verdict", "word")]
    with_paper = any(row.published for row in rows)
    if with_paper:
        columns += [Column("paper (gain)"), Column("differs from the paper", "note")]
    best = _best(rows)
    for index, (row, line) in enumerate(zip(rows, cells, strict=True)):
        line += [Cell(str(len(row.seeds))), Cell(spread_text(row.accuracy), index in best)]
        line += [Cell(difference_text(row)), Cell(verdict(row))]
        if with_paper:
            line += [Cell(_paper(row)), Cell(row.differs or NONE)]
    return Table(caption, columns, cells)


def overview_table(sections: Sequence[Section]) -> Table:
    """Return the accuracy of each method in each experiment, with the difference to base in brackets."""
    methods: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row, place in sorted(
        ((row, place) for place, section in enumerate(sections) for row in section.drawn),
        key=lambda pair: method_order(pair[0]),
    ):
        rivals = [other for other in sections[place].drawn if method_order(other) == method_order(row)]
        settings = row.settings if len(rivals) > 1 else ""
        methods.setdefault((row.algorithm, row.supervision, settings), {})[place] = row
    columns = [Column("algorithm", "word"), Column("supervision", "word")]
    with_settings = any(settings for _, _, settings in methods)
    columns += [Column("settings", "text")] if with_settings else []
    columns += [Column(section.title) for section in sections]
    best = [[section.drawn[index] for index in _best(section.drawn)] for section in sections]
    cells = []
    for (algorithm, supervision, settings), found in methods.items():
        line = [Cell(algorithm), Cell(supervision), *([Cell(settings or NONE)] if with_settings else [])]
        for place in range(len(sections)):
            row_here = found.get(place)
            line.append(Cell(NONE) if row_here is None else Cell(_overview(row_here), row_here in best[place]))
        cells.append(line)
    caption = "Accuracy (%) in the best round, mean over seeds; in brackets the difference to base, seed by seed."
    return Table(f"{caption} Whether the seeds support it, M and settings are in the tables below.", columns, cells)


def _overview(row: Row) -> str:
    difference = "" if row.difference is None else f" ({percent(row.difference.mean, sign=True)})"
    return f"{percent(row.accuracy.mean)}{difference}"


def domain_table(section: Section) -> Table:
    """Return the accuracy of each domain, in the round that is best overall, with the paper's value in brackets."""
    columns, cells = _who(section.rows)
    columns += [Column("overall"), *(Column(name) for name in section.domains)]
    best = _best(section.rows)
    with_paper = any(_paper_of_domain(row, name) for row in section.rows for name in section.domains)
    for index, (row, line) in enumerate(zip(section.rows, cells, strict=True)):
        line.append(Cell(spread_text(row.accuracy), index in best))
        line += [Cell(spread_text(row.domain(name)) + _paper_of_domain(row, name)) for name in section.domains]
    caption = "Accuracy (%) of each domain in the best round" + (", in brackets the paper's." if with_paper else ".")
    return Table(caption, columns, cells)


def row_costs(row: Row, targets: Sequence[float]) -> list[Cost]:
    """Return what a row needed to reach the targets, or, if there are none, the baseline's mean accuracy."""
    default = default_target(row)
    return [cost(row, target) for target in targets or ([] if default is None else [default])]


def cost_table(section: Section, targets: Sequence[float]) -> Table:
    """Return the rounds and megabytes that it took to reach an accuracy."""
    pairs = [(row, found) for row in section.rows for found in row_costs(row, targets)]
    columns, cells = _who([row for row, _ in pairs])
    columns += [Column(name) for name in ("target", "reached by", "rounds", "MB up", "MB down")]
    for (row, found), line in zip(pairs, cells, strict=True):
        line += [Cell(percent(found.target)), Cell(f"{found.reached} of {len(row.runs)} seeds")]
        line.append(Cell(NONE if found.rounds is None else f"{found.rounds.mean:.1f}"))
        line += [Cell(NONE if sent is None else f"{sent.mean / 1e6:,.1f}") for sent in (found.up, found.down)]
    what = "given accuracies" if targets else "the mean best accuracy of the algorithm's base"
    caption = f"Rounds and megabytes, all clients together, to reach {what}: means over the seeds that did."
    return Table(f"{caption} The bytes of discovery are not among them.", columns, cells)


def left_out_part(left_out: Sequence[LeftOut]) -> Part:
    """Return the list of runs that do not count, with reasons."""
    if not left_out:
        return Part("Left out", ["Nothing: every run found is in the tables."])
    rows = [[Cell(str(entry.folder)), Cell(entry.reason)] for entry in left_out]
    columns = [Column("run folder", "text"), Column("why", "text")]
    return Part("Left out", [Table("Runs that are in no table.", columns, rows)])
