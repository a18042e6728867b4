"""Does Phase 1 find the domains where clients' classes differ? Ways to train its probe, tried as docs/results/skew_plan.md says.

    python benchmarks/skewed_discovery.py select --root DIR     # all candidates, on seeds of their own
    python benchmarks/skewed_discovery.py confirm --root DIR    # the chosen one against today's probe, on new seeds
    python benchmarks/skewed_discovery.py write                 # the tables into docs/discovery.md

Every finished cell is a line of the CSV file; the same command goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from sklearn.metrics import adjusted_rand_score
from timing import DOCS, write_section
from torch import Tensor, nn

from jdfl_lightning import PACS, Clustering, DigitsDomains, Experiment, JointModule
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.clustering.clusters import cluster
from jdfl_lightning.clustering.updates import Updates, unit
from jdfl_lightning.core.memory import reuse_memory
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitTask
from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.tensors import Tensors, flatten
from jdfl_lightning.data import DomainDataModule
from jdfl_lightning.data.loader import BatchLoader
from jdfl_lightning.joint.loss import soft_target_kl
from jdfl_lightning.models import select_parameters

LAYERS: dict[str, str | list[str]] = {
    "B": "B",
    "A": "A",
    "C": "C",
    "body": ["backbone.block3.*"],
    "first": ["backbone.block1.*"],
}
STYLES = ("style", "style, weighted")
SKEWS = (None, 10.0, 1.0, 0.5, 0.1)
HARD = (1.0, 0.5, 0.1)


def class_weights(labels: Tensor) -> Tensor:
    """Return a weight for every class that gives the present ones equal mass, and the images a mean weight of 1."""
    counts = torch.bincount(labels).double()
    return (len(labels) / (counts * (counts > 0).sum())).float()


class Weighted(JointModule):
    """The class-weighted loss; with `restricted`, over the client's own classes only."""

    restricted = False

    def on_train_start(self) -> None:
        """Count the client's classes."""
        loader: BatchLoader = self.trainer.train_dataloader
        self.weights = class_weights(loader.labels[loader.indices])
        self.absent = torch.bincount(loader.labels[loader.indices], minlength=self.head.num_classes) == 0

    def task_loss(self, logits: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted mean of the images' losses."""
        if self.restricted:
            logits = logits.masked_fill(self.absent, -torch.inf)
        return (soft_target_kl(logits, weights, labels) * self.weights[labels]).mean()


class Restricted(Weighted):
    """Weighted, over the client's own classes only."""

    restricted = True


class Prior(JointModule):
    """The logarithm of the client's class shares is added to the logits."""

    def on_train_start(self) -> None:
        """Count the client's classes."""
        loader: BatchLoader = self.trainer.train_dataloader
        counts = torch.bincount(loader.labels[loader.indices], minlength=self.head.num_classes)
        self.prior = (counts / counts.sum()).log()

    def task_loss(self, logits: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the adjusted logits."""
        return super().task_loss(logits + self.prior, weights, labels)


class Rotation(JointModule):
    """Labels are the angles by which images are turned."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Turn the images by 0, 90, 180 or 270 degrees in turn."""
        images, labels, domains = batch
        angles = torch.arange(len(labels)) % min(4, self.head.num_classes)
        turned = torch.empty_like(images)
        for angle in range(int(angles.max()) + 1):
            turned[angles == angle] = images[angles == angle].rot90(angle, (2, 3))
        return super().training_step((turned, angles, domains), batch_idx)


class BalancedLoader(BatchLoader):
    """Images drawn with replacement, every class equally often in expectation."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Draw the images of a pass, then yield them as usual."""
        own = self.labels[self.indices]
        drawn = torch.multinomial(class_weights(own)[own], len(own), replacement=True, generator=self.generator)
        again = BatchLoader(
            self.images, self.labels, self.domains, self.indices[drawn], self.batch_size, self.generator, self.normalize
        )
        return iter(again)


WAYS: dict[str, type[JointModule]] = {
    "plain": JointModule,
    "loss": Weighted,
    "batches": JointModule,
    "prior": Prior,
    "restricted": Restricted,
    "rotation": Rotation,
}


@dataclass(frozen=True)
class Cell:
    """How well one candidate finds the domains."""

    data: str
    skew: str
    seed: int
    way: str
    layers: str
    ari: float
    elbow: int

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What was trained."""
        return self.data, self.skew, self.seed, self.way


def judge(vectors: Sequence[Tensor], truth: Sequence[int], seed: int) -> tuple[float, int]:
    """Return ARI with M = 4 and the elbow, 0 if there is none."""
    updates = Updates(list(range(len(vectors))), torch.stack([unit(vector) for vector in vectors]))
    found = cluster(updates, len(set(truth)), "elbow", 10, seed)
    return float(adjusted_rand_score(truth, list(found.assignments.values()))), found.picks["elbow"] or 0


def train(run: Experiment, way: str) -> dict[str, list[Tensor]]:
    """Return the clients' updates after Phase 1, for all choices of layers."""
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    module = workspace.module(weights, buffers)
    names = {name: select_parameters(module, layers) for name, layers in LAYERS.items()}
    vectors: dict[str, list[Tensor]] = {name: [] for name in LAYERS}
    usual = run.data.client_loader
    if way == "batches":
        run.data.client_loader = lambda *args, **kwargs: _balanced(usual(*args, **kwargs))  # type: ignore[method-assign]
    try:
        for client in range(run.data.num_clients):
            task = FitTask(client, DISCOVERY_ROUND, run.seed_everything, weights, buffers, every_epoch=True)
            update: Tensors = fit_client(workspace, task, {})[0].upload[str(run.clustering.epochs)]
            for layers, chosen in names.items():
                vectors[layers].append(flatten({name: update[name] for name in chosen}))
    finally:
        run.data.client_loader = usual  # type: ignore[method-assign]
    return vectors


def _balanced(loader: BatchLoader) -> BatchLoader:
    loader.__class__ = BalancedLoader
    return loader


@torch.no_grad()
def styles(run: Experiment) -> dict[str, list[Tensor]]:
    """Return mean and standard deviation of every convolution's channels, for every client."""
    workspace = Workspace(run)
    module = workspace.module(*workspace.initial(1))
    seen: list[Tensor] = []  # of one batch: for each convolution, the images' means and means of squares

    def look(conv: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append(torch.stack([output.double().mean((2, 3)), output.double().square().mean((2, 3))]))

    hooks = [part.register_forward_hook(look) for part in module.backbone.modules() if isinstance(part, nn.Conv2d)]
    vectors: dict[str, list[Tensor]] = {name: [] for name in STYLES}
    for indices in run.data.partition.clients:
        batches = []
        for images, _, _ in BatchLoader(run.data.images, run.data.labels, 0, indices, 256):
            seen.clear()
            module.backbone(images)
            batches.append(torch.cat(seen, dim=2))
        means, squares = torch.cat(batches, dim=1)
        labels = run.data.labels[indices]
        for name, weights in zip(STYLES, (torch.ones(len(labels)), class_weights(labels)[labels]), strict=True):
            mean, square = (torch.einsum("i,if->f", weights.double(), part) / len(labels) for part in (means, squares))
            vectors[name].append(torch.cat([mean, (square - mean**2).clamp_min(0).sqrt()]).float())
    for hook in hooks:
        hook.remove()
    return vectors


def try_cell(data: DomainDataModule, skew: float | None, seed: int, way: str) -> Iterator[Cell]:
    """Deal, run Phase 1 in one way and yield a cell for every choice of layers."""
    data.label_skew = skew
    data.deal(seed)
    digits = isinstance(data, DigitsDomains)
    clustering = Clustering(epochs=3 if digits else 1, layers=["*"])
    run = Experiment(
        seed_everything=seed, data=data, lr=0.05 if digits else 0.01, clustering=clustering, model=Part(WAYS.get(way, JointModule))
    )
    for layers, vectors in (styles(run) if way == "style" else train(run, way)).items():
        ari, elbow = judge(vectors, data.partition.client_domains, seed)
        yield Cell("digits" if digits else "PACS", str(skew or "none"), seed, way, layers, ari, elbow)


def read(file: Path) -> list[Cell]:
    """Return the cells of a file."""
    if not file.exists():
        return []
    kinds = {field.name: {"int": int, "float": float}.get(str(field.type), str) for field in fields(Cell)}
    with file.open(newline="") as lines:
        return [Cell(**{name: kinds[name](value) for name, value in row.items()}) for row in csv.DictReader(lines)]


def append(file: Path, cells: Sequence[Cell]) -> None:
    """Add cells to a file."""
    new = not file.exists()
    with file.open("a", newline="") as lines:
        writer = csv.DictWriter(lines, [field.name for field in fields(Cell)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(vars(cell) | {"ari": round(cell.ari, 6)} for cell in cells)


def main() -> None:
    """Run what is left of a part, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["select", "confirm", "write"])
    parser.add_argument("--root", help="folder of PACS; without it the digits alone")
    parser.add_argument("--file", type=Path, default=DOCS / "results" / "skewed_discovery.csv")
    parser.add_argument("--chosen", default="rotation", help="the way to confirm")
    parser.add_argument("--digits", type=int, nargs="*", help="seeds on the digits")
    parser.add_argument("--pacs", type=int, nargs="*", help="seeds on PACS")
    options = parser.parse_args()
    reuse_memory()
    torch.set_num_threads(1)
    done = {cell.key for cell in read(options.file)}
    selecting = options.part == "select"
    sets: list[tuple[DomainDataModule, Sequence[int], Sequence[float | None], Sequence[str]]] = []
    if selecting:
        seeds, pacs = options.digits or [100, 101], options.pacs or [100]
        sets.append((DigitsDomains(size=16, num_clients=10), seeds, (None, *HARD), (*WAYS, "style")))
        if options.root:
            ways = [way for way in (*WAYS, "style") if way != "batches"]
            sets.append((PACS(options.root, size=32, num_clients=10), pacs, (0.5, 0.1), ways))
    for data, seeds, skews, ways in sets:
        for seed in seeds:
            for skew in skews:
                for way in ways:
                    name = "digits" if isinstance(data, DigitsDomains) else "PACS"
                    if (name, str(skew or "none"), seed, way) not in done:
                        cells = list(try_cell(data, skew, seed, way))
                        append(options.file, cells)
                        print(*cells[0].key, {cell.layers: (round(cell.ari, 2), cell.elbow) for cell in cells}, flush=True)


if __name__ == "__main__":
    main()
