"""Paragraphs, tables and pictures as Markdown and as LaTeX, cells of CSV; whatever comes from folders is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jdfl_lightning.report.document import NONE, Block, Cell, Column, Part, Picture, Table

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "√": r"$\surd$",
    "[": "{[}",  # after a line break a bracket would be its argument
    "]": "{]}",
    "…": r"\ldots{}",
}
_UNKNOWN = re.compile("[«»ÐðÞþ\u0100-\U0010ffff]")
"""What LaTeX stops at with its usual fonts."""


def csv_cell(value: object) -> object:
    """Return a cell of a CSV file: a text that spreadsheets would take for a formula gets an apostrophe before it.

    >>> csv_cell("=1+1"), csv_cell("-0.5"), csv_cell(-0.5), csv_cell("dog")
    ("'=1+1", '-0.5', -0.5, 'dog')
    """
    if isinstance(value, (int, float)) or value is None:
        return value
    text = str(value).replace("\r", " ")  # csv writes it without quotes, and readers end the line at it
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith("\t") or text.lstrip().startswith(("=", "+", "-", "@")) else text
    return text


def one_line(text: str) -> str:
    """Return a text with every run of white space and control characters as one space.

    >>> one_line("a" + chr(10) + "b" + chr(0))
    'a b'
    """
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", text).strip()


def escape_markdown(text: str) -> str:
    r"""Return a text that Markdown shows as it is, in a paragraph and in a table.

    >>> print(escape_markdown("<b>|*_"))
    \<b\>\|\*\_
    """
    return re.sub(r"([\\`*_{}\[\]<>|#!~&$])", r"\\\1", one_line(text))


def escape_latex(text: str) -> str:
    r"""Return a text that LaTeX shows as it is, with a minus before numbers below 0; letters that it has not are ?.

    >>> print(escape_latex("50 % of a_b: -0.5"))
    50 \% of a\_b: $-$0.5
    >>> print(escape_latex("--lr"))
    -{}-lr
    """
    known = (_LATEX.get(character) or _UNKNOWN.sub("?", character) for character in one_line(text))
    minus = re.sub(r"(?<![\w.])-(?=\d)", "$-$", "".join(known))
    return re.sub(r"-(?=-)", "-{}", minus)  # two would become a dash


def as_markdown(title: str, parts: Sequence[Part]) -> str:
    """Return a document as Markdown; pictures are links to the files beside it."""
    lines = [f"# {escape_markdown(title)}"]
    for part in parts:
        lines.append(f"## {escape_markdown(part.title)}")
        lines += [_markdown(block) for block in part.blocks]
    return "\n\n".join(lines) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Picture):
        return f"![{escape_markdown(block.alt)}]({block.file.name})\n\n*{escape_markdown(block.caption)}*"
    if isinstance(block, Table):
        heads = [Cell(column.name) for column in block.columns]
        rules = ["---:" if column.kind == "number" else ":---" for column in block.columns]
        lines = [_markdown_row(heads), f"| {' | '.join(rules)} |", *map(_markdown_row, block.rows)]
        return f"{escape_markdown(block.caption)}\n\n" + "\n".join(lines)
    return escape_markdown(block)


def _markdown_row(cells: Sequence[Cell]) -> str:
    texts = [escape_markdown(cell.text) for cell in cells]
    return f"| {' | '.join(f'**{text}**' if c.bold else text for c, text in zip(cells, texts, strict=True))} |"


def as_latex(title: str, parts: Sequence[Part]) -> str:
    r"""Return a document's tables as LaTeX, to be read with ``\input``.

    It needs no package; with graphicx, tables that are wider than the page are made smaller.
    """
    lines = [
        f"% {one_line(title)}: tables, to be read with \\input; load graphicx to have wide ones made smaller",
        r"\providecommand{\resizebox}[3]{#3}",
    ]
    for part in parts:
        lines.append(f"% {one_line(part.title)}")
        lines += [_latex(block) for block in part.blocks if isinstance(block, Table)]
    return "\n\n".join(lines) + "\n"


def _latex(table: Table) -> str:
    kept = [index for index, column in enumerate(table.columns) if column.kind != "note"]
    heads = " & ".join(escape_latex(table.columns[index].name) for index in kept)
    marks, notes = _notes(table)
    rows = []
    for cells, mark in zip(table.rows, marks, strict=True):
        rows.append(" & ".join(_latex_cell(cells[index]) for index in kept) + mark)
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{escape_latex(table.caption)}}}",
            r"\sbox0{%",
            rf"\begin{{tabular}}{{{_latex_columns([table.columns[index] for index in kept])}}}",
            r"\hline",
            rf"{heads} \\",
            r"\hline",
            *(rf"{row} \\" for row in rows),
            r"\hline",
            r"\end{tabular}}",
            r"\ifdim\wd0>\linewidth\resizebox{\linewidth}{!}{\usebox0}\else\usebox0\fi",
            *notes,
            r"\end{table}",
        ]
    )


def _notes(table: Table) -> tuple[list[str], list[str]]:
    """Return a mark for each row, and the notes that the marks stand for: what the table says in columns of notes."""
    texts = [
        "; ".join(
            f"{column.name}: {cell.text}"
            for cell, column in zip(cells, table.columns, strict=True)
            if column.kind == "note" and cell.text != NONE
        )
        for cells in table.rows
    ]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(filter(None, texts)), start=1)}
    marks = [f"$^{{{numbers[text]}}}$" if text else "" for text in texts]
    notes = [r"\par\smallskip\parbox{\linewidth}{\scriptsize\raggedright"] if numbers else []
    notes += [rf"$^{{{number}}}$ {escape_latex(text)}.\par" for text, number in numbers.items()]
    return marks, [*notes, "}"] if numbers else []


def _latex_columns(columns: Sequence[Column]) -> str:
    texts = sum(column.kind == "text" for column in columns)
    share = 0.9 if texts == len(columns) else 0.25
    wide = rf"p{{{share / max(1, texts):.2f}\linewidth}}"
    return "".join({"number": "r", "word": "l", "text": wide}[column.kind] for column in columns)


def _latex_cell(cell: Cell) -> str:
    text = escape_latex(cell.text)
    return rf"\textbf{{{text}}}" if cell.bold else text
