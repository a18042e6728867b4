"""The report's pictures: what is drawn are the numbers, each once, and the names say which is which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from helpers import every
from jdfl_lightning.report import published
from jdfl_lightning.report.comparison import Section
from jdfl_lightning.report.figures import ablation_figure, accuracy_figure, num_domains_figure
from run_folders import write_run
from test_report import RUNS, only_section, report, short


def numbers(values: Any) -> list[float]:
    """Data of a picture, rounded."""
    return [round(float(value), 6) for value in np.asarray(values)]


def lines_of(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    """The labelled lines of a panel: x and y."""
    named = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): (numbers(line.get_xdata()), numbers(line.get_ydata())) for line in named}


def bars_of(section: Section) -> list[Rectangle]:
    return [patch for patch in ablation_figure(section).axes[0].patches if isinstance(patch, Rectangle)]


def heights_of(section: Section) -> list[float]:
    return numbers([bar.get_height() for bar in bars_of(section)])


def labels(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def assert_apart(bars: Sequence[Rectangle]) -> None:
    for left, right in pairwise(bars):
        assert left.get_x() + left.get_width() <= right.get_x() + 1e-9


def test_curves_and_their_bands() -> None:
    """Seeds 0.2 and 0.4: mean 30 %, deviation sqrt(2 * 0.1**2) = 14.142 %."""
    for seed, level in enumerate((0.2, 0.4)):
        write_run(RUNS / str(seed), short("FedAvg", "base", seed), [level, level + 0.1, level + 0.2])
    (axes,) = accuracy_figure(only_section()).axes
    assert lines_of(axes) == {"base": ([1.0, 2.0, 3.0], [30.0, 40.0, 50.0])}
    (band,) = axes.collections
    assert 0.05 < (band.get_alpha() or 0) < 0.5
    heights = np.asarray(band.get_paths()[0].vertices)[:, 1]
    assert heights.min() == pytest.approx(30 - 200**0.5)
    assert heights.max() == pytest.approx(50 + 200**0.5)
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_one_round_is_a_point() -> None:
    """A line through one point would not be seen; and there are no rounds between whole ones."""
    write_run(RUNS / "a", short(rounds=1), [0.5])
    (axes,) = accuracy_figure(only_section()).axes
    (line,) = axes.get_lines()
    assert line.get_marker() == "o"
    assert [tick for tick in axes.get_xticks() if tick != round(tick)] == []


def test_the_axis_begins_below_what_is_reached_after_a_fifth_of_the_rounds() -> None:
    """Of ten rounds the first two do not count: the lowest of the others is 50 %."""
    write_run(RUNS / "a", short(rounds=10), [0.1, 0.2, *[0.5] * 4, *[0.6] * 4])
    (axes,) = accuracy_figure(only_section()).axes
    assert axes.get_ylim()[0] == pytest.approx(48)


def test_bars_of_the_ablation() -> None:
    for name, best in (("base", 0.5), ("hard", 0.4), ("random", 0.6)):
        for seed, off in enumerate((-0.05, 0.05)):
            write_run(RUNS / f"{name}{seed}", short("FedAvg", name, seed), [best + off] * 3, data=str(seed))
    assert heights_of(only_section()) == [50.0, 40.0, 60.0]
    (axes,) = ablation_figure(only_section()).axes
    seeds = [numbers(line.get_ydata()) for line in axes.get_lines()]
    assert seeds == [[45.0, 55.0], [35.0, 45.0], [55.0, 65.0]]
    dashes = [numbers(np.asarray(line.get_paths()[0].vertices)[:, 1])[0] for line in axes.collections]
    assert dashes == [published.ablation()["pacs_b", name] for name in ("base", "hard", "random")]


@pytest.mark.parametrize(("given", "drawn"), every(3, [((2, 3, 5, 6, 7), 5), ((2, 3, 4, 5, 6, 7), 4), ((2, 3), 2)]))
def test_of_many_given_m_one_is_drawn(given: tuple[int, ...], drawn: int) -> None:
    """PACS has four domains; without M = 4 it is the median, the lower of two."""
    write_run(RUNS / "base", short(), [0.5] * 3)
    for name in ("hard", "graded", "random"):
        for m in given:
            write_run(RUNS / f"{name}{m}", short("FedAvg", name, num_domains=m), [m / 10] * 3, num_domains=m)
    section = only_section()
    assert len(section.rows) == len(section.sweep) + 1 == 3 * len(given) + 1
    names = ["base", *(f"{name}, M = {drawn}" for name in ("hard", "graded", "random"))]
    figure = accuracy_figure(section)
    assert list(lines_of(figure.axes[0])) == labels(figure) == names
    assert heights_of(section) == [50.0] + [10.0 * drawn] * 3
    assert_apart(bars_of(section))
    report()
    assert Path("report/report.md").read_text().count("Where several M were given, one is drawn") == 2


def test_other_settings_are_other_curves_and_bars() -> None:
    """Two temperatures, each over M = 2, 3, 4: two curves over M, and the names say which is which."""
    write_run(RUNS / "base", short(), [0.5] * 3)
    write_run(RUNS / "hard", short("FedAvg", "hard"), [0.5] * 3)
    for tau, level in ((0.1, 0.3), (0.5, 0.6)):
        for m in (2, 3, 4):
            settings = short("FedAvg", "graded", tau=tau, num_domains=m)
            write_run(RUNS / f"{tau}-{m}", settings, [level + m / 100] * 3, num_domains=m)
    section = only_section()
    figure = num_domains_figure(section)
    assert labels(figure) == ["graded, tau 0.1", "graded, tau 0.5", "base", "paper"]
    curves = [c for c in figure.axes[0].containers if isinstance(c, ErrorbarContainer)]
    assert {str(c.get_label()): (numbers(c[0].get_xdata()), numbers(c[0].get_ydata())) for c in curves} == {
        "graded, tau 0.1": ([2.0, 3.0, 4.0], [32.0, 33.0, 34.0]),
        "graded, tau 0.5": ([2.0, 3.0, 4.0], [62.0, 63.0, 64.0]),
    }
    assert figure.axes[0].get_title("left") == "FedAvg"
    names = ["base", "hard", "graded, M = 4, tau 0.1", "graded, M = 4, tau 0.5"]
    assert list(lines_of(accuracy_figure(section).axes[0])) == names
    assert len({line.get_linestyle() for line in accuracy_figure(section).axes[0].get_lines()}) == 2
    assert heights_of(section) == [50.0, 50.0, 34.0, 64.0]
    assert len({bar.get_hatch() for bar in bars_of(section)}) == 2
    assert_apart(bars_of(section))


def test_many_bars_lie_beside_each_other() -> None:
    """Seven bars for each of two algorithms."""
    for algorithm in ("FedAvg", "SCAFFOLD"):
        for tau in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
            write_run(RUNS / f"{algorithm}{tau}", short(algorithm, "graded", tau=tau), [0.5] * 3)
        write_run(RUNS / algorithm, short(algorithm, "hard"), [0.5] * 3)
    assert len(bars_of(only_section())) == 14
    assert_apart(bars_of(only_section()))


def test_seeds_that_evaluated_no_round_in_common_have_no_curve() -> None:
    write_run(RUNS / "a", short(seed=0), [0.5, math.nan, math.nan])
    write_run(RUNS / "b", short(seed=1), [math.nan, math.nan, 0.5])
    assert lines_of(accuracy_figure(only_section()).axes[0]) == {"base": ([], [])}
    report()
