"""What it takes to reach an accuracy: rounds, and bytes sent by and to the clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jdfl_lightning.report.collect import Finished
from jdfl_lightning.report.comparison import Row
from jdfl_lightning.report.statistics import Spread, spread

_ULP = 1e-9  # a mean of equal accuracies may be larger than each of them, by rounding


@dataclass(frozen=True)
class Cost:
    """What the seeds of a row needed to reach an accuracy; means are over those that did."""

    target: float
    reached: int
    rounds: Spread | None
    up: Spread | None
    """Bytes sent by clients; none if no seed got there, or if the runs did not count them."""
    down: Spread | None
    """Bytes sent to clients."""


def default_target(row: Row) -> float | None:
    """Return the mean of the baseline's best accuracies; nothing if there is no baseline."""
    runs = row.runs if row.supervision == "base" else row.base
    return spread([run.accuracy for run in runs]).mean if runs else None


def cost(row: Row, target: float) -> Cost:
    """Return what the runs of a row needed to reach an accuracy."""
    reached = [found for run in row.runs if (found := _until(run, target)) is not None]
    return Cost(
        target=target,
        reached=len(reached),
        rounds=_mean([rounds[-1]["round"] for rounds in reached]),
        up=_total(reached, "bytes/up"),
        down=_total(reached, "bytes/down"),
    )


def _until(run: Finished, target: float) -> list[dict[str, float]] | None:
    """Return a run's rounds up to the first that reaches the target."""
    for index, row in enumerate(run.run.rows):
        if row["test/acc"] >= target - _ULP:
            return run.run.rows[: index + 1]
    return None


def _mean(values: Sequence[float]) -> Spread | None:
    return spread(values) if values else None


def _total(reached: Sequence[Sequence[dict[str, float]]], column: str) -> Spread | None:
    if not all(math.isfinite(row.get(column, math.nan)) for rounds in reached for row in rounds):
        return None
    return _mean([sum(row[column] for row in rounds) for rounds in reached])
