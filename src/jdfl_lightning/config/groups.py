"""Settings that are groups of their own: Phase 1, what is saved, and classes with their arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jdfl_lightning.client.module import SUPPLIED, JointModule
from jdfl_lightning.clustering.criteria import Criterion, Elbow
from jdfl_lightning.clustering.sketch import BLOCKS
from jdfl_lightning.core.errors import require, require_types
from jdfl_lightning.core.settings import setting
from jdfl_lightning.models import LAYER_SUBSETS

PARTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "model": (JointModule, SUPPLIED),
    "optimizer": (Optimizer, ("params",)),
    "lr_scheduler": (LRScheduler, ("optimizer",)),
    "round_scheduler": (LRScheduler, ("optimizer",)),
}
"""Settings that name a class with its arguments, as in LightningCLI: the class's parent, and what the run supplies."""


@dataclass(frozen=True)
class Clustering:
    """Phase 1: how pseudo-domains are discovered."""

    epochs: int = setting(3, phase_1=True)
    """E_0, local epochs from theta_0 whose update is looked at."""
    batch_size: int | None = setting(None)
    """Images in a batch of Phase 1; null for batch_size of the training."""
    layers: str | list[str] = setting("B", phase_1=True)
    """Parameters to compare: A (head), B (last conv block and head), C (last two conv blocks and head), or patterns."""
    labels: Literal["classes", "rotations"] = setting("classes", phase_1=True, in_paper=False)
    """Labels that clients train on in Phase 1. classes: those of their images. rotations: the angle by which each image
    is turned, 0, 90, 180 or 270 degrees; then clients are not grouped by the shares of their classes."""
    criterion: Criterion = setting(factory=Elbow)
    """How M is chosen if num_domains is not given: elbow, silhouette, or your own Criterion. With fewer than 4 clients,
    or where no elbow is visible, the silhouette decides."""
    max_domains: int = setting(10)
    """The largest M to try."""
    fraction: float = setting(1.0, phase_1=True, in_paper=False)
    """Share of the clients that take part in Phase 1, in (0, 1]; others get a pseudo-domain when they first train."""
    sketch_dim: int | None = setting(None, phase_1=True, in_paper=False)
    """Length of the random sketch that a client sends instead of its update vector (1024, say); null for the vector."""
    newcomers: Literal["nearest", "update"] = setting("nearest", in_paper=False)
    """Pseudo-domain of newcomers. nearest: join the nearest centroid. update: join it and move it to the new mean."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "criterion", Criterion.of(self.criterion))  # it may be given by its short name
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
