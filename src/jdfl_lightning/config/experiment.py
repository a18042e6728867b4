"""The settings of a run: typed, frozen dataclasses, each setting with its role."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch.loggers import Logger

from jdfl_lightning.algorithms import Algorithm, FedAvg
from jdfl_lightning.backends import Backend, PoolBackend
from jdfl_lightning.client.trainer import TrainerOptions
from jdfl_lightning.clustering.clusters import Criterion
from jdfl_lightning.clustering.sketch import BLOCKS
from jdfl_lightning.core.errors import require, require_types
from jdfl_lightning.core.settings import declared_settings, setting
from jdfl_lightning.data import DigitsDomains, DomainDataModule
from jdfl_lightning.data.base import PLACES
from jdfl_lightning.joint import Score
from jdfl_lightning.models import LAYER_SUBSETS
from jdfl_lightning.ui.loggers import WandbRounds

Supervision = Literal["base", "hard", "graded", "random"]


@dataclass(frozen=True)
class Clustering:
    """Phase 1: how pseudo-domains are discovered."""

    epochs: int = setting(3, phase_1=True)
    """E_0, local epochs from theta_0 whose update is looked at."""
    batch_size: int | None = setting(None)
    """Images in a batch of Phase 1; null for batch_size of the training."""
    layers: str | list[str] = setting("B", phase_1=True)
    """Parameters to compare: A (head), B (last conv block and head), C (last two conv blocks and head), or patterns."""
    criterion: Criterion = setting("elbow")
    """How M is chosen if num_domains is not given: elbow or silhouette. With fewer than 4 clients, or where no elbow is
    visible, the silhouette decides."""
    max_domains: int = setting(10)
    """The largest M to try."""
    fraction: float = setting(1.0, phase_1=True, in_paper=False)
    """Share of the clients that take part in Phase 1, in (0, 1]; others get a pseudo-domain when they first train."""
    sketch_dim: int | None = setting(None, phase_1=True, in_paper=False)
    """Length of the random sketch that a client sends instead of its update vector (1024, say); null for the vector."""
    newcomers: Literal["nearest", "update"] = setting("nearest", in_paper=False)
    """Pseudo-domain of newcomers. nearest: join the nearest centroid. update: join it and move it to the new mean."""

    def __post_init__(self) -> None:
        require_types(self, "--clustering.")
        require(self.epochs > 0, "--clustering.epochs", "positive", self.epochs)
        require(self.batch_size is None or self.batch_size > 0, "--clustering.batch_size", "positive", self.batch_size)
        require(self.max_domains > 0, "--clustering.max_domains", "positive", self.max_domains)
        require(0 < self.fraction <= 1, "--clustering.fraction", "above 0 and at most 1", self.fraction)
        require(
            self.sketch_dim is None or (self.sketch_dim > 0 and self.sketch_dim % BLOCKS == 0),
            "--clustering.sketch_dim",
            f"a positive multiple of {BLOCKS}",
            self.sketch_dim,
        )
        named = isinstance(self.layers, list) or self.layers in LAYER_SUBSETS
        require(named, "--clustering.layers", "A, B, C or a list of patterns", self.layers)


@dataclass(frozen=True)
class Checkpointing:
    """What is saved so that a run can be resumed."""

    every: int = setting(1, role="output")
    """Rounds from one checkpoint to the next; the last round always has one."""
    keep: int = setting(2, role="output")
    """Checkpoints to keep: the newest, and earlier ones in case it is damaged."""
    reset_damaged_clients: bool = setting(False, role="output")
    """Reset a client whose saved state is damaged, instead of ending the run."""

    def __post_init__(self) -> None:
        require_types(self, "--checkpoint.")
        require(self.every > 0, "--checkpoint.every", "positive", self.every)
        require(self.keep > 0, "--checkpoint.keep", "positive", self.keep)


@dataclass(frozen=True)
class Experiment:
    """A federated run."""

    seed_everything: int = setting(0, phase_1=True)
    """Seed of everything random: initialisation, split, sampling, shuffling, random targets."""
    data: DomainDataModule = setting(factory=lambda: DigitsDomains(size=16), phase_1=True)
    """The images: DigitsDomains, PACS, OfficeCaltech, ImageFolderDomains, SiteFolders, or your own subclass of
    DomainDataModule."""
    backbone: str = setting("PaperCNN", phase_1=True)
    """The network below the head: PaperCNN, a torchvision classifier by name, or the import path of your own."""
    algorithm: Algorithm = setting(factory=FedAvg)
    """The federated optimizer: FedAvg, FedProx, SCAFFOLD, FedDyn, FedDC, FedProc, MOON, or your own Algorithm."""
    supervision: Supervision = setting("random")
    """base: the optimizer alone, C outputs. hard, graded, random: joint head of M x C outputs with such targets."""
    num_domains: int | None = setting(None)
    """M, the number of pseudo-domains; null to choose it by clustering.criterion."""
    alpha: float | None = setting(None)
    """Mass of graded targets on the own pseudo-domain, in (0, 1]; null for 0.55 if M <= 5 and 0.45 if more."""
    tau: float = setting(0.1)
    """Temperature of graded targets over the similarities of pseudo-domains, above 0."""
    phi: float = setting(1.0)
    """Mass of random targets on the drawn pseudo-domain, in [0, 1]."""
    score: Score = setting("max", in_paper=False)
    """How a class is predicted in evaluations: max, by the largest of its M outputs (the paper), or sum, by its joint
    probabilities summed over the pseudo-domains. Training does not depend on it."""
    rounds: int = setting(25, role="length")
    """T, communication rounds."""
    client_fraction: float = setting(0.5)
    """Share of the clients that take part in a round, in (0, 1]."""
    epochs: int = setting(5)
    """E, local epochs of a participant."""
    batch_size: int = setting(32)
    """Images in a local batch."""
    lr: float = setting(0.05, phase_1=True)
    """Learning rate of local SGD."""
    momentum: float = setting(0.0, phase_1=True)
    """Momentum of local SGD; every fit starts with a fresh optimizer."""
    weight_decay: float = setting(0.0, phase_1=True)
    """Weight decay of local SGD."""
    evaluate_every: int = setting(1, role="length", in_paper=False)
    """Rounds from one evaluation to the next; the last round is always evaluated."""
    max_update_norm: float | None = setting(None, in_paper=False)
    """Refuse an update whose norm is more than this many times the median of its round; null to refuse none."""
    min_clients: int = setting(1, in_paper=False)
    """Client answers that a round needs; with fewer it is repeated with newly sampled clients."""
    checkpoint: Checkpointing = setting(group=Checkpointing)
    """What is saved so that a run can be resumed."""
    clustering: Clustering = setting(group=Clustering)
    """Phase 1: how pseudo-domains are discovered."""
    discovery: str | None = setting(None, role="place")
    """Folder of a run, or of `discover`, whose discovery is reused instead of repeated; M may differ."""
    backend: Backend = setting(factory=PoolBackend, role="place")
    """Where clients are trained: PoolBackend (in parallel, where that pays), LocalBackend (one after the other) or
    RayBackend (on a cluster)."""
    trainer: TrainerOptions = setting(group=TrainerOptions)
    """Options of the Lightning Trainer that every fit uses."""
    logger: WandbRounds | Logger | bool = setting(False, role="output")
    """false, true for Weights & Biases (WandbRounds), or any Lightning logger; metrics.csv is written in any case."""
    run_dir: str | None = setting(None, role="output")
    """Folder of the run, new or empty; null for a new one in runs/."""
    resume: str | None = setting(None, role="place")
    """Resume a run: its folder, or a file in its checkpoints/; auto for the newest run of these settings, if any."""

    def __post_init__(self) -> None:
        require_types(self)
        require(self.seed_everything >= 0, "--seed_everything", "0 or more", self.seed_everything)
        for name in ("rounds", "epochs", "batch_size", "lr", "evaluate_every"):
            require(0 < getattr(self, name) < math.inf, f"--{name}", "positive and finite", getattr(self, name))
        require(0 < self.client_fraction <= 1, "--client_fraction", "above 0 and at most 1", self.client_fraction)
        require(0 <= self.momentum < 1, "--momentum", "at least 0 and below 1", self.momentum)
        require(0 <= self.weight_decay < math.inf, "--weight_decay", "0 or more, and finite", self.weight_decay)
        require(self.alpha is None or 0 < self.alpha <= 1, "--alpha", "above 0 and at most 1", self.alpha)
        require(self.tau > 0, "--tau", "positive", self.tau)
        require(0 <= self.phi <= 1, "--phi", "between 0 and 1", self.phi)
        require(
            self.max_update_norm is None or self.max_update_norm >= 1,
            "--max_update_norm",
            "1 or more",
            self.max_update_norm,
        )
        require(
            1 <= self.min_clients <= self.clients_per_round,
            "--min_clients",
            f"between 1 and the {self.clients_per_round} clients of a round",
            self.min_clients,
        )
        self.algorithm.check_settings(self)
        clients = self.discovery_clients
        require(
            self.num_domains is None or 1 <= self.num_domains <= clients,
            "--num_domains",
            f"between 1 and the number of clients in Phase 1, {clients},",
            self.num_domains,
        )

    @property
    def clients_per_round(self) -> int:
        """Participants of a round: client_fraction of all clients, rounded half up, at least one."""
        return max(1, int(self.client_fraction * self.data.num_clients + 0.5))

    @property
    def discovery_clients(self) -> int:
        """Clients in Phase 1: clustering.fraction of all clients, rounded half up, at least one."""
        return max(1, int(self.clustering.fraction * self.data.num_clients + 0.5))

    @property
    def name(self) -> str:
        """A readable name: data set, algorithm, supervision and seed."""
        parts = (
            type(self.data).__name__,
            type(self.algorithm).__name__,
            self.supervision,
            f"seed{self.seed_everything}",
        )
        return "-".join(parts).lower()


def free_settings() -> tuple[str, ...]:
    """Return the dotted names of the settings that may change when a run is resumed: they change no round's numbers."""
    free = [setting.name for setting in declared_settings(Experiment) if setting.role != "result"]
    return (*free, *(f"data.init_args.{name}" for name in PLACES))
