"""Pictures of a comparison: accuracy over the rounds, bars of the ablation, accuracy over M."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jdfl_lightning import published
from jdfl_lightning.report.collect import SUPERVISIONS
from jdfl_lightning.report.comparison import Row, Section

COLOURS = {"base": "#4d4d4d", "hard": "#e69f00", "graded": "#0072b2", "random": "#009e73"}
"""One colour for each supervision, in every picture; told apart with any colour vision."""
_STYLES = ("-", "--", ":", "-.")
_PER_LINE = 3
_DPI = 130


def draw_accuracy(section: Section, file: Path) -> None:
    """Draw a panel for each algorithm: accuracy over the rounds, the mean over seeds and a band of one deviation."""
    panels = _by_setup(section.rows)
    columns = min(_PER_LINE, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(max(6.0, 3.8 * columns), 0.5 + 3.0 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes, rows in zip(grid.flat, panels, strict=False):
        seen: list[str] = []
        for row in rows:
            style = _STYLES[seen.count(row.supervision) % len(_STYLES)]
            _curve(axes, row, style)
            seen.append(row.supervision)
        _plain(axes, "round", "", _setup_name(rows))
        if len(set(seen)) < len(seen):
            axes.legend(fontsize=7, loc="lower right")
    for axes in grid[:, 0]:
        axes.set_ylabel("class-only accuracy (%)")
    grid[0, 0].set_ylim(bottom=_floor(section.rows))  # of all panels
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, [row.supervision for row in section.rows])
    figure.savefig(file, dpi=_DPI)


def draw_ablation(section: Section, file: Path) -> None:
    """Draw bars for each algorithm that has ``hard`` among its supervisions; points are seeds, lines the paper's."""
    groups = ablation_groups(section)
    figure = Figure(figsize=(max(6.0, 1.0 + 2.6 * len(groups)), 3.6), layout="constrained")
    axes = figure.subplots()
    values: list[float] = []
    width = 0.2
    for place, rows in enumerate(groups):
        for offset, row in enumerate(rows):
            x = place + (offset - (len(rows) - 1) / 2) * width
            mean, seeds = 100 * row.accuracy.mean, [100 * run.accuracy for run in row.runs]
            values += seeds
            axes.bar(x, mean, 0.9 * width, color=COLOURS[row.supervision], alpha=0.85)
            axes.plot([x] * len(seeds), seeds, "o", ms=3.5, color="black", mfc="white")
            if row.published is not None:
                values.append(row.published.overall)
                axes.hlines(row.published.overall, x - width / 2, x + width / 2, colors="black", linestyles="dashed")
    spare = max(1.0, 0.35 * (max(values) - min(values)))
    axes.set_ylim(max(0.0, min(values) - spare), min(100.0, max(values) + spare / 2))
    axes.set_xticks(range(len(groups)), [_setup_name(rows) for rows in groups])
    _plain(axes, "", "class-only accuracy (%), axis cut", "")
    _legend(figure, [row.supervision for rows in groups for row in rows], dashed=_paper_label(groups))
    figure.savefig(file, dpi=_DPI)


def ablation_groups(section: Section) -> list[list[Row]]:
    """Return the main table's rows of each algorithm that has ``hard`` among its supervisions."""
    groups = _by_setup(section.rows)
    return [rows for rows in groups if "hard" in {row.supervision for row in rows}]


def draw_num_domains(section: Section, file: Path) -> None:
    """Draw accuracy over a given M, a panel for each algorithm, with the baseline and the paper's curve."""
    groups = _by_setup(section.sweep)
    figure = Figure(figsize=(max(6.0, 4.2 * len(groups)), 3.6), layout="constrained")
    grid = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for axes, rows in zip(grid, groups, strict=True):
        for supervision in SUPERVISIONS:
            points = [row for row in rows if row.supervision == supervision]
            if points:
                _points(axes, points)
        if rows[0].base:
            mean = 100 * sum(run.accuracy for run in rows[0].base) / len(rows[0].base)
            axes.axhline(mean, color=COLOURS["base"], lw=1.5)
        if any(row.published for row in rows):
            axes.axhline(published.num_domains_curve()["base", 1], color=COLOURS["base"], lw=1, ls="--")
        _plain(axes, "pseudo-domains M", "", _setup_name(rows))
        axes.set_xticks(sorted({row.given_domains or 0 for row in rows}))
    grid[0].set_ylabel("class-only accuracy (%)")
    shown = [row.supervision for row in section.sweep] + ["base" for row in section.sweep if row.base]
    _legend(figure, shown, dashed=_paper_label(groups))
    figure.savefig(file, dpi=_DPI)


def _floor(rows: Sequence[Row]) -> float:
    """Return where the axis of accuracy begins: a little below what all have reached after a fifth of the rounds."""
    curves = [row.curve() for row in rows]
    lowest = [value.mean - (value.std or 0.0) for curve in curves for _, value in curve[len(curve) // 5 :]]
    return max(0.0, 100 * min(lowest) - 2)


def _points(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw one supervision's accuracy over M, with a bar of one deviation, and the paper's dashed."""
    colour = COLOURS[rows[0].supervision]
    spreads = [row.accuracy for row in rows]
    numbers = [row.given_domains or 0 for row in rows]
    errors = [100 * (value.std or 0.0) for value in spreads]
    axes.errorbar(numbers, [100 * value.mean for value in spreads], errors, fmt="o-", ms=4, capsize=3, color=colour)
    printed = [(row.given_domains or 0, row.published.overall) for row in rows if row.published is not None]
    if printed:
        axes.plot([number for number, _ in printed], [value for _, value in printed], "s--", ms=3, lw=1, color=colour)


def _curve(axes: Axes, row: Row, style: str) -> None:
    points = row.curve()
    rounds = [number for number, _ in points]
    means = [100 * value.mean for _, value in points]
    deviations = [100 * (value.std or 0.0) for _, value in points]
    colour = COLOURS[row.supervision]
    given = "" if row.given_domains is None else f", M = {row.given_domains}"
    axes.plot(rounds, means, style, lw=1.6, color=colour, label=f"{row.supervision}{given}")
    low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
    high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
    axes.fill_between(rounds, low, high, color=colour, alpha=0.15, lw=0)


def _by_setup(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each algorithm and its settings, in their order."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        found.setdefault(row.setup, []).append(row)
    return list(found.values())


def _setup_name(rows: Sequence[Row]) -> str:
    """Return a panel's title; a dollar sign in it would begin a formula."""
    name = f"{rows[0].algorithm}, {rows[0].settings}" if rows[0].settings else rows[0].algorithm
    return (name if len(name) <= 45 else f"{name[:44]}…").replace("$", r"\$")


def _plain(axes: Axes, xlabel: str, ylabel: str, title: str) -> None:
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _paper_label(groups: Sequence[Sequence[Row]]) -> str | None:
    return "paper" if any(row.published for rows in groups for row in rows) else None


def _legend(figure: Figure, supervisions: Sequence[str], dashed: str | None = None) -> None:
    """Put one legend above all panels."""
    handles = [Line2D([], [], color=COLOURS[name], lw=3, label=name) for name in SUPERVISIONS if name in supervisions]
    if dashed:
        handles.append(Line2D([], [], color="black", ls="--", lw=1, label=dashed))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
