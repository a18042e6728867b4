"""The result of Phase 1, its tables and its figure: the choice of M, the pseudo-domains' clients and similarities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from jdfl_lightning.clustering.criteria import other_elbows
from jdfl_lightning.joint.targets import default_alpha, graded_table
from jdfl_lightning.report.run import PALETTE, Drawing, heat_map, plain, right, screen_table
from jdfl_lightning.storage.discoveries import read_discovery

_SHAPES = "os^DvP*X<>"
_INERTIA, _SILHOUETTE = PALETTE[:2]
_MANY = 60
"""Number of clients from which on a figure no longer names any."""
_MOST_CELLS = 12
"""Number of pseudo-domains up to which the similarities are written into their cells."""
_PLOT = (300.0, 270.0)
"""Width and height of the clients' panel, roughly, in points."""


class Discovery(dict[str, Any]):
    """The result of Phase 1: the content of ``discovery.json``, with tables and a figure.

    Args:
        record: the content; `GroupDomains.record` gives it without a federation.
        folder: the folder it was read from; `Experiment.discovery` takes it.
    """

    def __init__(self, record: Mapping[str, Any], folder: Path | None = None) -> None:
        super().__init__(record)
        self.folder = folder

    @classmethod
    def read(cls, folder: str | Path) -> Discovery:
        """Read the discovery of a run, or of `discover`.

        Args:
            folder: the folder, which has a ``discovery.json``.
        """
        return cls(read_discovery(Path(folder)), Path(folder))

    def __repr__(self) -> str:
        """Show the result in one line."""
        ari = f", ARI {self.ari:.2f}" if self.ari is not None else ""
        return f"Discovery({self.folder}, M = {self.num_domains}{ari})"

    def _repr_html_(self) -> str:
        """Show the figure in a notebook."""
        return self.plot().as_html("Phase 1")

    @property
    def num_domains(self) -> int:
        """M, the number of pseudo-domains."""
        return int(self["num_domains"])

    @property
    def ari(self) -> float | None:
        """Agreement with the true domains: 1 for the same groups, about 0 by chance; None if they are not known."""
        return self.get("ari")

    @property
    def clients(self) -> pd.DataFrame:
        """The pseudo-domain of each client and, where it is known, its true domain."""
        found = {client: {"pseudo_domain": domain} for client, domain in self["assignments"].items()}
        for client, true_domain in self.get("true_domains", {}).items():
            found[client]["true_domain"] = true_domain
        for client, joined in self.get("joined", {}).items():
            found[client] = {"pseudo_domain" if name == "domain" else name: value for name, value in joined.items()}
        numbers = [int(client) if str(client).isdecimal() else client for client in found]  # groups of data have names
        return pd.DataFrame(list(found.values()), index=pd.Index(numbers, name="client"))

    @property
    def choice(self) -> pd.DataFrame:
        """Inertia and silhouette for each number M that was tried."""
        table = pd.DataFrame({"inertia": self["inertias"], "silhouette": self["silhouettes"]})
        table.index = table.index.astype(int)
        return table.sort_index().rename_axis("num_domains")

    def graded_weights(self, alpha: float | None = None, tau: float = 0.1) -> pd.DataFrame:
        """Return the weights that graded targets give to each pseudo-domain, a row for a client's own one.

        Args:
            alpha: mass on the own pseudo-domain; the paper's if not given.
            tau: temperature over the similarities.
        """
        weights = _graded_weights(self, alpha, tau)[1]
        return pd.DataFrame(weights.numpy()).rename_axis("own", axis=0).rename_axis("pseudo_domain", axis=1)

    def plot(self) -> Drawing:
        """Draw how M was chosen, how similar the pseudo-domains are, and where the clients lie."""
        return draw_discovery(self)


def discovery_tables(record: Mapping[str, Any], alpha: float | None, tau: float) -> list[Table]:
    """Return the tables of Phase 1 for a terminal.

    Args:
        record: ``discovery.json``.
        alpha: mass of graded targets on the own pseudo-domain; None for the paper's.
        tau: their temperature.
    """
    return [choice_table(record), domains_table(record), graded_weights_table(record, alpha, tau)]


def choice_table(record: Mapping[str, Any]) -> Table:
    """Return inertia and silhouette for each M, with the M that each criterion picks and the M used."""
    by = escape(f"{record['criterion']}{': ' + record['note'] if record['note'] else ''}")
    title = f"M = {record['num_domains']} ({by})"
    choice = Discovery(record).choice
    others = [f"{pick} with {last}" for last, pick in other_elbows(choice["inertia"].to_dict()).items()]
    caption = f"the elbow depends on --clustering.max_domains: {', '.join(others)}" if others else None
    rows = []
    for m, inertia, silhouette in choice.itertuples():
        marks = [name for name, pick in record["picks"].items() if pick == m]
        marks += ["taken"] if m == record["num_domains"] else []
        rows.append([str(m), f"{inertia:.3f}", "-" if pd.isna(silhouette) else f"{silhouette:.3f}", ", ".join(marks)])
    return screen_table(title, [*right("M", "inertia", "silhouette"), ""], rows, caption)


def domains_table(record: Mapping[str, Any]) -> Table:
    """Return how many clients of each true domain are in each pseudo-domain, with ARI and NMI where it is known."""
    truth: dict[str, str] = record.get("true_domains") or dict.fromkeys(record["assignments"], "clients")
    names = list(dict.fromkeys(truth.values()))
    counts = Counter((domain, truth[client]) for client, domain in record["assignments"].items())
    title = "clients of each pseudo-domain"
    if "ari" in record:
        title = f"clients of each true domain, ARI {record['ari']:.3f}, NMI {record['nmi']:.3f}"
    left_out = ", ".join(record["left_out"])
    caption = f"without a usable update: client {left_out}" if left_out else None
    rows = [[str(m), *(str(counts[m, name] or "") for name in names)] for m in range(record["num_domains"])]
    return screen_table(title, right("pseudo-domain", *names), rows, caption)


def graded_weights_table(record: Mapping[str, Any], alpha: float | None, tau: float) -> Table:
    """Return the weights that graded targets give to each pseudo-domain."""
    alpha, weights = _graded_weights(record, alpha, tau)
    heads = right("client of", *map(str, range(len(weights))))
    rows = [[str(domain), *(f"{weight:.3f}" for weight in row)] for domain, row in enumerate(weights.tolist())]
    return screen_table(f"graded weights, alpha {alpha:g}, tau {tau:g}", heads, rows)


def _graded_weights(record: Mapping[str, Any], alpha: float | None, tau: float) -> tuple[float, Tensor]:
    similarities = torch.tensor(record["similarities"], dtype=torch.float64)
    alpha = default_alpha(len(similarities)) if alpha is None else alpha
    return alpha, graded_table(similarities, alpha, tau)


def draw_discovery(record: Mapping[str, Any]) -> Drawing:
    """Draw how M was chosen, how similar the pseudo-domains are, and where the clients lie."""
    figure = Drawing(figsize=(15, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.1, 1, 1.2])
    _draw_choice(left, record)
    similarities = record["similarities"]
    texts: list[list[str]] | None = None if len(similarities) <= _MOST_CELLS else []
    look: dict[str, Any] = {"vmin": -1, "vmax": 1, "cmap": "RdBu_r"}
    image = heat_map(
        middle, similarities, "cosine similarity of centroids", lambda value: abs(value) > 0.6, texts, **look
    )
    ticks = range(0, record["num_domains"], -(-record["num_domains"] // _MOST_CELLS))
    middle.set(xticks=ticks, yticks=ticks, xlabel="pseudo-domain", ylabel="pseudo-domain")
    figure.colorbar(image, ax=middle)
    _draw_clients(right, record)
    return figure


def _draw_choice(axes: Axes, record: Mapping[str, Any]) -> None:
    choice, chosen = Discovery(record).choice, record["num_domains"]
    silhouettes = choice["silhouette"].dropna()
    axes.plot(choice["inertia"], "o-", color=_INERTIA, label="inertia")
    axes.axvline(chosen, color="black", lw=1, ls=":")
    ari = f", ARI {record['ari']:.2f}" if "ari" in record else ""
    plain(axes, "pseudo-domains M", "inertia", f"M = {chosen} ({record['criterion']}){ari}")
    axes.yaxis.label.set_color(_INERTIA)
    axes.set_xticks(choice.index)
    if len(silhouettes):
        other = axes.twinx()
        other.plot(silhouettes, "s--", color=_SILHOUETTE, ms=4)
        other.set_ylabel("silhouette", color=_SILHOUETTE)
        other.spines[["top"]].set_visible(False)


def _draw_clients(axes: Axes, record: Mapping[str, Any]) -> None:
    truth = record.get("true_domains", {})
    names = list(dict.fromkeys(truth.values())) or [""]
    colours = [PALETTE[domain % len(PALETTE)] for domain in range(record["num_domains"])]
    few = len(record["projection"]) <= _MANY
    for name, marker in zip(names, _SHAPES * (len(names) // len(_SHAPES) + 1), strict=False):
        members = [client for client in record["projection"] if truth.get(client, "") == name]
        x, y = np.reshape([record["projection"][client] for client in members], (-1, 2)).T
        shades = [colours[record["assignments"][client]] for client in members]
        axes.scatter(x, y, c=shades, marker=marker, s=60 if few else 14, alpha=0.8, lw=0)
        axes.scatter([], [], c="gray", marker=marker, label=name or "client")
    for client in _named(record["projection"]) if few else ():
        point = record["projection"][client]
        axes.annotate(client, point, xytext=(6, 4), textcoords="offset points", fontsize=7, color="dimgray")
    for domain, colour in enumerate(colours):
        axes.scatter([], [], c=colour, marker="s", label=f"pseudo-domain {domain}")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    plain(axes, "first principal component", "second", "updates: colour found, shape true domain")


def _named(projection: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the clients whose numbers can stand beside their points without touching a point or another number.

    >>> _named({"0": (0.0, 0.0), "1": (1.0, 1.0), "2": (1.0, 0.99)})
    ['0', '1']
    """
    points = np.array(list(projection.values()))
    extent = np.ptp(points, axis=0)
    points = (points - points.min(axis=0)) * _PLOT / np.where(extent == 0, 1, extent)
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    found = []
    for client, (x, y) in zip(projection, points, strict=True):
        box = Bbox.from_extents(x + 5.5, y + 3, x + 7 + 5 * len(client), y + 11)
        if not any(map(box.overlaps, taken)):
            found.append(client)
            taken.append(box)
    return found
