"""Batches straight from one array of decoded images: no worker processes, and no per-image work but augmentation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import Tensor

from jdfl_lightning.data.partition import Partition
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
        plain = copy.copy(self)  # a subclass may have arguments of its own
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


class Loaders(pl.LightningDataModule):
    """The batches of a data module: of each client, and of the held-out images."""

    images: Tensor
    """uint8 (N, H, W, 3)."""
    labels: Tensor
    """The class of every image."""
    domains: Tensor
    """The true domain of every image."""
    features: Tensor | None = None
    """Features of every image (N, F), which batches have in place of images; set on a run's own copy."""
    partition: Partition
    """The images of each client, and the held-out ones."""
    normalize: Normalize
    """How pixels become the network's input."""
    batch_size = 32
    """Images in a batch of `train_dataloader`."""
    _augmentation: Augmentation | None

    @property
    def inputs(self) -> Tensor:
        """What batches are made of: the images, or their features."""
        return self.images if self.features is None else self.features

    def client_loader(
        self, client: int, domain: int, batch_size: int, generator: torch.Generator, augment: bool = True
    ) -> BatchLoader:
        """Return a client's shuffled training batches.

        Args:
            client: number of the client.
            domain: its pseudo-domain, the domain in the batches.
            batch_size: images in a batch.
            generator: shuffles every pass.
            augment: whether the images are augmented; Phase 1 looks at them as they are.
        """
        indices = self.partition.clients[client]
        return self._loader(indices, domain, batch_size, generator, self._augmentation if augment else None)

    def _loader(
        self,
        indices: Tensor,
        domains: Tensor | int,
        batch_size: int,
        generator: torch.Generator | None = None,
        augmentation: Augmentation | None = None,
    ) -> BatchLoader:
        return BatchLoader(
            self.inputs, self.labels, domains, indices, batch_size, generator, self.normalize, augmentation
        )

    def train_dataloader(self) -> BatchLoader:
        """Return the training images of all clients together, with their true domains (for use with no federation)."""
        generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        indices = torch.cat(self.partition.clients)
        return self._loader(indices, self.domains, self.batch_size, generator, self._augmentation)

    def test_dataloader(self) -> BatchLoader:
        """Return the test images of all domains, with their true domains."""
        return self._loader(torch.cat(self.partition.test), self.domains, 256)

    def client_test_loaders(self, client: int) -> dict[str, BatchLoader]:
        """Return the test images of a client's domain and, by ``own``, those that are its own if there are such."""
        return {name: self._loader(held, self.domains, 256) for name, held in self.partition.test_of(client).items()}

    def val_dataloader(self) -> BatchLoader:
        """Return the validation images of all domains; the test images again if `val_fraction` is 0."""
        return self._loader(torch.cat(self.partition.val or self.partition.test), self.domains, 256)

    def unseen_dataloader(self) -> BatchLoader:
        """Return the images of the unseen domains, whose numbers follow those of the domains that clients have."""
        return self._loader(torch.cat([torch.empty(0).long(), *self.partition.unseen]), self.domains, 256)
