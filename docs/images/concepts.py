"""Draw the picture of docs/concepts.md: `python docs/images/concepts.py [FILE]`.

Images, update vectors, pseudo-domains and targets are those of a discovery on the embedded digits with eight clients.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, FancyArrowPatch, Rectangle
from safetensors.torch import load_file
from torch import Tensor

from jdfl_lightning import DigitsDomains, Experiment, GradedTargets, HardTargets, LocalBackend, RandomTargets
from jdfl_lightning.server.run import discover
from jdfl_lightning.storage.discoveries import read_discovery

COLOURS = ["#4477aa", "#cc5566", "#228833", "#aa7722"]
GREY = "#555555"
CLASSES, DOMAIN, DRAWN = 10, 2, 0
ENTRIES = 28  # of the update vectors, to be seen
WIDTH, HEIGHT = 14.0, 4.8
TOP, BOTTOM = 0.80, 0.14
PLACES = {  # name: left, width, title
    "clients": (0.010, 0.165, "Clients\ntheir images stay there"),
    "vectors": (0.215, 0.125, "Update vectors\nof a brief training"),
    "domains": (0.378, 0.155, "Pseudo-domains\nM clusters of clients"),
    "head": (0.580, 0.195, "Joint head\nM x C outputs"),
    "targets": (0.815, 0.172, "Soft targets\nof one image"),
}


def _panel(figure: Figure, name: str, note: str) -> Axes:
    """Return an empty part of the picture, whose unit is its width; the origin is its lower left corner."""
    left, width, title = PLACES[name]
    axes = figure.add_axes((left, BOTTOM, width, TOP - BOTTOM))
    axes.axis("off")
    middle = left + width / 2
    figure.text(middle, 0.97, title, ha="center", va="top", fontsize=13, linespacing=1.35)
    figure.text(middle, 0.10, note, ha="center", va="top", fontsize=10, color=GREY, linespacing=1.35)
    return axes


def _limit(axes: Axes) -> float:
    """Set the limits, which a picture drawn with imshow has changed; return the height."""
    box = axes.get_position()
    height = box.height * HEIGHT / (box.width * WIDTH)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, height)
    axes.set_aspect("auto")
    return height


def draw_clients(figure: Figure, data: DigitsDomains) -> None:
    """Show some images of every client."""
    axes = _panel(figure, "clients", "no image and no domain label\nleaves a client")
    row = _limit(axes) / data.num_clients
    for client in range(data.num_clients):
        bottom = (data.num_clients - 1 - client) * row
        axes.text(0.05, bottom + row / 2, str(client), ha="center", va="center", fontsize=11, color=GREY)
        for place, index in enumerate(data.partition.clients[client][:5].tolist()):
            left, low, side = 0.12 + place * row, bottom + 0.06 * row, 0.88 * row
            axes.imshow(data.images[index], extent=(left, left + side, low, low + side))
            axes.add_patch(Rectangle((left, low), side, side, fill=False, edgecolor="#999999", linewidth=0.5))
    _limit(axes)


def draw_vectors(figure: Figure, vectors: Tensor) -> None:
    """Show the entries in which the clients differ most."""
    axes = _panel(figure, "vectors", f"{ENTRIES} of {vectors.shape[1]:,} entries,\nscaled to length 1")
    row = _limit(axes) / len(vectors)
    shown = vectors[:, vectors.std(dim=0).topk(ENTRIES).indices.sort().values]
    most = float(shown.abs().max())
    for client, vector in enumerate(shown):
        low = (len(vectors) - 1 - client + 0.22) * row
        extent = (0, 1, low, low + 0.56 * row)
        axes.imshow(vector[None], extent=extent, aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most)
        axes.add_patch(Rectangle((0, low), 1, 0.56 * row, fill=False, edgecolor="#999999", clip_on=False))
    _limit(axes)


def draw_domains(figure: Figure, found: dict[str, Any]) -> None:
    """Show the clients in two dimensions, in the colours of their pseudo-domains."""
    axes = _panel(figure, "domains", "k-means, M by elbow;\nseen in two dimensions")
    height = _limit(axes)
    axes.add_patch(Rectangle((0, 0), 1, height, fill=False, edgecolor="#bbbbbb", clip_on=False))
    points = torch.tensor(list(found["projection"].values()))
    low, high = points.amin(dim=0), points.amax(dim=0)
    points = torch.tensor([0.17, 0.27]) + (points - low) / (high - low) * torch.tensor([0.66, height - 0.55])
    assigned = torch.tensor([found["assignments"][client] for client in found["projection"]])
    for domain in range(found["num_domains"]):
        own, colour = points[assigned == domain], COLOURS[domain]
        centre, spread = own.mean(dim=0), float((own.amax(dim=0) - own.amin(dim=0)).max())
        axes.add_patch(Ellipse(tuple(centre.tolist()), 0.22 + spread, 0.22 + spread, color=colour, alpha=0.18, lw=0))
        axes.plot(own[:, 0], own[:, 1], "o", markersize=8, color=colour, alpha=0.85, markeredgecolor="white")
        clients = ", ".join(str(client) for client in torch.nonzero(assigned == domain).flatten().tolist())
        away = 1 if centre[1] > points[assigned != domain][:, 1].mean() else -1  # from the others
        across, up = min(max(float(centre[0]), 0.22), 0.78), float(centre[1]) + away * (0.165 + spread / 2)
        axes.text(across, up, f"clients {clients}", ha="center", va="center", fontsize=11, color=colour)


def _grid(axes: Axes, left: float, low: float, side: float, mass: Tensor | None = None) -> None:
    """Draw the M x C outputs, pseudo-domains from the top; with a mass (M, C), as dark as it is."""
    rows, columns = (len(COLOURS), CLASSES) if mass is None else mass.shape
    for domain in range(rows):
        for label in range(columns):
            share = 0.45 if mass is None else float(mass[domain, label])
            colour = [1 - share * (1 - part) for part in to_rgb(COLOURS[domain])]
            corner = (left + label * side, low + (rows - 1 - domain) * side)
            axes.add_patch(Rectangle(corner, side, side, facecolor=colour, edgecolor="#999999", linewidth=0.5))


def draw_head(figure: Figure, label: int) -> None:
    """Show the outputs, and how a class is read off them."""
    axes = _panel(figure, "head", "the class score is the max over\nthe M outputs of the class")
    height = _limit(axes)
    side, left = 0.079, 0.19
    low = height / 2 - 2 * side + 0.06
    _grid(axes, left, low, side)
    for domain, colour in enumerate(COLOURS):
        axes.text(left - 0.05, low + (3.5 - domain) * side, str(domain), ha="center", va="center", color=colour)
    for number in range(CLASSES):
        axes.text(left + (number + 0.5) * side, low + 4.55 * side, str(number), ha="center", va="center", fontsize=9)
    axes.text(left + 5 * side, low + 5.55 * side, "class", ha="center", va="center", fontsize=11, color=GREY)
    axes.text(
        left - 0.12, low + 2 * side, "pseudo-domain", ha="center", va="center", fontsize=11, color=GREY, rotation=90
    )
    column = left + label * side
    axes.add_patch(Rectangle((column, low), side, 4 * side, fill=False, edgecolor="black", linewidth=1.8))
    arrow = FancyArrowPatch(
        (column + side / 2, low),
        (column + side / 2, low - 1.5 * side),
        arrowstyle="-|>",
        mutation_scale=12,
        color="black",
    )
    axes.add_patch(arrow)
    axes.text(column + side / 2, low - 2.1 * side, f"score of class {label}", ha="center", va="center", fontsize=11)


def draw_targets(figure: Figure, centroids: Tensor, image: Tensor, label: int) -> None:
    """Show the mass that each rule puts on the outputs, for one image of one client."""
    axes = _panel(figure, "targets", f"class {label}, pseudo-domain {DOMAIN};\nrandom has drawn {DRAWN}")
    height = _limit(axes)
    side, left = 0.066, 0.33
    rules = {"hard": HardTargets(4), "graded": GradedTargets(centroids), "random": RandomTargets(4)}
    for place, (name, rule) in enumerate(rules.items()):
        row = rule.table[DRAWN if name == "random" else DOMAIN]
        mass = torch.zeros(len(COLOURS), CLASSES)
        mass[:, label] = row
        low = height - 0.02 - (place + 1) * (4 * side + 0.085) + 0.05
        _grid(axes, left, low, side, mass)
        axes.text(left - 0.05, low + 2 * side, name, ha="right", va="center", fontsize=12)
    size = 0.2
    low = 0.02
    axes.imshow(image, extent=(left, left + size, low, low + size))
    axes.add_patch(Rectangle((left, low), size, size, fill=False, edgecolor="#999999", linewidth=0.5))
    axes.text(left - 0.05, low + size / 2, "image", ha="right", va="center", fontsize=12)
    _limit(axes)


def main(file: Path) -> None:
    """Discover the pseudo-domains of eight clients and draw the way from their images to the targets."""
    data = DigitsDomains(size=16, num_clients=8)
    with tempfile.TemporaryDirectory() as name:
        folder = discover(Experiment(data=data, backend=LocalBackend(), run_dir=str(Path(name) / "run")))
        found, tensors = read_discovery(folder), load_file(folder / "discovery.safetensors")
    of_domain = next(int(client) for client, domain in found["assignments"].items() if domain == DOMAIN)
    example = int(data.partition.clients[of_domain][0])
    label = int(data.labels[example])
    figure = plt.figure(figsize=(WIDTH, HEIGHT), facecolor="white")
    draw_clients(figure, data)
    draw_vectors(figure, tensors["updates/u"])
    draw_domains(figure, found)
    draw_head(figure, label)
    draw_targets(figure, tensors["centroids/mu"], data.images[example], label)
    names = list(PLACES)
    for name, following in pairwise(names):
        ends = (PLACES[name][0] + PLACES[name][1] + 0.006, PLACES[following][0] - 0.006)
        middle = (TOP + BOTTOM) / 2
        arrow = FancyArrowPatch(
            (ends[0], middle),
            (ends[1], middle),
            transform=figure.transFigure,
            arrowstyle="-|>",
            mutation_scale=18,
            color=GREY,
            lw=1.5,
        )
        figure.add_artist(arrow)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_suffix(".png"))
