"""Plain values as JSON, for scripts and for pages."""

from __future__ import annotations

import json
from collections.abc import Mapping


def as_json(value: object) -> str:
    """Return plain values as JSON; a number that is none, and what is not known, are null. A key is a name in JSON.

    >>> print(as_json([float("nan"), 0.5]))
    [
     null,
     0.5
    ]
    >>> print(as_json({(0, 1): 2, None: 3}))
    {
     "(0, 1)": 2,
     "null": 3
    }
    """
    finite = json.loads(json.dumps(_with_names(value), default=str), parse_constant=lambda number: None)
    return json.dumps(finite, indent=1)


def _with_names(value: object) -> object:
    """Return a value whose keys JSON can write: those that it does not know, such as a pair, as text."""
    if isinstance(value, Mapping):
        known = (str, int, float, type(None))
        return {key if isinstance(key, known) else str(key): _with_names(inner) for key, inner in value.items()}
    return [_with_names(inner) for inner in value] if isinstance(value, list | tuple) else value
