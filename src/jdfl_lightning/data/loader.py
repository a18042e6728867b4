"""Batches straight from one array of decoded images: no worker processes, and no per-image work but augmentation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jdfl_lightning.data.transforms import Augmentation, Normalize, to_input


@dataclass(eq=False, repr=False)
class BatchLoader:
    """Yields batches (images, labels, domains); Lightning accepts it like a DataLoader."""

    images: Tensor
    """uint8 (N, H, W, 3); or their features, which are yielded as they are."""
    labels: Tensor
    domains: Tensor | int
    """(N,), or one number for all."""
    indices: Tensor
    """Which of the N images to yield."""
    batch_size: int
    """Images in a batch; the last one may be smaller. A last one of a single image joins the batch before it: BatchNorm
    cannot train on one image."""
    generator: torch.Generator | None = None
    """Shuffles every pass; without it the order is that of the indices."""
    normalize: Normalize = "unit"
    """How pixels become the network's input."""
    augmentation: Augmentation | None = None
    """Transforms every image."""

    def plain(self) -> BatchLoader:
        """Return a loader of the same images without augmentation; it shuffles with the same generator."""
        return replace(self, augmentation=None)

    def __len__(self) -> int:
        return len(self._sizes())

    def _sizes(self) -> list[int]:
        whole, rest = divmod(len(self.indices), self.batch_size)
        sizes = [self.batch_size] * whole + [rest] * (rest > 0)
        return [*sizes[:-2], sizes[-2] + 1] if whole and rest == 1 and self.batch_size > 1 else sizes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for chosen in self.order():
            yield self.take(chosen)

    def order(self) -> Iterator[Tensor]:
        """Yield which of the N images are in each batch of a pass."""
        order = self.indices
        if self.generator is not None:
            order = order[torch.randperm(len(order), generator=self.generator)]
        yield from order.split(self._sizes())

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch of some of the N images."""
        labels = self.labels[chosen]
        domains = torch.full_like(labels, self.domains) if isinstance(self.domains, int) else self.domains[chosen]
        images = self.images[chosen]
        if images.is_floating_point():
            return images, labels, domains
        if self.augmentation is not None:
            images = self.augmentation(images)
        return to_input(images, self.normalize), labels, domains
