"""Tables and figures of the details of a finished run, and of a sweep over Phase 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from rich.table import Table
from torch import Tensor

from jdfl_lightning.core.errors import StorageError
from jdfl_lightning.core.settings import flat_settings
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.report import published
from jdfl_lightning.report.run import Drawing, heat_map, new_figure, over_rounds, plain, right
from jdfl_lightning.storage.details import Finding, read_findings
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
    table = Table("", *right(*parts), title=title, title_justify="left")
    rows: dict[str, list[float | None]] = {
        "accuracy": [part["accuracy"] for part in parts.values()],
        "balanced accuracy": [part["balanced_accuracy"] for part in parts.values()],
        "mean over domains": [part["mean_over_domains"] for part in parts.values()],
        "standard deviation over domains": [part["std_over_domains"] for part in parts.values()],
        "calibration error, max": [part["calibration_error"]["max"] for part in parts.values()],
        "calibration error, sum": [part["calibration_error"]["sum"] for part in parts.values()],
    }
    for name in next(iter(parts.values()))["classes"]:
        rows[f"class {name}"] = [part["classes"][name] for part in parts.values()]
    for name, values in rows.items():
        table.add_row(name, *map(_percent, values))
    domains = {name: (part, domain) for part in parts for name, domain in parts[part]["domains"].items()}
    num_domains = len(next(iter(domains.values()))[1]["pseudo_domains"])
    if num_domains == 1:
        return [table, *own]
    title = "images by the pseudo-domain of their largest output (%)"
    chosen = Table("", *right("images", *map(str, range(num_domains))), title=title, title_justify="left")
    for name, (part, domain) in domains.items():
        label = f"{name} (unseen)" if part == "unseen" else name
        chosen.add_row(label, str(domain["images"]), *map(_percent, domain["pseudo_domains"]))
    return [table, chosen, *own]


def _personal_table(personal: Mapping[str, Any]) -> Table:
    """Return the accuracies of the global model, of clients' own and of fine-tuned ones over the clients."""
    title = f"models at the clients, round {personal['round']}, on the test images of the client's domain (%)"
    columns = right("clients", "mean", "worst", "standard deviation")
    table = Table("", *columns, title=title, title_justify="left")
    for name, found in personal["models"].items():
        table.add_row(name, str(found["clients"]), *(_percent(found[what]) for what in ("mean", "worst", "std")))
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def draw_confusion(matrices: Mapping[str, Sequence[Sequence[int]]], class_names: Sequence[str]) -> Drawing:
    """Draw the confusion matrix of each part: shares of the images of a true class, and their numbers.

    Args:
        matrices: by part, the numbers of images: a row for each true class, a column for each predicted one.
        class_names: the classes.
    """
    count = len(class_names)
    side = min(12.0, 2.6 + 0.42 * count)
    figure = new_figure(side * len(matrices), side)
    grid = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, (part, rows) in zip(grid, matrices.items(), strict=True):
        shares = [[100 * number / max(1, sum(row)) for number in row] for row in rows]
        numbers = [list(map(str, row)) for row in rows] if count <= _MOST_NUMBERS else []
        picture = heat_map(axes, shares, numbers, lambda share: share > 55, 7, cmap="Blues", vmin=0, vmax=100)
        names = [name.replace("$", r"\$") for name in class_names] if count <= _MOST_NAMES else []
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set(xlabel="predicted class", ylabel="true class")
        axes.set_title(f"{part} images", loc="left", fontsize=10)
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
    figure = new_figure(15, 4.4)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.3])
    last = f"after round {rows[-1]['round']:.0f}"
    for axes, shown, title in ((left, start, "before round 1"), (middle, table, last)):
        each = ", mean over classes" if learned["table"].ndim > 2 else ""
        _draw_table(axes, shown, f"weights {title}{each}")
        figure.colorbar(axes.images[0], ax=axes)
    _draw_change(right, rows, math.log(table.shape[1]))
    return figure


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
    over_rounds(axes)
    other = axes.twinx()
    other.plot(rounds, [row["targets/moved"] for row in rows], "s-", ms=3, color="tab:orange", label="moved, mean")
    other.set_ylabel("mass moved since the start", color="tab:orange")
    other.set_ylim(bottom=0)
    other.spines[["top"]].set_visible(False)
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], fontsize=7, loc="best")


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
