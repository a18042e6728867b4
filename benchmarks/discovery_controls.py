"""Is it the domains that Phase 1 finds? PACS dealt to clients in other ways.

    python benchmarks/discovery_controls.py --root DIR

- even: as the package deals, every class of a domain evenly to its clients.
- mixed: images of all domains at every client, so that there is nothing to find.
- balanced: as many images of every class at every client, so that shares of classes tell nothing.
- random: the images of a domain at random to its clients.
- skewed: shares of each class of a domain drawn from a Dirichlet distribution with parameter 0.5.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from timing import write_section

from jdfl_lightning import PACS, Clustering, Experiment
from jdfl_lightning.core.system import reuse_memory
from jdfl_lightning.data.partition import Partition
from jdfl_lightning.server.phase1 import prepare
from jdfl_lightning.studies.diagnose import WIDEST, find
from jdfl_lightning.ui.display import Display

WAYS = ("even", "mixed", "balanced", "random", "skewed")
EPOCHS = (1, 3, 5)


class OtherPACS(PACS):
    """PACS whose training images are dealt in another way."""

    way = "even"

    def deal(self, seed: int) -> Partition:
        """Deal as usual, then again in the other way among the same clients."""
        usual = super().deal(seed)
        rng = np.random.default_rng(seed)
        clients = [indices.numpy() for indices in usual.clients]
        if self.way == "mixed":
            everything = rng.permutation(np.concatenate(clients))
            clients = np.split(everything, np.cumsum([len(own) for own in clients])[:-1])
        elif self.way == "balanced":
            labels = [self.labels.numpy()[own] for own in clients]
            count = min(int(np.bincount(own, minlength=7).min()) for own in labels)
            clients = [
                np.concatenate([rng.permutation(own[of == label])[:count] for label in range(7)])
                for own, of in zip(clients, labels, strict=True)
            ]
        elif self.way in ("random", "skewed"):
            clients = [own for domain in range(4) for own in self._deal_domain(domain, usual, rng)]
        dealt = [torch.from_numpy(np.sort(own)) for own in clients]
        self.partition = Partition(dealt, usual.client_domains, usual.test)
        return self.partition

    def _deal_domain(self, domain: int, usual: Partition, rng: np.random.Generator) -> list[np.ndarray]:
        mine = [own.numpy() for own, of in zip(usual.clients, usual.client_domains, strict=True) if of == domain]
        everything = np.concatenate(mine)
        if self.way == "random":
            return np.array_split(rng.permutation(everything), len(mine))
        parts: list[list[int]] = [[] for _ in mine]
        for label in range(7):
            own = rng.permutation(everything[self.labels.numpy()[everything] == label])
            bounds = (np.cumsum(rng.dirichlet([0.5] * len(mine)))[:-1] * len(own)).astype(int)
            for part, piece in zip(parts, np.split(own, bounds), strict=True):
                part.extend(piece.tolist())
        return [np.array(part) for part in parts]


def main() -> None:
    """Try every way and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder of PACS")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    options = parser.parse_args()
    reuse_memory()
    heads = [f"{layers}, E_0 = {epochs}" for layers in "ABC" for epochs in EPOCHS]
    lines = [f"| dealt | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    data = OtherPACS(options.root, size=32, num_clients=10)
    clustering = Clustering(epochs=max(EPOCHS), batch_size=32, layers=WIDEST)
    run = Experiment(data=data, lr=0.01, clustering=clustering)
    for way in options.ways:
        data.way = way
        prepare(run, Display())
        with tempfile.TemporaryDirectory() as folder:
            found = {(f.layers, f.epochs): f for f in find(run, Path(folder))}
        cells = [found[layers, epochs] for layers in "ABC" for epochs in EPOCHS]
        lines.append(
            f"| {way} | " + " | ".join(f"{f.ari:.2f} ({f.elbow or '-'}, {f.silhouette or '-'})" for f in cells) + " |"
        )
        print(lines[-1], flush=True)
    lines += ["", "ARI with M = 4 (M that the elbow picks, M that the silhouette picks)."]
    write_section("controls", "\n".join(lines), "discovery.md")


if __name__ == "__main__":
    main()
