"""Does Phase 1 find domains if the classes of clients differ? Probes are tried as docs/results/skew_plan.md says.

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
from itertools import product
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
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitTask
from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.system import reuse_memory
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
SKEWS = (None, 1.0, 0.5, 0.1)
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
    "rotation": JointModule,
}

SELECTION = 100
"""First seed of the selection."""
CHOSEN = ("rotation", "first")
"""Way and layers that were chosen."""
SELECT = [
    *product(["digits"], ["none", "1.0", "0.5", "0.1"], (SELECTION, SELECTION + 1), (*WAYS, "style")),
    *product(["PACS"], ["0.5"], (SELECTION,), [way for way in (*WAYS, "style") if way != "batches"]),
]
CONFIRM = [
    (data, str(skew or "none"), seed, way)
    for seed in range(5)
    for data in ("digits", "PACS")[: 2 if seed < 3 else 1]
    for skew, way in product(SKEWS, ("plain", CHOSEN[0]))
]


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
    labels = "rotations" if way == "rotation" else "classes"
    clustering = Clustering(epochs=3 if digits else 1, layers=["*"], labels=labels)
    run = Experiment(
        seed_everything=seed,
        data=data,
        lr=0.05 if digits else 0.01,
        clustering=clustering,
        model=Part(WAYS.get(way, JointModule)),
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


def mean(cells: Sequence[Cell], data: str, way: str, layers: str, skews: Sequence[object]) -> float:
    """Return the mean ARI of a candidate over seeds and skews; NaN if there is none."""
    names = {str(skew or "none") for skew in skews}
    own = [c.ari for c in cells if (c.data, c.way, c.layers) == (data, way, layers) and c.skew in names]
    return float(np.mean(own)) if own else float("nan")


def selection(cells: Sequence[Cell]) -> str:
    """Return the table of the selection: every way with layers B and with its best layers."""
    cells = [cell for cell in cells if cell.seed >= SELECTION]
    scores: dict[tuple[str, str], float] = {}
    for way, layers in dict.fromkeys((cell.way, cell.layers) for cell in cells):
        both = [mean(cells, "digits", way, layers, HARD), mean(cells, "PACS", way, layers, HARD)]
        scores[way, layers] = float(np.nanmean(both))  # batches: the digits alone
    shown = []
    for way in dict.fromkeys(way for way, _ in scores):
        own = {layers: score for (of, layers), score in scores.items() if of == way}
        shown += [(way, layers) for layers in dict.fromkeys([next(iter(own)), max(own, key=own.__getitem__)])]
    lines = ["| probe | layers | digits, none | 1 | 0.5 | 0.1 | PACS, 0.5 | score |", "|---" * 8 + "|"]
    for way, layers in shown:
        digits = [mean(cells, "digits", way, layers, [skew]) for skew in (None, *HARD)]
        pacs = [mean(cells, "PACS", way, layers, [0.5])]
        row = " | ".join("" if np.isnan(value) else f"{value:.2f}" for value in [*digits, *pacs, scores[way, layers]])
        lines.append(f"| {way if way != 'style' else layers} | {layers if way != 'style' else ''} | {row} |")
    return "\n".join(lines)


def difference(cells: Sequence[Cell], data: str, chosen: tuple[str, str]) -> str:
    """Return the mean difference to the plain probe over skews 1, 0.5, 0.1, with its interval over seeds."""
    seeds = sorted({cell.seed for cell in cells if cell.data == data})
    of_seed = [[cell for cell in cells if cell.seed == seed] for seed in seeds]
    gains = np.array([mean(c, data, *chosen, HARD) - mean(c, data, "plain", "B", HARD) for c in of_seed])
    wide = student.ppf(0.975, len(gains) - 1) * gains.std(ddof=1) / len(gains) ** 0.5
    return f"{data}: {gains.mean():+.2f} ({gains.mean() - wide:+.2f} to {gains.mean() + wide:+.2f}, {len(gains)} seeds)"


def confirmation(cells: Sequence[Cell]) -> str:
    """Return the table of the confirmation: today's probe, the chosen one, and both with the other's layers."""
    cells = [cell for cell in cells if cell.seed < SELECTION]
    heads = ["none" if skew is None else f"{skew:g}" for skew in SKEWS]
    lines = [f"| data | probe | layers | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for data in ("digits", "PACS"):
        for way, layers in product(("plain", CHOSEN[0]), ("B", CHOSEN[1])):
            row = []
            for skew in SKEWS:
                own = [c for c in cells if (*c.key[:2], c.way, c.layers) == (data, str(skew or "none"), way, layers)]
                found = np.array([cell.ari for cell in own])
                right = sum(cell.elbow == 4 for cell in own)
                row.append(f"{found.mean():.2f} ({found.min():.2f} to {found.max():.2f}; {right} of {len(own)})")
            lines.append(f"| {data} | {way} | {layers} | {' | '.join(row)} |")
    lines += ["", "Mean ARI with M = 4 (least to most over seeds; seeds in which the elbow is at 4)."]
    lines += ["Differences to plain, B at skews 1, 0.5 and 0.1, with their 95 % intervals over seeds:", ""]
    for layers in (CHOSEN[1], "B"):
        gains = "; ".join(difference(cells, data, (CHOSEN[0], layers)) for data in ("digits", "PACS"))
        lines.append(f"- {CHOSEN[0]}, {layers}{', the chosen one' if layers == CHOSEN[1] else ''}: {gains}.")
    return "\n".join(lines)


def main() -> None:
    """Run what is left of a part, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["select", "confirm", "write"])
    parser.add_argument("--root", help="folder of PACS; without it the digits alone")
    parser.add_argument("--file", type=Path, default=DOCS / "results" / "skewed_discovery.csv")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, "style"], help="only these")
    options = parser.parse_args()
    if options.part == "write":
        cells = read(options.file)
        write_section("selection", selection(cells), "discovery.md")
        write_section("confirmation", confirmation(cells), "discovery.md")
        return
    reuse_memory()
    torch.set_num_threads(1)
    data: dict[str, DomainDataModule] = {"digits": DigitsDomains(size=16, num_clients=10)}
    if options.root:
        data["PACS"] = PACS(options.root, size=32, num_clients=10)
    done = {cell.key for cell in read(options.file)}
    for key in SELECT if options.part == "select" else CONFIRM:
        name, skew, seed, way = key
        if name in data and key not in done and (not options.ways or way in options.ways):
            cells = list(try_cell(data[name], None if skew == "none" else float(skew), seed, way))
            append(options.file, cells)
            print(*key, {cell.layers: (round(cell.ari, 2), cell.elbow) for cell in cells}, flush=True)


if __name__ == "__main__":
    main()
