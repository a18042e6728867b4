"""Pictures of a comparison: accuracy over the rounds, bars of the ablation, accuracy over M."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, groupby
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from jdfl_lightning.report import published
from jdfl_lightning.report.comparison import Line, Section
from jdfl_lightning.report.run import over_rounds, plain
from jdfl_lightning.supervision import Plain, short_names

_SPARE_COLOURS = ("#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Colours of supervisions that have none of their own; distinguishable with any colour vision."""
_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "^", "D", "v", "P", "X")
_HATCHES = ("", "///", "...", "xxx", "+++", "ooo")
"""Bar patterns; rows of one supervision differ in line style, marker or bar pattern."""
_PER_LINE = 3
_PAPER = Line2D([], [], color="black", ls="--", lw=1, label="paper")


def accuracy_figure(section: Section) -> Figure:
    """Draw a panel for each algorithm: accuracy over the rounds, the mean over seeds and a band of one deviation."""
    drawn = section.drawn
    panels = _by_setup(drawn)
    columns = min(_PER_LINE, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(max(6.0, 3.8 * columns), 0.5 + 3.0 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    looks: dict[str, dict[str, Any]] = {  # thicker lines once all styles are used
        label: {"color": colour, "ls": _STYLES[i % len(_STYLES)], "lw": 1.6 + 0.8 * (i // len(_STYLES))}
        for label, (colour, i) in _variants(drawn).items()
    }
    lowest = []
    for axes, rows in zip(grid.flat, panels, strict=False):
        for row in rows:
            curve = 100 * section.curve(row)
            low, high = curve["mean"] - curve["std"], curve["mean"] + curve["std"]
            axes.plot(curve.index, curve["mean"], label=_label(row), **looks[_label(row)])
            axes.fill_between(curve.index, low, high, color=looks[_label(row)]["color"], alpha=0.15, lw=0)
            lowest += list(low.iloc[len(curve) // 5 :])
        plain(axes, "round", "", _setup_name(rows))
        over_rounds(axes)
    for axes in grid[:, 0]:
        axes.set_ylabel("class-only accuracy (%)")
    # the axis of all panels begins a little below the accuracy that all rows have reached after a fifth of the rounds
    grid[0, 0].set_ylim(bottom=max(0.0, min(lowest, default=0.0) - 2))
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, [Line2D([], [], **look, label=label) for label, look in looks.items()])
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
    looks: dict[str, dict[str, Any]] = {
        label: {"facecolor": colour, "alpha": 0.85, "hatch": _HATCHES[i % len(_HATCHES)], "edgecolor": "white"}
        for label, (colour, i) in _variants(shown).items()
    }
    for place, rows in enumerate(groups):
        for offset, row in enumerate(rows):
            x = place + (offset - (len(rows) - 1) / 2) * width
            seeds = [100 * accuracy for accuracy in row.accuracies]
            axes.bar(x, 100 * row.mean, 0.9 * width, **looks[_label(row)], label=_label(row))
            axes.plot([x] * len(seeds), seeds, "o", ms=3.5, color="black", mfc="white")
            values += seeds
            if row.paper is not None:
                axes.hlines(100 * row.paper, x - width / 2, x + width / 2, colors="black", linestyles="dashed")
                values.append(100 * row.paper)
    spare = max(1.0, 0.35 * (max(values) - min(values)))
    axes.set_ylim(max(0.0, min(values) - spare), min(100.0, max(values) + spare / 2))
    axes.set_xticks(range(len(groups)), [_setup_name(rows) for rows in groups])
    plain(axes, "", "class-only accuracy (%), axis cut", "")
    _legend(figure, [*(Patch(**look, label=label) for label, look in looks.items()), *_paper(shown)])
    return figure


def ablation_groups(section: Section) -> list[list[Line]]:
    """Return the drawn rows of each algorithm that has ``hard`` among its supervisions."""
    return [rows for rows in _by_setup(section.drawn) if "hard" in {row.supervision for row in rows}]


def num_domains_figure(section: Section) -> Figure:
    """Draw accuracy over a given M, a panel for each algorithm, with the baseline and the paper's curve."""
    groups = _by_setup(section.sweep)
    figure = Figure(figsize=(max(6.0, 4.2 * len(groups)), 3.6), layout="constrained")
    grid = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    variants = _variants(section.sweep, with_m=False)
    handles: dict[str, Artist] = {}
    for axes, rows in zip(grid, groups, strict=True):
        for kind in dict.fromkeys(row.kind for row in rows):
            points = [row for row in rows if row.kind == kind]  # in the order of M
            label = _label(points[0], with_m=False)
            colour, variant = variants[label]
            marker = _MARKERS[variant % len(_MARKERS)]
            look: dict[str, Any] = {"color": colour, "marker": marker, "ms": 5, "label": label}
            numbers, means = [row.given_domains for row in points], [100 * row.mean for row in points]
            axes.errorbar(numbers, means, [100 * (row.std or 0.0) for row in points], capsize=3, **look)
            printed = [(row.given_domains, 100 * row.paper) for row in points if row.paper is not None]
            if printed:
                axes.plot(*zip(*printed, strict=True), "s--", ms=3, lw=1, color=colour)
            handles[label] = Line2D([], [], **look)
        for row in section.rows:
            if row.setup == rows[0].setup and row.supervision == "base":
                axes.axhline(100 * row.mean, color=Plain.colour, lw=1.5)
                handles["base"] = Line2D([], [], color=Plain.colour, lw=1.5, label="base")
        if _paper(rows):
            axes.axhline(published.num_domains_curve()["base", 1], color=Plain.colour, lw=1, ls="--")
        plain(axes, "pseudo-domains M", "", _setup_name(rows))
        axes.set_xticks(sorted({row.given_domains for row in rows}))
    grid[0].set_ylabel("class-only accuracy (%)")
    _legend(figure, [*handles.values(), *_paper(section.sweep)])
    return figure


def _label(row: Line, with_m: bool = True) -> str:
    """Return the label that distinguishes a row from others of its panel."""
    given = f"M = {row.given_domains}" if with_m and row.given_domains is not None else ""
    return _short(", ".join(filter(None, (row.supervision, given, row.joint_settings))), 70)


def _variants(rows: Sequence[Line], with_m: bool = True) -> dict[str, tuple[str, int]]:
    """Return, for each label, its supervision's colour and its index among the labels of that supervision.

    A supervision without one, or that this process does not know, has a spare colour.
    """
    known, spare = short_names(), cycle(_SPARE_COLOURS)
    found: dict[str, tuple[str, int]] = {}
    for supervision in dict.fromkeys(row.supervision for row in rows):
        own = known[supervision].colour if supervision in known else ""
        colour = own or next(spare)
        labels = dict.fromkeys(_label(row, with_m) for row in rows if row.supervision == supervision)
        found |= {label: (colour, number) for number, label in enumerate(labels)}
    return found


def _by_setup(rows: Sequence[Line]) -> list[list[Line]]:
    """Return the rows of each algorithm and its settings, in their order."""
    return [list(found) for _, found in groupby(rows, key=lambda row: row.setup)]  # they are sorted by it


def _setup_name(rows: Sequence[Line]) -> str:
    """Return a panel's title."""
    return _short(", ".join(filter(None, (rows[0].algorithm, rows[0].training_settings))), 45)


def _short(text: str, length: int) -> str:
    """Return a text shortened to fit, with dollar signs escaped, as they would begin a formula."""
    return (text if len(text) <= length else f"{text[: length - 1]}…").replace("$", r"\$")


def _paper(rows: Sequence[Line]) -> list[Artist]:
    return [_PAPER] if any(row.paper for row in rows) else []


def _legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Put one legend above all panels, in as many columns as fit, and make room for it."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), int(figure.get_figwidth() / (0.5 + 0.07 * longest))))
    figure.set_figheight(figure.get_figheight() + 0.2 * (math.ceil(len(handles) / columns) - 1))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, fontsize=9)
