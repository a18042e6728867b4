"""Tables and figures of the details of a finished run, and of a sweep over Phase 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from matplotlib.axes import Axes
from rich.table import Column, Table

from jdfl_lightning.core.errors import StorageError
from jdfl_lightning.core.settings import flat_settings
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.report import published
from jdfl_lightning.report.run import (
    Drawing,
    frame,
    heat_map,
    over_rounds,
    percent,
    plain,
    right,
    screen_table,
)
from jdfl_lightning.storage.details import read_findings
from jdfl_lightning.storage.trust import saved_settings

_MOST_NUMBERS, _MOST_NAMES = 20, 40
"""Classes up to which a confusion matrix has numbers, and names."""
_FEW = 12
"""Number of pseudo-domains up to which a heat map has its numbers."""


def details_tables(details: Mapping[str, Any]) -> list[Table]:
    """Return tables of per-class accuracies and calibration, of chosen pseudo-domains, and of clients' own models.

    Args:
        details: ``evaluation.json``.
    """
    own = [_personal_table(details["personal"])] if "personal" in details else []
    parts = {part: details[part] for part in ("test", "unseen") if part in details}
    if not parts:
        return own
    title = f"{details['weights']} weights, round {details['round']}, score {details['score']} (%)"
    columns = [
        {
            "accuracy": part["accuracy"],
            "balanced accuracy": part["balanced_accuracy"],
            "mean over domains": part["mean_over_domains"],
            "standard deviation over domains": part["std_over_domains"],
            **{f"calibration error, {score}": part["calibration_error"][score] for score in ("max", "sum")},
            **{f"class {name}": accuracy for name, accuracy in part["classes"].items()},
        }
        for part in parts.values()
    ]
    rows = [[name, *(percent(column[name]) for column in columns)] for name in columns[0]]
    tables = [screen_table(title, ["", *right(*parts)], rows)]
    domains = {name: (part, domain) for part in parts for name, domain in parts[part]["domains"].items()}
    num_domains = len(next(iter(domains.values()))[1]["pseudo_domains"])
    if num_domains > 1:
        rows = [
            [name if part == "test" else f"{name} ({part})", str(of["images"]), *map(percent, of["pseudo_domains"])]
            for name, (part, of) in domains.items()
        ]
        heads: list[str | Column] = ["", *right("images", *map(str, range(num_domains)))]
        tables.append(screen_table("images by the pseudo-domain of their largest output (%)", heads, rows))
    return [*tables, *own]


def _personal_table(personal: Mapping[str, Any]) -> Table:
    """Return the accuracies of the global model, of clients' own and of fine-tuned ones over the clients."""
    title = f"models at the clients, round {personal['round']}, on the test images of the client's domain (%)"
    rows = [
        [name, str(found["clients"]), *(percent(found[what]) for what in ("mean", "worst", "std"))]
        for name, found in personal["models"].items()
    ]
    return screen_table(title, ["", *right("clients", "mean", "worst", "standard deviation")], rows)


def draw_confusion(matrices: Mapping[str, Sequence[Sequence[int]]], class_names: Sequence[str]) -> Drawing:
    """Draw the confusion matrix of each part: shares of the images of a true class, and their numbers.

    Args:
        matrices: by part, the numbers of images: a row for each true class, a column for each predicted one.
        class_names: the classes.
    """
    count = len(class_names)
    side = min(12.0, 2.6 + 0.42 * count)
    figure = Drawing(figsize=(side * len(matrices), side), layout="constrained")
    grid = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, (part, rows) in zip(grid, matrices.items(), strict=True):
        shares = [[100 * number / max(1, sum(row)) for number in row] for row in rows]
        numbers = [list(map(str, row)) for row in rows] if count <= _MOST_NUMBERS else []
        look: dict[str, Any] = {"size": 7, "cmap": "Blues", "vmin": 0, "vmax": 100}
        picture = heat_map(axes, shares, f"{part} images", lambda share: share > 55, numbers, **look)
        names = [name.replace("$", r"\$") for name in class_names] if count <= _MOST_NAMES else []
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set(xlabel="predicted class", ylabel="true class")
    figure.colorbar(picture, ax=list(grid), label="share of the true class (%)", shrink=0.8)
    return figure


def draw_targets(learned: Tensors, rows: Sequence[Mapping[str, float]]) -> Drawing | None:
    """Draw how the table of a supervision changed; None if it learns none.

    Args:
        learned: its record, with ``start`` and ``table``, (M, M), or (C, M, M) of which the mean over classes is shown.
        rows: ``metrics.csv``, with ``targets/entropy`` and ``targets/moved``.
    """
    if not {"start", "table"} <= set(learned) or not all("targets/entropy" in row for row in rows[-1:]):
        return None
    both = [learned[name].double() for name in ("start", "table")]
    start, table = (each.reshape(-1, *each.shape[-2:]).mean(dim=0) for each in both)
    figure = Drawing(figsize=(15, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.3])
    last = f"after round {rows[-1]['round']:.0f}"
    for axes, shown, title in ((left, start, "before round 1"), (middle, table, last)):
        each = ", mean over classes" if learned["table"].ndim > 2 else ""
        texts: list[list[str]] | None = None if len(shown) <= _FEW else []
        look: dict[str, Any] = {"vmin": 0, "vmax": 1, "cmap": "Blues"}
        image = heat_map(axes, shown, f"weights {title}{each}", lambda value: value > 0.6, texts, **look)
        if texts is None:
            axes.set(xticks=range(len(shown)), yticks=range(len(shown)))
        axes.set(xlabel="mass on pseudo-domain", ylabel="client's pseudo-domain")
        figure.colorbar(image, ax=axes)
    _draw_change(right, rows, math.log(table.shape[1]))
    return figure


def _draw_change(axes: Axes, rows: Sequence[Mapping[str, float]], most: float) -> None:
    table = frame(rows, "round")
    look: dict[str, Any] = {"ms": 3, "color": "tab:blue"}
    axes.plot(table["targets/entropy"], "o-", label="entropy, mean", **look)
    axes.plot(table["targets/entropy_lowest"], "v--", alpha=0.6, label="entropy, lowest row", **look)
    axes.axhline(most, color="tab:blue", lw=1, ls=":", label="entropy, even row")
    plain(axes, "round", "entropy of a row (nats)", "how the rows changed")
    axes.yaxis.label.set_color("tab:blue")
    axes.set_ylim(0, 1.05 * max(most, 0.1))
    over_rounds(axes)
    other = axes.twinx()
    other.plot(table["targets/moved"], "s-", ms=3, color="tab:orange", label="moved, mean")
    other.set_ylabel("mass moved since the start", color="tab:orange")
    other.set_ylim(bottom=0)
    other.spines[["top"]].set_visible(False)
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], fontsize=7, loc="best")


Grid: TypeAlias = dict[tuple[int, int, str], float]
"""(E_0, batch size, layers) -> value."""


def grids(folder: Path) -> list[tuple[str, pd.DataFrame, Grid]]:
    """Return title, measured grid and published grid (empty where there is none) of all quantities of a sweep.

    A measured grid has the means over seeds: a row for each E_0, a column for each batch size and choice of layers.
    """
    findings, settings = read_findings(folder), saved_settings(folder)
    if not findings:
        raise StorageError(f"Expected a finished case but {folder} has none.")
    table = pd.DataFrame(map(asdict, findings))
    clients, domains, seeds = findings[0].clients, findings[0].domains, table["seed"].nunique()
    flat = dict(flat_settings(settings))
    size = f"{flat['data.init_args.size']} px, " if "data.init_args.size" in flat else ""
    of = f"{clients} clients, {size}{seeds} seed{'s' * (seeds > 1)}"
    pacs = str(flat.get("data.class_path")).rpartition(".")[2] == "PACS"
    elbows = {case[1:]: share for case, share in published.elbow_grid().items() if case[0] == clients}
    shown: list[tuple[str, pd.Series, Grid]] = [
        (f"ARI with M = {domains} ({of})", table["ari"], published.ari_grid() if pacs else {}),
        (f"share of seeds with the elbow at {domains}", table["elbow"] == domains, elbows if pacs else {}),
        (f"share of seeds with the silhouette at {domains}", table["silhouette"] == domains, {}),
    ]
    if findings[0].sketch_dim is not None:
        name = f"ARI with M = {domains}, sketches of {findings[0].sketch_dim}"
        shown.append((name, table["sketch_ari"], {}))
    cases = [table["epochs"], table["batch_size"], table["layers"]]
    return [(title, _as_table(values.groupby(cases).mean()), beside) for title, values, beside in shown]


def _as_table(by_case: pd.Series) -> pd.DataFrame:
    return by_case.unstack([1, 2]).sort_index(ascending=False).sort_index(axis=1)


def _paper(beside: Grid) -> str:
    clients = "40 clients" if beside == published.ari_grid() else "as many clients"
    return f"the paper ({clients}, 112 px, {published.DISCOVERY_SEEDS} seeds)"


def diagnosis_tables(folder: Path) -> list[Table]:
    """Return the grids of a sweep for a terminal, the paper's values after a slash."""
    tables = []
    for title, measured, beside in grids(folder):
        paper = {case: f" / {value:.2f}" for case, value in beside.items()}
        rows = [
            [str(epochs)]
            + ["" if math.isnan(v) else f"{v:.2f}{paper.get((epochs, *column), '')}" for column, v in row.items()]
            for epochs, row in measured.iterrows()
        ]
        heads = right("E_0", *(f"b{batch_size}-{layers}" for batch_size, layers in measured))
        tables.append(screen_table(f"{title} / {_paper(beside)}" if beside else title, heads, rows))
    return tables


def draw_diagnosis(folder: Path) -> Drawing:
    """Draw the grids of a sweep as heat maps, the paper's beside them."""
    shown = grids(folder)
    panels: list[tuple[str, pd.DataFrame]] = []
    for title, measured, beside in sorted(shown, key=lambda entry: not entry[2]):  # those of the paper in pairs, first
        panels.append((title, measured))
        if beside:
            panels.append((_paper(beside), _as_table(pd.Series(beside))))
    height = -(-len(panels) // 2)
    figure = Drawing(figsize=(15, 3.2 * height), layout="constrained")
    axes = figure.subplots(height, 2, squeeze=False)
    for place in axes.flat[len(panels) :]:
        place.set_axis_off()
    look: dict[str, Any] = {"vmin": 0, "vmax": 1, "cmap": "cividis", "aspect": "auto"}
    for place, (title, values) in zip(axes.flat, panels, strict=False):
        cells = values.reindex_like(shown[0][1])
        image = heat_map(place, cells, title, lambda value: value < 0.5, **look)
        place.set_xticks(range(cells.shape[1]), [f"b{batch_size}-{layers}" for batch_size, layers in cells], fontsize=8)
        place.set_yticks(range(len(cells)), cells.index)
        place.set_ylabel("$E_0$")
    figure.colorbar(image, ax=axes, shrink=0.6, aspect=40)
    return figure
