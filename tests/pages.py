"""The README and the pages of docs/: their code blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A piece of a page: a code block, a piece of code in a line, or the name under which the last block is saved."""

    kind: str
    """The language of a code block; ``inline`` or ``saved`` for the others."""
    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """A command of a shell block."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    output: str | None = None
    """Where ``>`` sends what it prints."""


def read(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in their order, as GitHub sees them; an indented block has no language."""
    line = 0
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        line = token.map[0] + 1 if token.map else line
        if token.type in ("fence", "code_block"):
            yield Block(token.info.strip(), token.content, line)
        for child in token.children or []:
            if child.type == "code_inline":
                yield Block("inline", child.content, line)
        for name in re.findall(r"\bsaved as\s`([\w./]+)`", token.content, re.IGNORECASE) if token.children else []:
            yield Block("saved", name, line)


def commands(script: str) -> Iterator[Command]:
    """Yield the commands of a shell block; raise a `ValueError` for what is not understood.

    >>> list(commands("A=1 do --this 'x y' > out  # why\\n"))
    [Command(words=['do', '--this', 'x y'], variables={'A': '1'}, output='out')]
    >>> [command.words for command in commands("one \\\\\\n  two && three &")]
    [['one', 'two'], ['three']]
    """
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in (";", "&&", "&"):
                if words:
                    yield _command(words)
                words = []
            else:
                words.append(word)


def _command(words: list[str]) -> Command:
    variables, output = {}, None
    if ">" in words:
        *words, arrow, output = words
        if arrow != ">":
            raise ValueError(f"Expected > FILE at the end of a command but got {words}.")
    if unknown := {"|", "||", "<", "<<", ">>", "(", ")"} & set(words):
        raise ValueError(f"Expected a plain command but got {unknown} in {words}.")
    while words and (found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0])):
        variables[found[1]] = found[2]
        words = words[1:]
    return Command(words, variables, output)
