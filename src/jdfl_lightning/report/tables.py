"""Results as tables of text, for a terminal too, and as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
from rich.table import Column as Head
from rich.table import Table as ScreenTable
from rich.text import Text

from jdfl_lightning.report.comparison import Line, Section, method_order
from jdfl_lightning.report.markup import NONE, Column, Table, csv_cell, one_line
from jdfl_lightning.report.run import percent, screen_table
from jdfl_lightning.report.statistics import Spread
from jdfl_lightning.supervision import Plain

_FIRST = ("accuracy", "difference to base", "verdict")
"""Columns that come first: where a terminal is narrow, the others follow in a table of their own."""
_TEXT_WIDTH = 36
"""Characters in a line of a column of sentences."""


def accuracy_cell(line: Line | Spread | None) -> str:
    """Return a mean and, if there are several seeds, its standard deviation."""
    if line is None or line.mean is None:
        return NONE
    return percent(line.mean) if line.std is None else f"{percent(line.mean)} ± {percent(line.std)}"


def _difference(row: Line) -> str:
    """Return the difference to the baseline with its interval, and with the seeds if not all are shared."""
    if row.difference is None:
        return NONE
    low, high = row.difference_low, row.difference_high
    interval = "" if low is None else f" [{percent(low, sign=True)}, {percent(high, sign=True)}]"
    seeds = "" if row.difference_seeds == row.seeds else f" over seeds {row.difference_seeds.replace(' ', ', ')}"
    return f"{percent(row.difference, sign=True)}{interval}{seeds}"


def _num_domains(row: Line) -> str:
    """Return M: as given, or all values that clustering found."""
    found = NONE if row.supervision == Plain.short else row.num_domains.replace(" ", ", ")
    return found if row.given_domains is None else f"{found} given"


def _paper(line: Line) -> str:
    """Return the paper's value, with a mark if it may be a misprint, and its gain."""
    doubt = "?" if line.paper_doubtful == "yes" else ""
    return "" if line.paper is None else f"{percent(line.paper)}{doubt}{_in_brackets(line.paper_gain)}"


def _in_brackets(difference: float | None) -> str:
    return "" if difference is None else f" ({percent(difference, sign=True)})"


def _best(rows: Sequence[Line]) -> set[int]:
    """Return which rows have the highest mean of their algorithm, where there are several."""
    means: dict[str, list[float]] = {}
    for row in rows:
        means.setdefault(row.algorithm, []).append(row.mean)
    return {i for i, row in enumerate(rows) if len(of := means[row.algorithm]) > 1 and row.mean == max(of)}


def _who(rows: Sequence[Line]) -> list[Column]:
    """Return the columns that identify a row."""
    algorithm, supervision, *settings = method_columns((row.algorithm, row.supervision, row.settings) for row in rows)
    return [algorithm, supervision, Column("M", [_num_domains(row) for row in rows]), *settings]


def method_columns(methods: Iterable[tuple[str, str, str]]) -> list[Column]:
    """Return the columns of algorithms, supervisions and, if methods differ in any, settings."""
    listed = list(methods)
    algorithms, supervisions, settings = ([method[place] for method in listed] for place in range(3))
    columns = [Column("algorithm", algorithms, "pin"), Column("supervision", supervisions, "pin")]
    return [*columns, Column("settings", [text or NONE for text in settings], "text")] if any(settings) else columns


def accuracy_table(rows: Sequence[Line], caption: str, on_test: Sequence[Line] = ()) -> Table:
    """Return the main table: accuracy, difference to base, verdict, the paper's value and what differs from it.

    Args:
        rows: the lines of accuracies.
        caption: of the table.
        on_test: the lines of accuracies as if the round were picked on the test images, where it is not.
    """
    columns = [
        *_who(rows),
        Column("seeds", [str(len(row.accuracies)) for row in rows]),
        Column("accuracy", [accuracy_cell(row) for row in rows], bold=_best(rows)),
        Column("difference to base", [_difference(row) for row in rows]),
        Column("verdict", [row.verdict or NONE for row in rows], "word"),
    ]
    if on_test:
        columns.append(Column("if picked on test images", [accuracy_cell(line) for line in on_test]))
    if any(row.paper for row in rows):
        columns.append(Column("paper (gain)", [_paper(row) or NONE for row in rows]))
        columns.append(Column("differs from the paper", [row.differs_from_paper or NONE for row in rows], "note"))
    return Table(caption, columns)


def overview_table(sections: Sequence[Section]) -> Table:
    """Return the accuracy of each method in each experiment, with the difference to base in brackets."""
    methods: dict[tuple[str, str, str], dict[int, Line]] = {}
    best = []
    for place, section in enumerate(sections):
        rows = section.drawn
        best += [rows[index] for index in _best(rows)]
        names = [(row.algorithm, row.supervision) for row in rows]
        for row, name in zip(rows, names, strict=True):
            methods.setdefault((*name, row.settings if names.count(name) > 1 else ""), {})[place] = row
    methods = dict(sorted(methods.items(), key=lambda method: method_order(*method[0][:2])))
    columns = method_columns(methods)
    for place, section in enumerate(sections):
        found = [of.get(place) for of in methods.values()]
        cells = [percent(row.mean) + _in_brackets(row.difference) if row else NONE for row in found]
        columns.append(Column(section.title, cells, bold={i for i, row in enumerate(found) if row in best}))
    picked = dict.fromkeys(section.protocol.picked for section in sections)
    which = next(iter(picked)) if len(picked) == 1 else "in the round that each experiment's protocol picks"
    caption = f"Accuracy (%) {which}, mean over seeds; in brackets the difference to base, seed by seed."
    return Table(f"{caption} Whether the seeds support it, M and settings are in the tables below.", columns)


def domain_table(section: Section) -> Table:
    """Return the accuracy of each domain, in the round that is best overall, with the paper's value in brackets."""
    columns = [*_who(section.rows), Column("overall", list(map(accuracy_cell, section.rows)), bold=_best(section.rows))]
    beside = "."
    for name in section.domains:
        lines = section.lines("main", "accuracy", name)
        columns.append(
            Column(name, [accuracy_cell(line) + (f" [{_paper(line)}]" if line.paper else "") for line in lines])
        )
        beside = ", in brackets the paper's." if any(line.paper for line in lines) else beside
    for name in section.unseen:
        lines = section.lines("main", "unseen_accuracy", name)
        columns.append(Column(f"{name} (unseen)", list(map(accuracy_cell, lines))))
    return Table(f"Accuracy (%) of each domain {section.protocol.picked}{beside}", columns)


def cost_table(section: Section, what: str) -> Table:
    """Return the rounds and megabytes needed to reach an accuracy."""
    rounds, up, down = (section.lines("main", quantity) for quantity in ("rounds", "bytes_up", "bytes_down"))
    columns = [
        *_who(rounds),
        Column("target", [percent(line.target) for line in rounds]),
        Column("reached by", [f"{line.count:.0f} of {len(line.accuracies)} seeds" for line in rounds]),
        Column("rounds", [NONE if line.mean is None else f"{line.mean:.1f}" for line in rounds]),
    ]
    for name, lines in (("MB up", up), ("MB down", down)):
        columns.append(Column(name, [NONE if line.mean is None else f"{line.mean / 1e6:,.1f}" for line in lines]))
    caption = f"Rounds and megabytes, all clients together, to reach {what}: means over the seeds that did."
    return Table(f"{caption} The bytes of discovery are not among them.", columns)


def as_csv(results: pd.DataFrame) -> str:
    """Return a table as CSV."""
    cells = [list(map(csv_cell, line)) for line in results.itertuples(index=False)]
    return str(pd.DataFrame(cells, columns=results.columns, dtype=object).to_csv(index=False, lineterminator="\n"))


def on_screen(title: str, table: Table) -> ScreenTable:
    """Return a report's table for a terminal: names in one column, without notes."""
    names = [column for column in table.columns if column.kind == "pin"]
    others = [column for column in table.columns if column.kind in ("number", "word", "text")]
    others.sort(key=lambda column: (*_FIRST, column.name).index(column.name))  # otherwise as they are
    heads = [Head(_text(" ".join(column.name for column in names)))]
    for column in others:
        text = column.kind == "text"
        heads.append(
            Head(_text(column.name), justify="left" if text else "right", max_width=_TEXT_WIDTH if text else None)
        )
    rows = []
    for place in range(len(table.rows)):
        method = " ".join(column.cells[place] for column in names)
        rows.append([_text(method), *(_text(column.cells[place], place in column.bold) for column in others)])
    return screen_table(_text(title), heads, rows, _text(table.caption))


def _text(text: str, bold: bool = False) -> Text:
    """Return a text of a run folder as it stands: no markup, no control characters."""
    return Text(one_line(text), style="bold" if bold else "")
