"""A report's comparison as tables for a terminal."""

from __future__ import annotations

from rich.table import Column, Table
from rich.text import Text

from jdfl_lightning.report import markup
from jdfl_lightning.report.write import Report

_FIRST = ("accuracy", "difference to base", "verdict")
"""Columns that come first: where a terminal is narrow, the others follow in a table of their own."""
_TEXT_WIDTH = 36
"""Characters in a line of a column of sentences."""


def comparison_tables(report: Report) -> list[Table]:
    """Return the accuracies of each experiment of a report, with the differences to base and what they say."""
    return [_on_screen(title, table) for title, table in report.comparison]


def _on_screen(title: str, table: markup.Table) -> Table:
    """Return a report's table for a terminal: names in one column, without notes."""
    names = [column for column in table.columns if column.kind == "pin"]
    others = [column for column in table.columns if column.kind in ("number", "word", "text")]
    others.sort(key=lambda column: (*_FIRST, column.name).index(column.name))  # otherwise as they are
    methods = [" ".join(cells) for cells in zip(*(column.cells for column in names), strict=True)]
    heads = [Column(_text(" ".join(column.name for column in names)))]
    for column in others:
        text = column.kind == "text"
        heads.append(
            Column(_text(column.name), justify="left" if text else "right", max_width=_TEXT_WIDTH if text else None)
        )
    found = Table(
        *heads, title=_text(title), caption=_text(table.caption), title_justify="left", caption_justify="left"
    )
    for place, method in enumerate(methods):
        cells = [_text(column.cells[place], bold=place in column.bold) for column in others]
        found.add_row(_text(method), *cells)
    return found


def _text(text: str, bold: bool = False) -> Text:
    """Return a text of a run folder as it stands: no markup, no control characters."""
    return Text(markup.one_line(text), style="bold" if bold else "")
