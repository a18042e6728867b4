"""Paragraphs, tables and pictures as Markdown and as LaTeX; whatever comes from folders is escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jdfl_lightning.report.document import Block, Cell, Column, Part, Picture, Table

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
}


def one_line(text: str) -> str:
    """Return a text with every run of white space and control characters as one space.

    >>> one_line("a" + chr(10) + "b" + chr(0))
    'a b'
    """
    return re.sub(r"[\s\x00-\x1f\x7f]+", " ", text).strip()


def escape_markdown(text: str) -> str:
    r"""Return a text that Markdown shows as it is, in a paragraph and in a table.

    >>> print(escape_markdown("<b>|*_"))
    \<b\>\|\*\_
    """
    return re.sub(r"([\\`*_{}\[\]<>|#!~&$])", r"\\\1", one_line(text))


def escape_latex(text: str) -> str:
    r"""Return a text that LaTeX shows as it is, with a minus before numbers below 0.

    >>> print(escape_latex("50 % of a_b: -0.5"))
    50 \% of a\_b: $-$0.5
    """
    escaped = "".join(_LATEX.get(character, character) for character in one_line(text))
    return re.sub(r"(?<![\w.])-(?=\d)", "$-$", escaped)


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
    r"""Return a document's tables as LaTeX, to be read with ``\input``; it needs no package."""
    lines = [f"% {one_line(title)}: tables, to be read with \\input"]
    for part in parts:
        lines.append(f"% {one_line(part.title)}")
        lines += [_latex(block) for block in part.blocks if isinstance(block, Table)]
    return "\n\n".join(lines) + "\n"


def _latex(table: Table) -> str:
    heads = " & ".join(escape_latex(column.name) for column in table.columns)
    rows = [" & ".join(map(_latex_cell, row)) for row in table.rows]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering\scriptsize",
            rf"\caption{{{escape_latex(table.caption)}}}",
            rf"\begin{{tabular}}{{{_latex_columns(table.columns)}}}",
            r"\hline",
            rf"{heads} \\",
            r"\hline",
            *(rf"{row} \\" for row in rows),
            r"\hline",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _latex_columns(columns: Sequence[Column]) -> str:
    texts = sum(column.kind == "text" for column in columns)
    wide = rf"p{{{0.5 / max(1, texts):.2f}\linewidth}}"
    return "".join({"number": "r", "word": "l", "text": wide}[column.kind] for column in columns)


def _latex_cell(cell: Cell) -> str:
    text = escape_latex(cell.text)
    return rf"\textbf{{{text}}}" if cell.bold else text
