"""A comparison as tables of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jdfl_lightning.report.collect import LeftOut
from jdfl_lightning.report.comparison import Row, Section, method_order
from jdfl_lightning.report.markup import NONE, Column, Table
from jdfl_lightning.report.statistics import Spread


def percent(value: float, sign: bool = False) -> str:
    """Return a share as per cent with two digits.

    >>> percent(0.6787), percent(-0.00251, sign=True)
    ('67.87', '-0.25')
    """
    return f"{100 * value:{'+' if sign else ''}.2f}"


def _spread(value: Spread) -> str:
    """Return a mean and, if there are several seeds, its standard deviation; nothing if there is no number."""
    if math.isnan(value.mean):
        return NONE
    return percent(value.mean) if value.std is None else f"{percent(value.mean)} ± {percent(value.std)}"


def _difference(row: Row) -> str:
    """Return the difference to the baseline with its interval, and over which seeds, if not over all."""
    found = row.difference
    if found is None:
        return NONE
    seeds = "" if list(found.seeds) == row.seeds else f" over seeds {', '.join(map(str, found.seeds))}"
    if found.low is None or found.high is None:
        return f"{percent(found.mean, sign=True)}{seeds}"
    interval = f"[{percent(found.low, sign=True)}, {percent(found.high, sign=True)}]"
    return f"{percent(found.mean, sign=True)} {interval}{seeds}"


def _num_domains(row: Row) -> str:
    """Return M: as given, or all that clustering found."""
    if row.supervision == "base":
        return NONE
    return ", ".join(map(str, row.num_domains)) + ("" if row.given_domains is None else " given")


def _paper(row: Row, domain: str | None = None) -> str:
    """Return what the paper has for a row, or for a domain of it, with a mark if it may be a misprint."""
    found = row.paper(domain)
    return "" if found is None else f"{found[0]:.2f}{'?' if found[1] else ''}"


def _paper_gain(row: Row) -> str:
    gain = "" if row.published is None or row.published.gain is None else f" ({row.published.gain:+.2f})"
    return f"{_paper(row)}{gain}" or NONE


def _best(rows: Sequence[Row]) -> set[int]:
    """Return which rows have the highest mean of their algorithm, where there are several."""
    means: dict[str, list[float]] = {}
    for row in rows:
        means.setdefault(row.algorithm, []).append(row.accuracy.mean)
    best = {algorithm: max(found) for algorithm, found in means.items() if len(found) > 1}
    return {index for index, row in enumerate(rows) if row.accuracy.mean == best.get(row.algorithm)}


def _who(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that say what a row is."""
    return [
        Column("algorithm", [row.algorithm for row in rows], "pin"),
        Column("supervision", [row.supervision for row in rows], "pin"),
        Column("M", [_num_domains(row) for row in rows]),
        *_settings([row.settings for row in rows]),
    ]


def _settings(settings: Sequence[str]) -> list[Column]:
    """Return the column of settings, if rows differ in any."""
    return [Column("settings", [text or NONE for text in settings], "text")] if any(settings) else []


def accuracy_table(rows: Sequence[Row], caption: str) -> Table:
    """Return the main table: accuracy, difference to base, verdict, the paper's value and what differs from it."""
    columns = [
        *_who(rows),
        Column("seeds", [str(len(row.seeds)) for row in rows]),
        Column("accuracy", [_spread(row.accuracy) for row in rows], bold=_best(rows)),
        Column("difference to base", [_difference(row) for row in rows]),
        Column("verdict", [row.verdict or NONE for row in rows], "word"),
    ]
    if any(row.published for row in rows):
        columns.append(Column("paper (gain)", [_paper_gain(row) for row in rows]))
        columns.append(Column("differs from the paper", [row.differs or NONE for row in rows], "note"))
    return Table(caption, columns)


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
    algorithms, supervisions, settings_of = zip(*methods, strict=True)
    columns = [Column("algorithm", [*algorithms], "pin"), Column("supervision", [*supervisions], "pin")]
    columns += _settings(settings_of)
    for place, section in enumerate(sections):
        rows = [found.get(place) for found in methods.values()]
        best = [section.drawn[index] for index in _best(section.drawn)]
        bold = {index for index, row in enumerate(rows) if row in best}
        columns.append(Column(section.title, [NONE if row is None else _overview(row) for row in rows], bold=bold))
    caption = "Accuracy (%) in the best round, mean over seeds; in brackets the difference to base, seed by seed."
    return Table(f"{caption} Whether the seeds support it, M and settings are in the tables below.", columns)


def _overview(row: Row) -> str:
    difference = "" if row.difference is None else f" ({percent(row.difference.mean, sign=True)})"
    return f"{percent(row.accuracy.mean)}{difference}"


def domain_table(section: Section) -> Table:
    """Return the accuracy of each domain, in the round that is best overall, with the paper's value in brackets."""
    rows = section.rows
    columns = [*_who(rows), Column("overall", [_spread(row.accuracy) for row in rows], bold=_best(rows))]
    with_paper = False
    for name in section.domains:
        printed = [_paper(row, name) for row in rows]
        with_paper |= any(printed)
        cells = [
            _spread(r.domain(name)) + (f" [{paper}]" if paper else "") for r, paper in zip(rows, printed, strict=True)
        ]
        columns.append(Column(name, cells))
    caption = "Accuracy (%) of each domain in the best round" + (", in brackets the paper's." if with_paper else ".")
    return Table(caption, columns)


def cost_table(section: Section, targets: Sequence[float]) -> Table:
    """Return the rounds and megabytes that it took to reach an accuracy."""
    pairs = [(row, cost) for row in section.rows for cost in row.costs(targets)]
    costs = [cost for _, cost in pairs]
    what = "given accuracies" if targets else "the mean best accuracy of the algorithm's base"
    caption = f"Rounds and megabytes, all clients together, to reach {what}: means over the seeds that did."
    return Table(
        f"{caption} The bytes of discovery are not among them.",
        [
            *_who([row for row, _ in pairs]),
            Column("target", [percent(cost.target) for cost in costs]),
            Column("reached by", [f"{cost.reached} of {len(row.seeds)} seeds" for row, cost in pairs]),
            Column("rounds", [NONE if cost.rounds is None else f"{cost.rounds.mean:.1f}" for cost in costs]),
            Column("MB up", [_megabytes(cost.up) for cost in costs]),
            Column("MB down", [_megabytes(cost.down) for cost in costs]),
        ],
    )


def _megabytes(sent: Spread | None) -> str:
    return NONE if sent is None else f"{sent.mean / 1e6:,.1f}"


def left_out_table(left_out: Sequence[LeftOut]) -> Table:
    """Return the runs that do not count, with reasons."""
    folders, reasons = [str(entry.folder) for entry in left_out], [entry.reason for entry in left_out]
    return Table("Runs that are in no table.", [Column("run folder", folders, "text"), Column("why", reasons, "text")])
