"""One run: its tables and its curves."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from jdfl_lightning.storage.folder import SavedRun
from jdfl_lightning.storage.names import DOMAIN_PREFIX, UNSEEN_PREFIX, Which
from jdfl_lightning.supervision import supervision_name

PALETTE = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"),
    *("#56b4e9", "#8c6d00", "#000000", "#999999", "#7b3294"),
)
"""Colours of lines and points: Okabe's and Ito's, which can be told apart with any colour vision, and three more."""
_LINE_STYLES = ("-", "--", "-.", ":")


def line_look(place: int) -> dict[str, Any]:
    """Return colour and style of one of several lines; those that share a colour differ in style.

    >>> line_look(0), line_look(7)
    ({'color': '#0072b2', 'ls': '-'}, {'color': '#0072b2', 'ls': '--'})
    """
    count = 7  # without black, which is for the whole, and the greys beside it
    return {"color": PALETTE[place % count], "ls": _LINE_STYLES[place // count % len(_LINE_STYLES)]}


def right(*names: str) -> list[Column]:
    """Return numeric columns for a table in a terminal."""
    return [Column(escape(name), justify="right") for name in names]


def percent(value: float | None, sign: bool = False) -> str:
    """Return a share as per cent with two digits; a dash if there is none.

    >>> percent(0.6787), percent(-0.00251, sign=True), percent(None)
    ('67.87', '-0.25', '-')
    """
    return "-" if value is None or math.isnan(value) else f"{100 * value:{'+' if sign else ''}.2f}"


def screen_table(
    title: str | Text | None,
    heads: Iterable[str | Column],
    rows: Iterable[Iterable[str | Text]],
    caption: str | Text | None = None,
) -> Table:
    """Return a table for a terminal.

    Args:
        title: what stands above it.
        heads: the columns.
        rows: the cells of each row.
        caption: what stands below it.
    """
    table = Table(*heads, title=title, title_justify="left", caption=caption, caption_justify="left")
    for cells in rows:
        table.add_row(*cells)
    return table


def accuracy_table(title: str, rows: Mapping[Which, Mapping[str, float]] | Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table of accuracies in per cent: overall, each domain, the worst one, validation, unseen domains.

    Args:
        title: the table's title.
        rows: metrics by the row's name.
    """
    names = list(next(iter(rows.values())))
    columns = {"test/acc": "overall"}
    columns |= {name: name.removeprefix(DOMAIN_PREFIX) for name in names if name.startswith(DOMAIN_PREFIX)}
    columns |= {"test/acc_worst": "worst"} | ({"val/acc": "validation"} if "val/acc" in names else {})
    columns |= {n: f"{n.removeprefix(UNSEEN_PREFIX)} (unseen)" for n in names if n.startswith(UNSEEN_PREFIX)}
    cells = [
        [which, f"{row['round']:.0f}", *(f"{100 * row[column]:.2f}" for column in columns)]
        for which, row in rows.items()
    ]
    return screen_table(title, ["", *right("round", *columns.values())], cells)


def run_table(run: SavedRun) -> Table:
    """Return the table shown at the end of a run: the rounds whose weights are saved."""
    images = {"test": "test images, as in the paper", "val": "validation images"}
    how = f", best by {images[run.select]}" if run.select in images else ""
    return accuracy_table(f"class-only accuracy (%){how}", run.ends)


def frame(rows: Sequence[Mapping[str, Any]], index: str | None = None) -> pd.DataFrame:
    """Return rows as a table for Python.

    Args:
        rows: the cells by their columns.
        index: the column that names the rows; they are numbered if it is not given.
    """
    table = pd.DataFrame(rows)
    return table if index is None else table.set_index(index)


def accuracy_html(rows: Mapping[Which, Mapping[str, float]]) -> str:
    """Return accuracies as an HTML table in per cent, with the names escaped.

    Args:
        rows: the metrics of each kind of saved weights.
    """
    names = {"round": "round", "test/acc": "overall", "test/acc_worst": "worst domain"}
    columns = next(iter(rows.values()))
    domains = {name: name.removeprefix(DOMAIN_PREFIX) for name in columns if name.startswith(DOMAIN_PREFIX)}
    table = pd.DataFrame(rows).T[[*names, *domains]].rename(columns=names | domains)
    percent = table.drop(columns="round").mul(100).map("{:.2f}".format)
    percent.insert(0, "round", table["round"].astype(int))
    return str(percent.to_html(border=0))


class Drawing(Figure):
    """A figure that a notebook shows even without pyplot."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=100)
        return out.getvalue()

    def as_html(self, words: str) -> str:
        """Return the figure as an inline picture.

        Args:
            words: what is seen, for readers who cannot see it.
        """
        return f'<img alt="{words}" src="data:image/png;base64,{base64.b64encode(self._repr_png_()).decode()}">'


def plain(axes: Axes, xlabel: str, ylabel: str, title: str) -> None:
    """Set labels, a title and a light style of axes."""
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def over_rounds(axes: Axes) -> None:
    """Number whole rounds, and show lines that have one round only as points; called when all lines are there."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for line in axes.get_lines():
        if np.size(line.get_xdata()) == 1 and line.get_marker() == "None":
            line.set_marker("o")


def heat_map(
    axes: Axes,
    values: Any,
    title: str,
    dark: Callable[[float], bool],
    texts: Sequence[Sequence[str]] | None = None,
    size: int = 8,
    **look: Any,
) -> AxesImage:
    """Draw a table as colours.

    Args:
        axes: where.
        values: the numbers, row by row.
        title: of the axes.
        dark: whether the colour of a number is so dark that its text is white.
        texts: what stands in the cells: the numbers if not given, nothing if empty.
        size: of the texts.
        look: colours and their range.
    """
    numbers = np.asarray(values, float)
    if texts is None:
        texts = [["" if math.isnan(number) else f"{number:.2f}" for number in row] for row in numbers]
    for (row, column), text in np.ndenumerate(np.array(texts)):
        if text:
            colour = "white" if dark(float(numbers[row, column])) else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)
    axes.set_title(title, loc="left", fontsize=10)
    return axes.imshow(numbers, **look)


def draw_curves(run: SavedRun) -> Drawing:
    """Draw accuracy (overall, for each domain, on unseen and validation images) and training loss over the rounds."""
    figure = Drawing(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    rows = frame(run.rows, "round")
    evaluated = 100 * rows[rows["test/acc"].notna()]
    looks = map(line_look, range(len(run.domains) + len(run.unseen)))
    for domain in run.domains:
        left.plot(evaluated[DOMAIN_PREFIX + domain], lw=1.2, label=domain, **next(looks))
    for domain in run.unseen:
        values = evaluated[UNSEEN_PREFIX + domain]
        left.plot(values, lw=1.2, marker="x", ms=4, label=f"{domain} (unseen)", **next(looks))
    if "val/acc" in evaluated:
        left.plot(evaluated["val/acc"], lw=1.6, ls=":", color="black", label="validation")
    left.plot(evaluated["test/acc"], lw=2.2, color="black", label="overall")
    which, kept = next(iter(run.ends.items()))
    label = f"{which} {100 * kept['test/acc']:.2f}, round {kept['round']:.0f}"
    left.plot(kept["round"], 100 * kept["test/acc"], "o", color="black", mfc="white", label=label)
    lines = len(left.get_lines())  # beside the curves, which may be anywhere
    left.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, ncols=math.ceil(lines / 18))
    algorithm = run.config["algorithm"]["class_path"].rpartition(".")[2]
    data = run.config["data"]["class_path"].rpartition(".")[2]
    title = f"{data}, {algorithm}, {supervision_name(run.config['supervision'])}, seed {run.config['seed_everything']}"
    plain(left, "round", "class-only accuracy (%)", title)
    right.plot(rows["train/loss"], lw=1.5, color="dimgray")
    plain(right, "round", "training loss", "")
    for axes in (left, right):
        over_rounds(axes)
    return figure
