"""Paragraphs, tables and figures, rendered as Markdown, LaTeX and HTML; all text from run folders is escaped.

A format is a template in ``templates/``; every expression in it is escaped automatically.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

GENERATOR = "jdfl-lightning report"
"""Marks a page as written by this package."""
_LATEX = {character: rf"\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
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
"""Characters that LaTeX's usual fonts do not have."""
NONE = "-"
"""Shown for an empty cell."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    cells: list[str]
    kind: Literal["pin", "word", "number", "text", "note"] = "number"
    """pin: names that stay in view. text: sentences that may wrap. note: sentences that many rows share."""
    bold: Collection[int] = ()
    """Which cells are in bold."""


@dataclass(frozen=True)
class Table:
    """A table with a caption."""

    caption: str
    columns: list[Column]

    @property
    def rows(self) -> list[list[tuple[Column, str, bool]]]:
        """The rows: for each cell its column, its text and whether it is in bold."""
        count = len(self.columns[0].cells)
        return [[(column, column.cells[i], i in column.bold) for column in self.columns] for i in range(count)]


@dataclass(frozen=True)
class Picture:
    """A picture file with a caption."""

    file: Path
    caption: str
    alt: str
    """Alternative text for readers who cannot see the figure."""

    @property
    def address(self) -> str:
        """The picture as a data URL."""
        return f"data:image/png;base64,{base64.b64encode(self.file.read_bytes()).decode()}"


Block: TypeAlias = str | Table | Picture
"""A paragraph, a table or a picture."""
Chapter: TypeAlias = tuple[str, list[Block]]
"""A heading and its blocks."""


def csv_cell(value: object) -> object:
    """Return a cell of a CSV file: a text that spreadsheets would read as a formula gets an apostrophe in front.

    >>> csv_cell("=1+1"), csv_cell("-0.5"), csv_cell(-0.5), csv_cell("dog")
    ("'=1+1", '-0.5', -0.5, 'dog')
    """
    if isinstance(value, (int, float)) or value is None:
        return value
    text = str(value).replace("\r", " ")  # csv writes it unquoted, and readers would end the line there
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
    r"""Return a text escaped for Markdown, in a paragraph and in a table.

    >>> print(escape_markdown("<b>|*_"))
    \<b\>\|\*\_
    """
    return re.sub(r"([\\`*_{}\[\]<>|#!~&$])", r"\\\1", one_line(text))


def escape_latex(text: str) -> str:
    r"""Return a text escaped for LaTeX, with a minus sign before negative numbers; unknown characters become ?.

    >>> print(escape_latex("50 % of a_b: -0.5"))
    50 \% of a\_b: $-$0.5
    >>> print(escape_latex("--lr"))
    -{}-lr
    """
    known = (_LATEX.get(character) or _UNKNOWN.sub("?", character) for character in one_line(text))
    minus = re.sub(r"(?<![\w.])-(?=\d)", "$-$", "".join(known))
    return re.sub(r"-(?=-)", "-{}", minus)  # two would become a dash


def render(file: str, **values: Any) -> str:
    r"""Return a document: the template of this name with values.

    In ``report.md`` pictures are links to the files beside it; ``report.html`` is self-contained: no script, no
    network, no other file. ``report.tex`` has the tables alone, to include with ``\input``; it needs no package, and
    with graphicx wide tables are scaled to the page.
    """
    return _environment(Path(file).suffix).get_template(f"{file}.jinja").render(values, generator=GENERATOR)


@cache
def _environment(suffix: str) -> Environment:
    """Return what renders the templates of a format; it compiles each of them once."""
    escape_text, options = _FORMATS[suffix]
    environment = Environment(
        loader=PackageLoader("jdfl_lightning.report"),
        finalize=lambda value: value if isinstance(value, Markup) else escape_text(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )
    environment.filters["breakable"] = _breakable
    return environment


def _breakable(text: str) -> Markup:
    """Return a text as HTML in which names and paths may break at natural points."""
    return Markup(re.sub(r"([./_])(?=[a-z])", r"\1<wbr>", str(escape(one_line(text)))))


_MARKS = [f"{kind}_{end}_string" for kind in ("block", "variable", "comment") for end in ("start", "end")]
_BRACES: dict[str, Any] = dict(zip(_MARKS, ["<%", "%>", "<<", ">>", "<#", "#>"], strict=True))
"""Other delimiters for what is full of braces."""
_FORMATS: dict[str, tuple[Callable[[str], str], dict[str, Any]]] = {
    ".md": (escape_markdown, {}),
    ".tex": (escape_latex, _BRACES),
    ".sh": (str, _BRACES),  # of names and words of this package alone
    ".html": (one_line, {"autoescape": True}),
}


def is_report(file: Path) -> bool:
    """Return whether a file is a page written by this package."""
    try:
        return f'content="{GENERATOR}"'.encode() in file.read_bytes()[:2000]
    except OSError:
        return False
