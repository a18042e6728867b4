"""Tables on a screen or in a log: turned, or in parts, where they would be too wide."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Column, Table

_UNLIMITED = 100_000
"""A width that no table reaches."""
_READABLE = 12
"""Width below which a table is not turned: every column needs a few characters."""


def table_width(table: Table) -> int:
    """Return the width of a table in which no cell is broken into lines."""
    console = Console(width=_UNLIMITED, file=io.StringIO(), color_system=None, force_jupyter=False)
    return console.measure(table).maximum


def turned(table: Table) -> Table:
    """Return a table with rows and columns exchanged; what stands in its first column heads the new ones.

    >>> table = Table("", "round", "overall")
    >>> table.add_row("best", "3", "71.20")
    >>> table.add_row("last", "4", "70.00")
    >>> [line.split() for line in as_text(turned(table)).splitlines()]
    [['best', 'last'], ['round', '3', '4'], ['overall', '71.20', '70.00']]
    """
    names, *values = table.columns
    heads = [Column(names.header), *(Column(cell, justify="right") for cell in names.cells)]
    rows = [[column.header, *column.cells] for column in values]
    return _like(table, heads, rows)


def fitted(table: Table, width: int) -> list[Table]:
    """Return a table as it can be read in a width: as it is, turned, or in parts that repeat the first column.

    Args:
        table: the table, whose first column names its rows.
        width: the number of characters in a line.
    """
    if table_width(table) <= width or len(table.columns) < 3 or width < _READABLE:
        return [table]
    across = turned(table)
    return [across] if table_width(across) <= width else _in_parts(table, width)


def as_text(table: Table, width: int = _UNLIMITED) -> str:
    """Return a table as lines of text, without a frame, turned or in parts if it is too wide."""
    table.box = None
    console = Console(width=width, file=io.StringIO(), color_system=None, force_jupyter=False)
    with console.capture() as lines:
        for part in fitted(table, width):
            console.print(part)
    return "\n".join(line.rstrip() for line in lines.get().splitlines())


def show_tables(console: Console, tables: Sequence[Table]) -> None:
    """Print tables, each as it can be read in the console's width; a title may be wider than its table."""
    for table in tables:
        for part in fitted(table, console.width):
            if part.title is not None:
                console.print(part.title, style="table.title", highlight=False)
                part.title = None
            console.print(part)


def _in_parts(table: Table, width: int) -> list[Table]:
    names, *values = table.columns
    parts: list[Table] = []
    taken: list[Column] = []
    for column in values:
        if taken and table_width(_of_columns(table, [names, *taken, column])) > width:
            parts.append(_of_columns(table, [names, *taken]))
            taken = []
        taken.append(column)
    parts.append(_of_columns(table, [names, *taken]))
    for part in parts[1:]:
        part.title = None
    for part in parts[:-1]:
        part.caption = None
    return parts


def _of_columns(table: Table, columns: Sequence[Column]) -> Table:
    """Return a table of some of the columns of another."""
    found = _like(table, [column.copy() for column in columns], zip(*(column.cells for column in columns), strict=True))
    for row, like in zip(found.rows, table.rows, strict=True):
        row.style = like.style
    return found


def _like(table: Table, heads: Sequence[Column], rows: Iterable[Iterable[RenderableType]]) -> Table:
    """Return a table with the title, caption and frame of another."""
    found = Table(
        *heads,
        title=table.title,
        caption=table.caption,
        title_justify=table.title_justify,
        caption_justify=table.caption_justify,
        box=table.box,
    )
    for row in rows:
        found.add_row(*row)
    return found
