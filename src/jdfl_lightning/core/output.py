"""Plain values as JSON, for scripts and for pages."""

from __future__ import annotations

import json


def as_json(value: object) -> str:
    """Return plain values as JSON; a number that is none, and what is not known, are null.

    >>> print(as_json([float("nan"), 0.5]))
    [
     null,
     0.5
    ]
    """
    finite = json.loads(json.dumps(value, default=str, skipkeys=True), parse_constant=lambda number: None)
    return json.dumps(finite, indent=1)
