"""DomainDataModule: images of several domains, one training loader for each client, a test set for each domain."""

from __future__ import annotations

import copy
import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from jdfl_lightning.core.errors import require_type
from jdfl_lightning.data.checks import MissingClasses, check_arguments, check_loaded, seen_domains
from jdfl_lightning.data.duplicates import digest_images, identical
from jdfl_lightning.data.loader import Loaders
from jdfl_lightning.data.partition import Partition, partition
from jdfl_lightning.data.summary import describe
from jdfl_lightning.data.transforms import Augment, Augmentation, Normalize, Resize, checked_normalize

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) during long work."""


PLACES = ("root", "roots", "download")
"""Names of a data module's arguments that say only where its images are stored."""


NOT_IN_PHASE_1 = ("augment",)
"""Names of a data module's arguments that clients' updates in Phase 1 do not depend on."""


def no_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Roster:
    """What a server knows about clients at remote sites; it holds no image and no true domain."""

    sizes: list[int]
    """For each client, the number of its training images."""
    fingerprint: str
    """Checksum of all images and their partition."""


class DomainDataModule(Loaders, ABC):
    """Images of several domains, partitioned among clients of one domain each.

    A subclass says where images come from (`load`) and what domains and classes there are. Every argument of
    ``__init__`` is kept as an attribute of the same name, so that a config can be written from the object. A subclass
    that hands ``**options`` on to this class has all of the options below.

    Args:
        size: height and width of the images; null for that of the backbone's weights, or `default_size`.
        num_clients: N; in proportion to the domains' sizes, at least one each.
        test_fraction: share of every domain that is held out, rounded up.
        augment: random transforms of training images in Phase 2: names of classes of torchvision.transforms.v2, or
            class_path with init_args; null for none.
        normalize: what the network gets: unit for values in [-1, 1], imagenet for torchvision's pretrained networks,
            or the mean and std of the channels, of values in [0, 1]; null for that of the backbone's weights, or unit.
        resize: how an image that is not square becomes so: squash, its whole area, or crop, its centre.
        val_fraction: share of every domain's images, without its test images, that is held out for validation, rounded
            up; 0 for none.
        unseen: a domain, or a list of them, that no client has: all of its images are a test set of their own.
        domain_mix: lambda, from 0 to 1: the share of every client's images that is exchanged for images of all
            domains. 0: a client has one domain. 1: every client has all domains in proportion.
        label_skew: alpha of the Dirichlet distribution that divides each class of a domain among its clients, above 0;
            the smaller, the more the clients' classes differ. null: they have the same proportions.
        missing_classes: whether a folder of a domain may lack a class: refuse or allow.
        drop_duplicates: leave out the training images that are held-out images too, pixel for pixel.
    """

    domain_names: Sequence[str] = ()
    """The domains that clients have; a number in `domains` is a place in this list. Those that are unseen are in it
    until the images are loaded, and then in `unseen_names`."""
    unseen_names: Sequence[str] = ()
    """The domains that no client has; their numbers in `domains` follow those of `domain_names`."""
    class_names: Sequence[str] = ()
    """The classes; a label is a place in this list."""
    network: str = ""
    """Checksum of the frozen network that gives the features; empty if there is none."""
    default_size: ClassVar[int] = 112
    """Height and width if neither the user nor the backbone's weights say another."""
    roster: Roster | None = None
    """Info about the images at remote sites; None if the images are local."""

    def __init__(
        self,
        size: int | None,
        num_clients: int,
        test_fraction: float,
        *,
        augment: Augment | None = None,
        normalize: Normalize | None = None,
        resize: Resize = "squash",
        val_fraction: float = 0.0,
        unseen: list[str] | str | None = None,
        domain_mix: float = 0.0,
        label_skew: float | None = None,
        missing_classes: MissingClasses = "refuse",
        drop_duplicates: bool = False,
    ) -> None:
        super().__init__()
        given = {"size": size, "normalize": normalize}
        self.left_open = frozenset(name for name, value in given.items() if value is None)
        """Names of the arguments that the backbone's weights decide, if it has some."""
        self.size = self.default_size if size is None else size
        self.num_clients = num_clients
        self.test_fraction = test_fraction
        self.augment = augment
        self.normalize: Normalize = "unit" if normalize is None else normalize
        self.resize = resize
        self.val_fraction = val_fraction
        self.unseen = unseen
        self.domain_mix = domain_mix
        self.label_skew = label_skew
        self.missing_classes = missing_classes
        self.drop_duplicates = drop_duplicates
        self.check()
        seen_domains(self)
        self.progress: Progress = no_progress

    def check(self) -> None:
        """Raise an `InputError` that names an argument that cannot be used; prepare what depends on them."""
        for name, hint in _hints().items():
            require_type(f"--data.{name}", getattr(self, name), hint)
        check_arguments(self)
        self._augmentation = Augmentation(self.augment, self.size) if self.augment else None
        self.augment = self._augmentation.specs if self._augmentation else None
        self.normalize = checked_normalize(self.normalize)

    def prepared_for(self, size: int, normalize: Normalize) -> DomainDataModule:
        """Return a copy with the preprocessing of a network's weights, where the user has not given another.

        Args:
            size: height and width of the images.
            normalize: what the network gets.
        """
        found = copy.copy(self)
        if "normalize" in self.left_open:
            found.normalize = normalize
        if "size" in self.left_open and size != self.size:
            found.size = size
            found._unload()
        found.left_open = frozenset()
        found.check()
        return found

    def _unload(self) -> None:
        """Forget what was loaded, and all that was derived from it."""
        self.domain_names = vars(self).pop("_all_names", self.domain_names)
        for name in ("images", "labels", "domains", "partition", "_copies", "pixels", "unseen_names"):
            vars(self).pop(name, None)

    def with_features(self, features: Tensor | None, network: str) -> DomainDataModule:
        """Return a copy whose batches have features in place of images.

        Args:
            features: features of every image (N, F); None where the images are at remote sites.
            network: checksum of the network that gives them.
        """
        found = copy.copy(self)
        found.features, found.network = features, network
        return found

    def __repr__(self) -> str:
        """Show the arguments, and those of the options that are not at their defaults."""
        own = [name for name in inspect.signature(type(self).__init__).parameters if name in vars(self)]
        changed = [name for name, default in option_defaults().items() if vars(self).get(name, default) != default]
        names = dict.fromkeys([*own, *changed])
        return f"{type(self).__name__}({', '.join(f'{name}={vars(self)[name]!r}' for name in names)})"

    __str__ = __repr__  # Lightning's own fails for loaders that are no DataLoader

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
        check_loaded(self, loaded)
        images, labels, domains = loaded
        names, seen = list(self.domain_names), seen_domains(self)
        self._all_names, self.domain_names = self.domain_names, seen
        self.unseen_names = [name for name in names if name not in seen]
        places = torch.tensor([[*seen, *self.unseen_names].index(name) for name in names])
        self.images, self.labels, self.domains = images, labels.long(), places[domains.long()]

    def with_unseen(self, unseen: str) -> DomainDataModule:
        """Return the same data with another unseen domain; its images are still to be loaded."""
        other = copy.copy(self)
        other.unseen = unseen
        other._unload()
        seen_domains(other)
        return other

    def deal(self, seed: int) -> Partition:
        """Hold out the test images and partition the rest among the clients, as a function of the seed."""
        self.load_once()
        self.partition = partition(
            self.labels,
            self.domains,
            self.domain_names,
            self.num_clients,
            self.test_fraction,
            seed,
            val_fraction=self.val_fraction,
            domain_mix=self.domain_mix,
            label_skew=self.label_skew,
            copies=self._copies if self.drop_duplicates else None,
        )
        return self.partition

    @cached_property
    def _copies(self) -> Tensor:
        """A number for every image that identical ones share."""
        return identical(self.images)

    def duplicated(self) -> int:
        """Return how many held-out images are training images too, pixel for pixel."""
        trained = self._copies[torch.cat(self.partition.clients)]
        return int(torch.isin(self._copies[self.partition.held_out], trained).sum())

    def untested(self) -> dict[str, list[str]]:
        """Return, by domain, the classes that its clients train on but that have no test image."""
        missing: dict[str, list[str]] = {}
        everything = torch.cat(self.partition.clients)
        for domain, (name, held) in enumerate(zip(self.domain_names, self.partition.test, strict=True)):
            trained = set(self.labels[everything[self.domains[everything] == domain]].tolist())
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
        dealt = self.partition
        for indices in (self.labels, self.domains, *dealt.clients, *dealt.test, *dealt.val, *dealt.unseen):
            digest.update(f"{len(indices)} ".encode() + indices.numpy().tobytes())
        picked = self.images[:: max(1, len(self.images) // 200)]
        digest.update(f"{tuple(self.images.shape)} ".encode() + picked.contiguous().numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def pixels(self) -> str:
        """Checksum of all images."""
        return digest_images(self.images)

    def describe(self) -> dict[str, Any]:
        """Return the numbers of images by domain, class and client, with the settings that decide them."""
        if self.roster is None:
            self.setup()
        return describe(self)


@cache
def option_defaults() -> dict[str, Any]:
    """Return the options that all data modules share, with the values that leave them unused."""
    options = inspect.signature(DomainDataModule.__init__).parameters.values()
    return {o.name: o.default for o in options if o.kind is o.KEYWORD_ONLY} | {"normalize": "unit"}


@cache
def _hints() -> dict[str, Any]:
    """Return the types of the arguments that all data modules share; a normalisation has a check of its own."""
    hints = get_type_hints(DomainDataModule.__init__)
    kept = {name: hint for name, hint in hints.items() if name not in ("normalize", "return")}
    return kept | {"size": int, "augment": list | None}
