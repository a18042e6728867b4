"""One run: its tables and its curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Table

from jdfl_lightning.run_folder import DOMAIN_PREFIX, Run, Which


def accuracy_table(title: str, rows: Mapping[Which, Mapping[str, float]]) -> Table:
    """Return a table of accuracies in per cent: overall, each domain, the worst one.

    Args:
        title: the table's title.
        rows: metrics by the row's name.
    """
    domains = [name.removeprefix(DOMAIN_PREFIX) for name in next(iter(rows.values())) if name.startswith(DOMAIN_PREFIX)]
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("round", justify="right")
    for name in ("overall", *domains, "worst"):
        table.add_column(escape(name), justify="right")
    for name, row in rows.items():
        values = [row["test/acc"], *(row[DOMAIN_PREFIX + domain] for domain in domains), row["test/acc_worst"]]
        table.add_row(name, f"{row['round']:.0f}", *(f"{100 * value:.2f}" for value in values))
    return table


def run_table(run: Run) -> Table:
    """Return the table that ends a run: its best and its last round."""
    return accuracy_table("class-only accuracy (%)", run.ends)


def _new_figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _plain(axes: Axes, xlabel: str, ylabel: str, title: str) -> None:
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_curves(run: Run, file: Path) -> None:
    """Draw accuracy (overall and for each domain) and training loss against the round."""
    figure = _new_figure(10, 4)
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    rounds = [row["round"] for row in run.rows]
    evaluated = [row for row in run.rows if not math.isnan(row["test/acc"])]
    judged = [row["round"] for row in evaluated]
    for domain in run.domains:
        left.plot(judged, [100 * row[DOMAIN_PREFIX + domain] for row in evaluated], lw=1, alpha=0.7, label=domain)
    left.plot(judged, [100 * row["test/acc"] for row in evaluated], lw=2.2, color="black", label="overall")
    best = run.best
    left.plot(best["round"], 100 * best["test/acc"], "o", color="black", mfc="white")
    left.annotate(
        f"best {100 * best['test/acc']:.2f}",
        (best["round"], 100 * best["test/acc"]),
        xytext=(0, -14),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )
    left.legend(fontsize=8, loc="lower right")
    algorithm = run.config["algorithm"]["class_path"].rpartition(".")[2]
    data = run.config["data"]["class_path"].rpartition(".")[2]
    title = f"{data}, {algorithm}, {run.config['supervision']}, seed {run.config['seed_everything']}"
    _plain(left, "round", "class-only accuracy (%)", title)
    right.plot(rounds, [row["train/loss"] for row in run.rows], lw=1.5, color="tab:gray")
    _plain(right, "round", "training loss", "")
    figure.savefig(file, dpi=130)


def draw_discovery(discovery: dict[str, Any], file: Path) -> None:
    """Draw how M was chosen and how similar the pseudo-domains are."""
    figure = _new_figure(10, 3.6)
    left, right = figure.subplots(1, 2)
    inertias = {int(m): value for m, value in discovery["inertias"].items()}
    chosen = discovery["num_domains"]
    left.plot(list(inertias), list(inertias.values()), "o-", color="tab:blue")
    left.axvline(chosen, color="black", lw=1, ls=":")
    ari = f", ARI {discovery['ari']:.2f}" if "ari" in discovery else ""
    _plain(left, "pseudo-domains M", "inertia", f"M = {chosen} ({discovery['criterion']}){ari}")
    left.set_xticks(list(inertias))
    similarities = discovery["similarities"]
    image = right.imshow(similarities, vmin=-1, vmax=1, cmap="RdBu_r")
    for row, values in enumerate(similarities):
        for column, value in enumerate(values):
            colour = "white" if abs(value) > 0.6 else "black"
            right.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
    right.set(xticks=range(chosen), yticks=range(chosen), xlabel="pseudo-domain", ylabel="pseudo-domain")
    right.set_title("cosine similarity of centroids", loc="left", fontsize=10)
    figure.colorbar(image, ax=right)
    figure.savefig(file, dpi=130)
