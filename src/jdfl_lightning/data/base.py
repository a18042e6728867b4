"""DomainDataModule: images of several domains, one training loader for each client, a test set for each domain."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from jdfl_lightning.core.errors import InputError, require, require_type
from jdfl_lightning.data.loader import BatchLoader
from jdfl_lightning.data.partition import Partition, partition

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) during long work."""


PLACES = ("root", "roots", "download")
"""Names of a data module's arguments that say only where its images are stored."""


def no_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Roster:
    """What a server knows about clients at remote sites; it holds no image and no true domain."""

    sizes: list[int]
    """For each client, the number of its training images."""
    fingerprint: str
    """Checksum of all images and their partition."""


class DomainDataModule(pl.LightningDataModule, ABC):
    """Images of several domains, partitioned among clients of one domain each.

    A subclass says where images come from (`load`) and what domains and classes there are. Every argument of
    ``__init__`` is kept as an attribute of the same name, so that a config can be written from the object.

    Args:
        size: height and width of the images.
        num_clients: N; in proportion to the domains' sizes, at least one each.
        test_fraction: share of every domain that is held out, rounded up.
    """

    domain_names: Sequence[str] = ()
    """The domains; a number in `domains` is a place in this list."""
    class_names: Sequence[str] = ()
    """The classes; a label is a place in this list."""
    images: Tensor
    """uint8 (N, H, W, 3)."""
    labels: Tensor
    """The class of every image."""
    domains: Tensor
    """The true domain of every image."""
    partition: Partition
    """The images of each client, and the held-out ones."""
    roster: Roster | None = None
    """Info about the images at remote sites; None if the images are local."""

    def __init__(self, size: int, num_clients: int, test_fraction: float) -> None:
        super().__init__()
        require_type("--data.size", size, int)
        require_type("--data.num_clients", num_clients, int)
        require_type("--data.test_fraction", test_fraction, float)
        require(size > 0, "--data.size", "positive", size)
        require(num_clients > 0, "--data.num_clients", "positive", num_clients)
        require(0 < test_fraction < 1, "--data.test_fraction", "between 0 and 1", test_fraction)
        self.size = size
        self.num_clients = num_clients
        self.test_fraction = test_fraction
        self.batch_size = 32
        self.progress: Progress = no_progress

    def __repr__(self) -> str:
        """Show the arguments."""
        names = inspect.signature(type(self).__init__).parameters
        return f"{type(self).__name__}({', '.join(f'{n}={vars(self)[n]!r}' for n in names if n in vars(self))})"

    @abstractmethod
    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return images (uint8, N x H x W x 3), labels and domains."""

    def setup(self, stage: str | None = None) -> None:
        """Load the images, once, and partition them with seed 0 unless `deal` has been called."""
        self.load_once()
        if not hasattr(self, "partition"):
            self.deal(0)

    def load_once(self) -> None:
        """Load the images if they are not loaded yet, and check what `load` returns."""
        if hasattr(self, "images"):
            return
        loaded: Any = self.load()
        _check_loaded(self, loaded)
        images, labels, domains = loaded
        self.images, self.labels, self.domains = images, labels.long(), domains.long()

    def deal(self, seed: int) -> Partition:
        """Hold out the test images and partition the rest among the clients, as a function of the seed."""
        self.load_once()
        self.partition = partition(
            self.labels, self.domains, self.domain_names, self.num_clients, self.test_fraction, seed
        )
        return self.partition

    def untested(self) -> dict[str, list[str]]:
        """Return, by domain, the classes that its clients train on but that have no test image."""
        missing: dict[str, list[str]] = {}
        for domain, (name, held) in enumerate(zip(self.domain_names, self.partition.test, strict=True)):
            own = [c for c, d in zip(self.partition.clients, self.partition.client_domains, strict=True) if d == domain]
            trained = set(self.labels[torch.cat(own)].tolist()) if own else set()
            if lacking := sorted(trained - set(self.labels[held].tolist())):
                missing[name] = [self.class_names[label] for label in lacking]
        return missing

    @property
    def client_sizes(self) -> list[int]:
        """For each client, the number of its training images."""
        return self.partition.sizes if self.roster is None else self.roster.sizes

    @property
    def true_domains(self) -> list[str] | None:
        """For each client, the name of its true domain; None if unknown."""
        if self.roster is not None:
            return None
        return [self.domain_names[domain] for domain in self.partition.client_domains]

    def fingerprint(self) -> str:
        """Return a checksum of the labels, the partition, and an evenly spaced sample of the images."""
        if self.roster is not None:
            return self.roster.fingerprint
        digest = hashlib.blake2b(digest_size=16)
        for indices in (self.labels, self.domains, *self.partition.clients, *self.partition.test):
            digest.update(f"{len(indices)} ".encode() + indices.numpy().tobytes())
        picked = self.images[:: max(1, len(self.images) // 200)]
        digest.update(f"{tuple(self.images.shape)} ".encode() + picked.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def client_loader(self, client: int, domain: int, batch_size: int, generator: torch.Generator) -> BatchLoader:
        """Return a client's shuffled training batches; the domain in them is the client's pseudo-domain."""
        return BatchLoader(self.images, self.labels, domain, self.partition.clients[client], batch_size, generator)

    def train_dataloader(self) -> BatchLoader:
        """Return the training images of all clients together, with their true domains (for use with no federation)."""
        generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        indices = torch.cat(self.partition.clients)
        return BatchLoader(self.images, self.labels, self.domains, indices, self.batch_size, generator)

    def test_dataloader(self) -> BatchLoader:
        """Return the test images of all domains, with their true domains."""
        return BatchLoader(self.images, self.labels, self.domains, torch.cat(self.partition.test), 256)

    val_dataloader = test_dataloader
    """The test images again: there is no third split."""


def _check_loaded(data: DomainDataModule, loaded: Any) -> None:
    """Raise an `InputError` that names the class and what is wrong with what its `load` returned."""

    def expect(holds: bool, what: str, got: object) -> None:
        if not holds:
            raise InputError(f"Expected {type(data).__name__}.load() to return {what} but got {got}.")

    parts = [type(part).__name__ for part in loaded] if isinstance(loaded, tuple) else type(loaded).__name__
    tensors = isinstance(loaded, tuple) and len(loaded) == 3 and all(isinstance(part, Tensor) for part in loaded)
    expect(tensors, "three tensors (images, labels, domains)", parts)
    images, labels, domains = loaded
    count, square = len(images) if images.ndim else 0, (data.size, data.size, 3)
    expect(images.dtype == torch.uint8, "images of type uint8, from 0 to 255,", images.dtype)
    right = images.ndim == 4 and tuple(images.shape[1:]) == square
    expect(right, f"images of shape (N, {', '.join(map(str, square))})", tuple(images.shape))
    for what, values, source in (("labels", labels, "class_names"), ("domains", domains, "domain_names")):
        whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
        expect(whole, f"{what} that are integers", values.dtype)
        expect(tuple(values.shape) == (count,), f"{what} of shape ({count},), one for each image,", tuple(values.shape))
        known = len(getattr(data, source))
        for value in (int(values.min()), int(values.max())) if count else ():
            expect(0 <= value < known, f"{what} from 0 to {known - 1}, the places in {source},", value)
