"""Pictures of a comparison: accuracy over the rounds, bars of the ablation, accuracy over M."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from jdfl_lightning.report import published
from jdfl_lightning.report.collect import SUPERVISIONS
from jdfl_lightning.report.comparison import Row, Section
from jdfl_lightning.report.run import plain

COLOURS = {"base": "#4d4d4d", "hard": "#e69f00", "graded": "#0072b2", "random": "#009e73"}
"""One colour for each supervision, in every picture; told apart with any colour vision."""
DPI = 130
_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "^", "D", "v", "P", "X")
_HATCHES = ("", "///", "...", "xxx", "+++", "ooo")
"""Rows of one supervision differ in the style of the line, the marker or the pattern of the bar."""
_PER_LINE = 3
_PAPER = Line2D([], [], color="black", ls="--", lw=1, label="paper")


def accuracy_figure(section: Section) -> Figure:
    """Draw a panel for each algorithm: accuracy over the rounds, the mean over seeds and a band of one deviation."""
    panels = _by_setup(section.drawn)
    columns = min(_PER_LINE, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(max(6.0, 3.8 * columns), 0.5 + 3.0 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    variants = _variants(section.drawn)
    for axes, rows in zip(grid.flat, panels, strict=False):
        for row in rows:
            _curve(axes, row, variants[_label(row)])
        plain(axes, "round", "", _setup_name(rows))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in grid[:, 0]:
        axes.set_ylabel("class-only accuracy (%)")
    grid[0, 0].set_ylim(bottom=_floor(section.drawn))  # of all panels
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    handles = {
        _label(row): Line2D([], [], color=COLOURS[row.supervision], **_line(variants[_label(row)]), label=_label(row))
        for row in _in_order(section.drawn)
    }
    _legend(figure, list(handles.values()))
    return figure


def ablation_figure(section: Section) -> Figure:
    """Draw bars for each algorithm that has ``hard`` among its supervisions; points are seeds, lines the paper's."""
    groups = ablation_groups(section)
    shown = [row for rows in groups for row in rows]
    most = max(map(len, groups))
    figure = Figure(figsize=(max(6.0, 1.0 + max(2.6, 0.4 * most) * len(groups)), 3.6), layout="constrained")
    axes = figure.subplots()
    values: list[float] = []
    width = 0.8 / max(4, most)
    variants = _variants(shown)
    for place, rows in enumerate(groups):
        for offset, row in enumerate(rows):
            x = place + (offset - (len(rows) - 1) / 2) * width
            mean, seeds = 100 * row.accuracy.mean, list(100 * row.runs["test/acc"])
            values += seeds
            axes.bar(x, mean, 0.9 * width, **_bar(row, variants), label=_label(row))
            axes.plot([x] * len(seeds), seeds, "o", ms=3.5, color="black", mfc="white")
            if row.published is not None:
                values.append(row.published.overall)
                axes.hlines(row.published.overall, x - width / 2, x + width / 2, colors="black", linestyles="dashed")
    spare = max(1.0, 0.35 * (max(values) - min(values)))
    axes.set_ylim(max(0.0, min(values) - spare), min(100.0, max(values) + spare / 2))
    axes.set_xticks(range(len(groups)), [_setup_name(rows) for rows in groups])
    plain(axes, "", "class-only accuracy (%), axis cut", "")
    handles = {_label(row): Patch(**_bar(row, variants), label=_label(row)) for row in _in_order(shown)}
    _legend(figure, [*handles.values(), *_paper(shown)])
    return figure


def ablation_groups(section: Section) -> list[list[Row]]:
    """Return the drawn rows of each algorithm that has ``hard`` among its supervisions."""
    groups = _by_setup(section.drawn)
    return [rows for rows in groups if "hard" in {row.supervision for row in rows}]


def num_domains_figure(section: Section) -> Figure:
    """Draw accuracy over a given M, a panel for each algorithm, with the baseline and the paper's curve."""
    groups = _by_setup(section.sweep)
    figure = Figure(figsize=(max(6.0, 4.2 * len(groups)), 3.6), layout="constrained")
    grid = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    variants = _variants(section.sweep, with_m=False)
    handles: dict[str, Artist] = {}
    for axes, rows in zip(grid, groups, strict=True):
        for kind in dict.fromkeys(row.kind for row in rows):
            points = [row for row in rows if row.kind == kind]
            label = _label(points[0], with_m=False)
            style: dict[str, Any] = {
                "color": COLOURS[points[0].supervision],
                "marker": _MARKERS[variants[label] % len(_MARKERS)],
            }
            _points(axes, points, label, style)
            handles[label] = Line2D([], [], **style, ms=5, label=label)
        if len(rows[0].base):
            axes.axhline(100 * rows[0].base["test/acc"].mean(), color=COLOURS["base"], lw=1.5)
            handles["base"] = Line2D([], [], color=COLOURS["base"], lw=1.5, label="base")
        if any(row.published for row in rows):
            axes.axhline(published.num_domains_curve()["base", 1], color=COLOURS["base"], lw=1, ls="--")
        plain(axes, "pseudo-domains M", "", _setup_name(rows))
        axes.set_xticks(sorted({row.given_domains or 0 for row in rows}))
    grid[0].set_ylabel("class-only accuracy (%)")
    _legend(figure, [*handles.values(), *_paper(section.sweep)])
    return figure


def _floor(rows: Sequence[Row]) -> float:
    """Return where the axis of accuracy begins: a little below what all have reached after a fifth of the rounds."""
    curves = [row.curve() for row in rows]
    lowest = [(curve["mean"] - curve["std"]).iloc[len(curve) // 5 :].min() for curve in curves if len(curve)]
    return max(0.0, 100 * min(lowest, default=0.0) - 2)


def _points(axes: Axes, rows: Sequence[Row], label: str, style: dict[str, Any]) -> None:
    """Draw accuracy over M, with a bar of one deviation, and the paper's dashed."""
    spreads = [row.accuracy for row in rows]
    numbers = [row.given_domains or 0 for row in rows]
    errors = [100 * (value.std or 0.0) for value in spreads]
    means = [100 * value.mean for value in spreads]
    axes.errorbar(numbers, means, errors, ms=5, capsize=3, label=label, **style)
    printed = [(row.given_domains or 0, row.published.overall) for row in rows if row.published is not None]
    if printed:
        axes.plot(*zip(*printed, strict=True), "s--", ms=3, lw=1, color=style["color"])


def _curve(axes: Axes, row: Row, variant: int) -> None:
    curve = 100 * row.curve()
    low, high = curve["mean"] - curve["std"], curve["mean"] + curve["std"]
    axes.plot(curve.index, curve["mean"], color=COLOURS[row.supervision], label=_label(row), **_line(variant))
    axes.fill_between(curve.index, low, high, color=COLOURS[row.supervision], alpha=0.15, lw=0)


def _line(variant: int) -> dict[str, Any]:
    """Return the look of a curve: thicker lines when the styles are used up."""
    return {"ls": _STYLES[variant % len(_STYLES)], "lw": 1.6 + 0.8 * (variant // len(_STYLES))}


def _bar(row: Row, variants: dict[str, int]) -> dict[str, Any]:
    hatch = _HATCHES[variants[_label(row)] % len(_HATCHES)]
    return {"facecolor": COLOURS[row.supervision], "alpha": 0.85, "hatch": hatch, "edgecolor": "white"}


def _label(row: Row, with_m: bool = True) -> str:
    """Return what tells a row from others of its panel."""
    given = f"M = {row.given_domains}" if with_m and row.given_domains is not None else ""
    return _short(", ".join(filter(None, (row.supervision, given, row.joint_settings))), 70)


def _variants(rows: Sequence[Row], with_m: bool = True) -> dict[str, int]:
    """Return a number for each label, counted for each supervision by itself."""
    found: dict[str, int] = {}
    for supervision in SUPERVISIONS:
        labels = dict.fromkeys(_label(row, with_m) for row in rows if row.supervision == supervision)
        found |= {label: number for number, label in enumerate(labels)}
    return found


def _in_order(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: SUPERVISIONS.index(row.supervision))


def _by_setup(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each algorithm and its settings, in their order."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        found.setdefault(row.setup, []).append(row)
    return list(found.values())


def _setup_name(rows: Sequence[Row]) -> str:
    """Return a panel's title."""
    return _short(", ".join(filter(None, (rows[0].algorithm, rows[0].training_settings))), 45)


def _short(text: str, length: int) -> str:
    """Return a text that fits; a dollar sign in it would begin a formula."""
    return (text if len(text) <= length else f"{text[: length - 1]}…").replace("$", r"\$")


def _paper(rows: Sequence[Row]) -> list[Artist]:
    return [_PAPER] if any(row.published for row in rows) else []


def _legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Put one legend above all panels, in as many columns as fit, and make room for it."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), int(figure.get_figwidth() / (0.5 + 0.07 * longest))))
    figure.set_figheight(figure.get_figheight() + 0.2 * (math.ceil(len(handles) / columns) - 1))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, fontsize=9)
