"""Draw the picture of docs/targets.md: `python docs/images/targets.py [FILE]`.

Similarities, logits and sums are made up; the targets are computed from them by the package.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

from jdfl_lightning import EM, Graded, Hard, Online, Random, Uniform
from jdfl_lightning.supervision import ClientSums, RoundInfo

COLOURS = ["#4477aa", "#cc5566", "#228833", "#aa7722"]
GREY = "#555555"
OWN, DRAWN, LABEL, CLASSES = 1, 3, 0, 2
ANGLES = torch.tensor([0.0, 0.5, 0.95, 1.9])  # of the pseudo-domains' centroids, in two dimensions
LOGITS = torch.tensor([3.1, 0.0, 1.6, 0.0, 2.9, 0.0, -0.5, 0.0])  # j = domain * C + class
SEEN = torch.tensor([0.05, 0.6, 0.3, 0.01])  # p(m, c|x), the mean over correctly classified samples of the class


def targets() -> dict[str, tuple[Tensor, Tensor | None, str]]:
    """Return for each supervision the weights over pseudo-domains, those that they began with, and what it does."""
    centroids = torch.stack([ANGLES.cos(), ANGLES.sin()], dim=1)
    graded = Graded(tau=0.3).table(centroids)[OWN]
    em = EM(tau=0.3, warmup=0.0)
    rule = em.rule(em.broadcast({}, RoundInfo(1, 1, centroids)), OWN)
    moved = rule(torch.tensor([OWN]), logits=LOGITS[None], labels=torch.tensor([LABEL]))[0]
    online = Online(tau=0.3)
    sums = torch.zeros(CLASSES, 4, dtype=torch.float64)
    sums[LABEL] = SEEN
    record = online.update(online.init(centroids, CLASSES), [ClientSums(OWN, 100, {"sums": sums})])
    learned = online.broadcast(record, RoundInfo(2, 2, centroids))["table"][LABEL, OWN]
    return {
        "base": (torch.ones(1), None, "one output\nfor the class"),
        "hard": (Hard().table(centroids)[OWN], None, "the own\npseudo-domain"),
        "graded": (graded, None, "own and similar\nupdates"),
        "random": (Random().table(centroids)[DRAWN], None, "one drawn for\neach sample"),
        "uniform": (Uniform().table(centroids)[OWN], None, "all alike"),
        "em": (moved, graded, "towards where the\nmodel finds it"),
        "online": (learned, graded, "the others' share is\nlearned, by class"),
    }


def draw_bars(axes: Axes, weights: Tensor, before: Tensor | None) -> None:
    """Draw the mass on every pseudo-domain, and dashed what it was."""
    places = [1.5] if len(weights) == 1 else list(range(4))
    axes.bar(places, weights.tolist(), 0.8, color=GREY if len(weights) == 1 else COLOURS)
    if before is not None:
        axes.bar(places, before.tolist(), 0.8, fill=False, edgecolor="black", ls="--", lw=1)
    if len(weights) > 1:
        axes.plot([OWN], [-0.05], "^", color="black", ms=6, clip_on=False)
    axes.set(xlim=(-0.7, 3.7), ylim=(0, 1.05), xticks=[], yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)


def main(file: Path) -> None:
    """Draw the model's outputs for a sample on the left, and the targets beside each other."""
    figure = plt.figure(figsize=(14, 3.7), facecolor="white")
    found = targets()
    columns = figure.subplots(1, 1 + len(found), width_ratios=[1.25, *[1] * len(found)])
    figure.subplots_adjust(left=0.022, right=0.992, top=0.76, bottom=0.25, wspace=0.14)
    first = columns[0]
    own = LOGITS.view(4, CLASSES)[:, LABEL]
    first.bar(range(4), own.tolist(), 0.8, color=COLOURS)
    first.axhline(0, color="black", lw=0.8)
    first.set(xlim=(-0.7, 3.7), xticks=[], yticks=[], ylim=(-0.8, 3.4))
    first.spines[["top", "right", "left", "bottom"]].set_visible(False)
    first.set_title("the model's outputs\nfor the sample's class", fontsize=11)
    figure.text(
        first.get_position().x0 + first.get_position().width / 2,
        0.17,
        "a bar for each pseudo-domain;\ntriangle: the own one",
        ha="center",
        va="top",
        fontsize=9.5,
        color=GREY,
    )
    for axes, (name, (weights, before, note)) in zip(columns[1:], found.items(), strict=True):
        draw_bars(axes, weights, before)
        axes.set_title(name, fontsize=14, pad=10)
        middle = axes.get_position().x0 + axes.get_position().width / 2
        figure.text(middle, 0.17, note, ha="center", va="top", fontsize=10.5, color=GREY, linespacing=1.3)
    right = columns[-1].get_position().x1
    left = columns[1].get_position().x0
    figure.text((left + right) / 2, 0.97, "targets of one sample", ha="center", va="top", fontsize=12, color=GREY)
    figure.text(right, 0.97, "dashed: what they began with", ha="right", va="top", fontsize=9.5, color=GREY)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_suffix(".png"))
