"""Plain values as JSON, for scripts and for pages."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def as_json(value: object) -> str:
    """Return plain values as JSON; a number that is none, and what is not known, are null.

    >>> print(as_json([float("nan"), 0.5]))
    [
     null,
     0.5
    ]
    """
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
