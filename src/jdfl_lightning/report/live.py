"""A run as it stands, for a page that is looked at while it trains: plain values, read from the run folder alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jdfl_lightning.core.errors import InputError, plain
from jdfl_lightning.report.listing import summarize
from jdfl_lightning.storage.discoveries import read_discovery
from jdfl_lightning.storage.folder import require_own_files
from jdfl_lightning.storage.metrics import read_numbers
from jdfl_lightning.storage.names import DISCOVERY, DOMAIN_PREFIX, UNSEEN_PREFIX
from jdfl_lightning.storage.trust import CONFIG

_FOUND = ("num_domains", "criterion", "note", "ari", "inertias", "silhouettes", "assignments", "projection")
"""What the page shows of a discovery, besides the true domains."""


def live_state(folder: Path) -> dict[str, Any]:
    """Return what a page shows of a run: its state, its curves and its discovery; `problem` says what is wrong.

    Args:
        folder: the run folder; a run may be writing it.
    """
    try:
        require_own_files(folder)
        if not (folder / CONFIG).is_file():
            raise InputError(f"Expected a run folder but {folder} has no {CONFIG}.")
        summary = summarize(folder)
        rows = read_numbers(folder)
        found = read_discovery(folder) if (folder / DISCOVERY).exists() else None
    except (InputError, OSError) as error:
        return {"name": folder.name, "state": "damaged", "problem": plain(str(error))}
    names = (summary.data, summary.algorithm, summary.supervision)
    return {
        "name": folder.name,
        "state": summary.state,
        "problem": summary.problem,
        "title": ", ".join([*(str(name) for name in names if name is not None), f"seed {summary.seed}"]),
        "round": summary.round,
        "rounds": summary.rounds,
        "accuracy": summary.accuracy,
        "worst": summary.worst,
        "left": _seconds_left(rows, summary.rounds) if summary.state == "running" else None,
        "curves": _curves(rows),
        "loss": _points(rows, "train/loss"),
        "discovery": None if found is None else _discovery(found),
    }


def _curves(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the accuracies over the rounds: overall, on validation images, of each domain and each unseen one."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    kinds = [("overall", "overall", "test/acc"), ("validation", "validation", "val/acc")]
    kinds += [("domain", n.removeprefix(DOMAIN_PREFIX), n) for n in columns if n.startswith(DOMAIN_PREFIX)]
    kinds += [
        ("unseen", f"{n.removeprefix(UNSEEN_PREFIX)} (unseen)", n) for n in columns if n.startswith(UNSEEN_PREFIX)
    ]
    return [{"kind": k, "name": name, "points": _points(rows, c)} for k, name, c in kinds if c in columns]


def _points(rows: Sequence[Mapping[str, float]], column: str) -> list[tuple[int, float]]:
    found = [(int(row["round"]), row.get(column, math.nan)) for row in rows]
    return [(round, value) for round, value in found if math.isfinite(value)]


def _discovery(found: Mapping[str, Any]) -> dict[str, Any]:
    about = {name: found.get(name) for name in _FOUND}
    return about | {"true_domains": found.get("true_domains") or {}, "clients": len(found["assignments"])}


def _seconds_left(rows: Sequence[Mapping[str, float]], rounds: int | None) -> float | None:
    """Return the seconds that the rounds left take, by the mean of those that are over."""
    if not rows or rounds is None:
        return None
    each = [row.get("time/fit", math.nan) + row.get("time/evaluate", math.nan) for row in rows]
    mean = sum(each) / len(each)
    return None if math.isnan(mean) else max(0.0, (rounds - rows[-1]["round"]) * mean)
