"""A sweep over Phase 1: how well the clusters agree with the domains, and how often the right M was found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from rich.table import Table

from jdfl_lightning.core.errors import StorageError
from jdfl_lightning.core.settings import flat_settings
from jdfl_lightning.report import published
from jdfl_lightning.report.run import Drawing, heat_map, new_figure, right
from jdfl_lightning.storage.details import Finding, read_findings
from jdfl_lightning.storage.trust import saved_settings

Grid = dict[tuple[int, int, str], float]
"""(E_0, batch size, layers) -> value."""


def grid(findings: Sequence[Finding], value: Callable[[Finding], float | None]) -> Grid:
    """Return the mean over seeds of a value, for each case that has one."""
    values: dict[tuple[int, int, str], list[float]] = {}
    for finding in findings:
        if (found := value(finding)) is not None:
            values.setdefault((finding.epochs, finding.batch_size, finding.layers), []).append(found)
    return {case: mean(found) for case, found in values.items()}


def grids(folder: Path) -> list[tuple[str, Grid, Grid]]:
    """Return title, measured grid and published grid (empty where there is none) of all quantities of a sweep."""
    findings, settings = read_findings(folder), saved_settings(folder)
    if not findings:
        raise StorageError(f"Expected a finished case but {folder} has none.")
    clients, domains, seeds = findings[0].clients, findings[0].domains, len({finding.seed for finding in findings})
    flat = dict(flat_settings(settings))
    size = f"{flat['data.init_args.size']} px, " if "data.init_args.size" in flat else ""
    of = f"{clients} clients, {size}{seeds} seed{'s' * (seeds > 1)}"
    pacs = str(flat.get("data.class_path")).rpartition(".")[2] == "PACS"
    elbows = {case[1:]: share for case, share in published.elbow_grid().items() if case[0] == clients}
    shown = [
        (f"ARI with M = {domains} ({of})", lambda f: f.ari, published.ari_grid() if pacs else {}),
        (f"share of seeds with the elbow at {domains}", lambda f: float(f.elbow == domains), elbows if pacs else {}),
        (f"share of seeds with the silhouette at {domains}", lambda f: float(f.silhouette == domains), {}),
    ]
    if findings[0].sketch_dim is not None:
        name = f"ARI with M = {domains}, sketches of {findings[0].sketch_dim}"
        shown.append((name, lambda f: f.sketch_ari, {}))
    return [(title, grid(findings, value), beside) for title, value, beside in shown]


def _paper(beside: Grid) -> str:
    clients = "40 clients" if beside == published.ari_grid() else "as many clients"
    return f"the paper ({clients}, 112 px, {published.DISCOVERY_SEEDS} seeds)"


def _axes_of(measured: Grid) -> tuple[list[int], list[tuple[int, str]]]:
    rows = sorted({epochs for epochs, _, _ in measured}, reverse=True)
    return rows, sorted({(batch_size, layers) for _, batch_size, layers in measured})


def diagnosis_tables(folder: Path) -> list[Table]:
    """Return the grids of a sweep for a terminal, the paper's values after a slash."""
    tables = []
    for title, measured, beside in grids(folder):
        rows, columns = _axes_of(measured)
        names = right("E_0", *(f"b{batch_size}-{layers}" for batch_size, layers in columns))
        table = Table(*names, title=f"{title}{f' / {_paper(beside)}' if beside else ''}", title_justify="left")
        for epochs in rows:
            cells = []
            for column in columns:
                case = (epochs, *column)
                paper = f" / {beside[case]:.2f}" if case in beside else ""
                cells.append(f"{measured[case]:.2f}{paper}" if case in measured else "")
            table.add_row(str(epochs), *cells)
        tables.append(table)
    return tables


def draw_diagnosis(folder: Path) -> Drawing:
    """Draw the grids of a sweep as heat maps, the paper's beside them."""
    shown = grids(folder)
    panels: list[tuple[str, Grid]] = []
    for title, measured, beside in sorted(shown, key=lambda entry: not entry[2]):  # those of the paper in pairs, first
        panels.append((title, measured))
        if beside:
            panels.append((_paper(beside), beside))
    rows, columns = _axes_of(shown[0][1])
    height = -(-len(panels) // 2)
    figure = new_figure(15, 3.2 * height)
    axes = figure.subplots(height, 2, squeeze=False)
    for place in axes.flat[len(panels) :]:
        place.set_axis_off()
    for place, (title, values) in zip(axes.flat, panels, strict=False):
        image = _draw_grid(place, values, rows, columns, title)
    figure.colorbar(image, ax=axes, shrink=0.6, aspect=40)
    return figure


def _draw_grid(
    axes: Axes, values: Grid, rows: Sequence[int], columns: Sequence[tuple[int, str]], title: str
) -> AxesImage:
    cells = [[values.get((epochs, *column), float("nan")) for column in columns] for epochs in rows]
    texts = [["" if math.isnan(value) else f"{value:.2f}" for value in line] for line in cells]
    image = heat_map(axes, cells, texts, lambda value: value < 0.5, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    axes.set_xticks(range(len(columns)), [f"b{batch_size}-{layers}" for batch_size, layers in columns], fontsize=8)
    axes.set_yticks(range(len(rows)), [str(epochs) for epochs in rows])
    axes.set_ylabel("$E_0$")
    axes.set_title(title, loc="left", fontsize=10)
    return image
