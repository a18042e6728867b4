"""Batches straight from one array of decoded images: no worker processes, and no per-image work but augmentation."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from jdfl_lightning.data.transforms import Augmentation, Normalize, to_input


class BatchLoader:
    """Yields batches (images, labels, domains); Lightning accepts it like a DataLoader.

    Args:
        images: uint8 (N, H, W, 3); or their features, which are yielded as they are.
        labels: (N,).
        domains: (N,), or one number for all.
        indices: which of the N images to yield.
        batch_size: images in a batch; the last one may be smaller. A last one of a single image joins the batch before
            it: BatchNorm cannot train on one image.
        generator: shuffles every pass; without it the order is that of the indices.
        normalize: how pixels become the network's input.
        augmentation: transforms every image.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        domains: Tensor | int,
        indices: Tensor,
        batch_size: int,
        generator: torch.Generator | None = None,
        normalize: Normalize = "unit",
        augmentation: Augmentation | None = None,
    ) -> None:
        self.images, self.labels, self.domains = images, labels, domains
        self.indices, self.batch_size, self.generator = indices, batch_size, generator
        self.normalize, self.augmentation = normalize, augmentation

    def plain(self) -> BatchLoader:
        """Return a loader of the same images without augmentation; it shuffles with the same generator."""
        plain = copy.copy(self)
        plain.augmentation = None
        return plain

    def __len__(self) -> int:
        return len(self.sizes())

    def sizes(self) -> list[int]:
        """Return the numbers of images in the batches of a pass."""
        whole, rest = divmod(len(self.indices), self.batch_size)
        sizes = [self.batch_size] * whole + [rest] * (rest > 0)
        return [*sizes[:-2], sizes[-2] + 1] if whole and rest == 1 and self.batch_size > 1 else sizes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for chosen in self.order():
            yield self.take(chosen)

    def order(self) -> Iterator[Tensor]:
        """Yield which of the N images are in each batch of a pass."""
        yield from self.shuffled().split(self.sizes())

    def shuffled(self) -> Tensor:
        """Return which of the N images a pass goes through, in its order."""
        if self.generator is None:
            return self.indices
        return self.indices[torch.randperm(len(self.indices), generator=self.generator)]

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch of some of the N images."""
        labels = self.labels[chosen]
        domains = torch.full_like(labels, self.domains) if isinstance(self.domains, int) else self.domains[chosen]
        images = self.images.index_select(0, chosen)  # faster than brackets
        if images.is_floating_point():
            return images, labels, domains
        if self.augmentation is not None:
            images = self.augmentation(images)
        return to_input(images, self.normalize), labels, domains
