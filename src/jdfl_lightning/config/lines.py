"""Where a setting is in a YAML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml


def place_of(file: Path, names: Sequence[Any]) -> str | None:
    """Return the file and the line, counted from 1, of a nested key; None if it is not there, or more than once.

    Lists and the level of ``init_args`` are looked through, so that ``callbacks.patience`` is a callback's option.
    """
    found = list(_lines(yaml.compose(file.read_text(), yaml.SafeLoader), [str(name) for name in names]))
    return f"{file}, line {found[0]}" if len(found) == 1 else None


def _lines(node: yaml.Node | None, names: Sequence[str]) -> Iterator[int]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _lines(item, names)
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == names[0] and len(names) == 1:
            yield key.start_mark.line + 1
        elif key.value == names[0]:
            yield from _lines(value, names[1:])
        elif key.value == "init_args":
            yield from _lines(value, names)
