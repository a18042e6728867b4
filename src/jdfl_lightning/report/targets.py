"""Figure of a table that the server learned: before the first round, after the last, and how it changed in between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.report.run import Drawing, heat_map, new_figure, plain

_FEW = 12
"""Number of pseudo-domains up to which a heat map has its numbers."""


def draw_targets(learned: Tensors, rows: Sequence[Mapping[str, float]]) -> Drawing | None:
    """Draw how the table of a supervision changed; None if it learns none.

    Args:
        learned: its record, with ``start`` and ``table``, (M, M), or (C, M, M) of which the mean over classes is shown.
        rows: ``metrics.csv``, with ``targets/entropy`` and ``targets/moved``.
    """
    if not {"start", "table"} <= set(learned) or not all("targets/entropy" in row for row in rows[-1:]):
        return None
    start, table = (_mean(learned[name]) for name in ("start", "table"))
    figure = new_figure(15, 4.4)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.3])
    last = f"after round {rows[-1]['round']:.0f}"
    for axes, shown, title in ((left, start, "before round 1"), (middle, table, last)):
        each = ", mean over classes" if learned["table"].ndim > 2 else ""
        _draw_table(axes, shown, f"weights {title}{each}")
        figure.colorbar(axes.images[0], ax=axes)
    _draw_change(right, rows, math.log(table.shape[1]))
    return figure


def _mean(table: Tensor) -> Tensor:
    """Return the mean over all but the last two dimensions."""
    return table.double().reshape(-1, *table.shape[-2:]).mean(dim=0)


def _draw_table(axes: Axes, table: Tensor, title: str) -> None:
    texts = [[f"{value:.2f}" for value in row] for row in table.tolist()] if len(table) <= _FEW else []
    heat_map(axes, table, texts, lambda value: value > 0.6, vmin=0, vmax=1, cmap="Blues")
    if texts:
        axes.set(xticks=range(len(table)), yticks=range(len(table)))
    axes.set(xlabel="mass on pseudo-domain", ylabel="client's pseudo-domain")
    axes.set_title(title, loc="left", fontsize=10)


def _draw_change(axes: Axes, rows: Sequence[Mapping[str, float]], most: float) -> None:
    rounds = [row["round"] for row in rows]
    axes.plot(rounds, [row["targets/entropy"] for row in rows], "o-", ms=3, color="tab:blue", label="entropy, mean")
    lowest = [row["targets/entropy_lowest"] for row in rows]
    axes.plot(rounds, lowest, "v--", ms=3, color="tab:blue", alpha=0.6, label="entropy, lowest row")
    axes.axhline(most, color="tab:blue", lw=1, ls=":", label="entropy, even row")
    plain(axes, "round", "entropy of a row (nats)", "how the rows changed")
    axes.yaxis.label.set_color("tab:blue")
    axes.set_ylim(0, 1.05 * max(most, 0.1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    other = axes.twinx()
    other.plot(rounds, [row["targets/moved"] for row in rows], "s-", ms=3, color="tab:orange", label="moved, mean")
    other.set_ylabel("mass moved since the start", color="tab:orange")
    other.set_ylim(bottom=0)
    other.spines[["top"]].set_visible(False)
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], fontsize=7, loc="best")
