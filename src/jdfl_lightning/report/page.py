"""Paragraphs, tables and pictures as one HTML page that needs nothing else: no script, no network, no other file."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Sequence
from html import escape
from pathlib import Path

from jdfl_lightning.report.document import Block, Cell, Part, Picture, Table
from jdfl_lightning.report.markup import one_line

GENERATOR = '<meta name="generator" content="jdfl-lightning report">'
"""Tells a page of ours from others."""

_STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --text: #1d1f21; --soft: #5b6066; --line: #d9dbde; --head: #eef0f2;
  --good: #00694d; --bad: #a3320b; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181b; --text: #e6e7e9; --soft: #a4a9b0; --line: #383c42; --head: #22262b; --good: #5fd3ac;
    --bad: #ff9d75; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 75rem; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p { max-width: 46rem; margin: .6rem 0; }
.scroll { overflow-x: auto; margin: 1.25rem 0; }
table { border-collapse: separate; border-spacing: 0; font-size: .875rem; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
caption { text-align: left; color: var(--soft); padding-bottom: .4rem; }
caption span { display: block; position: sticky; left: 0; max-width: min(46rem, 100vw - 2rem); }
th, td { padding: .35rem .5rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { background: var(--head); font-weight: 600; }
.number { text-align: right; }
.text { white-space: normal; min-width: 8rem; max-width: 24rem; overflow-wrap: anywhere; }
.note { white-space: normal; min-width: 11rem; max-width: 24rem; overflow-wrap: anywhere; }
.pin { position: sticky; left: 0; z-index: 1; white-space: normal; overflow-wrap: anywhere; width: var(--first);
  min-width: var(--first); max-width: var(--first); --first: 6.1rem; --second: 6.9rem; }
.pin + .pin { left: var(--first); width: var(--second); min-width: var(--second); max-width: var(--second); }
td.pin { background: var(--page); }
.block td { border-top: 2px solid var(--line); }
.gain { color: var(--good); font-weight: 600; }
.loss { color: var(--bad); font-weight: 600; }
figure { margin: 1.25rem 0; }
figcaption { color: var(--soft); font-size: .875rem; max-width: 46rem; }
.card { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .5rem;
  margin-bottom: .4rem; width: fit-content; max-width: 100%; }
.card img { display: block; max-width: 100%; min-width: 34rem; height: auto; }
@media (max-width: 40rem) {
  .pin { --first: 5.2rem; --second: 6rem; font-size: .8rem; padding: .4rem .3rem; }
  .pin + .pin { border-right: 1px solid var(--line); }
  .note { min-width: 22rem; }
}
"""


def as_html(title: str, parts: Sequence[Part]) -> str:
    """Return a document as one page; pictures are read from their files and put into it."""
    body = [f"<h1>{_text(title)}</h1>"]
    for part in parts:
        body.append(f"<h2>{_text(part.title)}</h2>")
        body += [_html(block) for block in part.blocks]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            GENERATOR,
            '<link rel="icon" href="data:,">',
            f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>",
            *body,
            "</main>\n</body>\n</html>\n",
        ]
    )


def _text(text: str) -> str:
    return escape(one_line(text))


def _html(block: Block) -> str:
    if isinstance(block, Picture):
        return _figure(block)
    return _table(block) if isinstance(block, Table) else f"<p>{_text(block)}</p>"


def _figure(picture: Picture) -> str:
    content = picture.file.read_bytes()
    width, height = _png_size(content)
    image = (
        f'<img src="data:image/png;base64,{base64.b64encode(content).decode()}" '
        f'width="{width}" height="{height}" alt="{_text(picture.alt)}">'
    )
    card = f'<div class="card" tabindex="0">{image}</div>'
    return f"<figure>\n{card}\n<figcaption>{_text(picture.caption)}</figcaption>\n</figure>"


def _png_size(content: bytes) -> tuple[int, int]:
    """Return width and height from a PNG's first chunk."""
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def _table(table: Table) -> str:
    pins = _pinned(table)
    kinds = [f"{column.kind}{' pin' if place < pins else ''}" for place, column in enumerate(table.columns)]
    heads = [
        f'<th scope="col" class="{kind}">{_text(column.name)}</th>'
        for column, kind in zip(table.columns, kinds, strict=True)
    ]
    rows: list[str] = []
    before = None
    for cells in table.rows:
        begins = cells[0].text != before and before is not None and table.columns[0].kind == "word"
        before = cells[0].text
        inner = "".join(_cell(cell, kind) for cell, kind in zip(cells, kinds, strict=True))
        rows.append(f"<tr{' class=' + chr(34) + 'block' + chr(34) if begins else ''}>{inner}</tr>")
    caption = _text(table.caption)
    return "\n".join(
        [
            f'<div class="scroll" role="region" tabindex="0" aria-label="{caption}">\n<table>',
            f"<caption><span>{caption}</span></caption>",
            f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>",
            *rows,
            "</tbody>\n</table>\n</div>",
        ]
    )


def _pinned(table: Table) -> int:
    """Return how many columns stay in view when a table is moved sideways: the words that say what a row is."""
    kinds = [column.kind for column in table.columns]
    return next((place for place, kind in enumerate(kinds) if kind != "word"), 0)


def _cell(cell: Cell, kind: str) -> str:
    text = _text(cell.text)
    if kind in ("text", "note"):  # names and paths may be broken where one would
        text = re.sub(r"([./_])(?=[a-z])", r"\1<wbr>", text)
    text = f"<strong>{text}</strong>" if cell.bold else text
    judged = f" {cell.text}" if cell.text in ("gain", "loss") and kind == "word" else ""  # not a name
    return f'<td class="{kind}{judged}">{text}</td>'


def is_report(file: Path) -> bool:
    """Return whether a file is a page that was written here."""
    try:
        return GENERATOR.encode() in file.read_bytes()[:2000]
    except OSError:
        return False
