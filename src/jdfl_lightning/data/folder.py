"""ImageFolderDomains: any tree of domain/class/image; the known data sets are small subclasses of it."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from jdfl_lightning.core.errors import InputError, notify, without_stop
from jdfl_lightning.data.base import DomainDataModule
from jdfl_lightning.data.cache import decode_all
from jdfl_lightning.data.download import Mirror, download
from jdfl_lightning.data.options import DataOptions, Unpack

IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"}
_RESERVED = {"overall", "worst", "spread"}  # columns of the tables
_DEPTH = 3  # levels below the root to search for the domains: PACS/kfold/<domain>, pacs/images/<domain>


def _squash(name: str) -> str:
    """Return a name in lower case without separators, equal for ``back_pack`` and ``Backpack``."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def subfolders(folder: Path) -> dict[str, Path]:
    """Return the visible subfolders, by name, in alphabetical order."""
    found = (path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith((".", "__")))
    return {path.name: path for path in found}


def _match(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return the names that have a subfolder, ignoring case and separators."""
    spelt: dict[str, Path] = {}
    for name, path in subfolders(folder).items():
        if _squash(name) in spelt and _squash(name) in map(_squash, names):
            raise InputError(f"Expected one folder for a name but found {spelt[_squash(name)]} and {path}.")
        spelt[_squash(name)] = path
    return {name: spelt[_squash(name)] for name in names if _squash(name) in spelt}


def image_files(folder: Path) -> list[Path]:
    """Return the visible images of a folder, in alphabetical order."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.name[0] != ".")


class ImageFolderDomains(DomainDataModule):
    """Images in a tree ``root/<domain>/<class>/<image>``; every domain has every class, unless some may be missing.

    Args:
        root: the folder of the domains.
        size: height and width that the images are resized to; null for that of the backbone's weights, or 112.
        num_clients: N; in proportion to the domains' sizes, at least one each.
        test_fraction: share of every domain that is held out, rounded up.
        **options: those of every data module.
    """

    def __init__(
        self,
        root: str | None = None,
        size: int | None = None,
        num_clients: int = 10,
        test_fraction: float = 0.2,
        **options: Unpack[DataOptions],
    ) -> None:
        super().__init__(size, num_clients, test_fraction, **options)
        self.root = None if root is None else str(Path(root).expanduser().absolute())

    def _root(self) -> Path:
        if self.root is None:
            raise InputError(f"Expected --data.root: the folder of {type(self).__name__}, as <domain>/<class>/<image>.")
        root = Path(self.root)
        if not root.is_dir():
            raise InputError(f"Expected --data.root to be a folder but found none at {self.root}.")
        return root

    def find(self, root: Path) -> dict[str, dict[str, list[Path]]]:
        """Return the images of a tree as domain -> class -> files; raise an `InputError` if something is missing."""
        domains = {domain: subfolders(folder) for domain, folder in subfolders(root).items()}
        classes = sorted({name for folders in domains.values() for name in folders})
        if not classes:
            images = any(map(image_files, subfolders(root).values()))
            hint = " It has <class>/<image>: give the folder above it." if images else ""
            raise InputError(
                f"Expected folders <domain>/<class>/<image> in --data.root but found none in {root}.{hint}"
            )
        if reserved := _RESERVED & set(domains):
            raise InputError(f"Expected domains of other names but {root} has a folder {reserved.pop()!r}: rename it.")
        return {domain: self._images(domain, folders, classes) for domain, folders in domains.items()}

    def _images(self, domain: str, folders: dict[str, Path], classes: Sequence[str]) -> dict[str, list[Path]]:
        images = {name: image_files(folders[name]) if name in folders else [] for name in classes}
        missing = [name for name, paths in images.items() if not paths]
        if missing and self.missing_classes == "refuse":
            raise InputError(
                f"Expected every domain to have every class but {domain} has no image of {missing[0]}: add some, or "
                "pass --data.missing_classes allow."
            )
        return images

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """List the images and decode them, or read them from the cache."""
        tree = self.find(self._root())
        self.domain_names = tuple(tree)
        self.class_names = tuple(next(iter(tree.values())))
        listed = [
            (path, label, domain)
            for domain, classes in enumerate(tree.values())
            for label, paths in enumerate(classes.values())
            for path in paths
        ]
        images = decode_all([path for path, _, _ in listed], self.size, self.progress, self.resize)
        return images, torch.tensor([label for _, label, _ in listed]), torch.tensor([d for _, _, d in listed])


class KnownDomains(ImageFolderDomains):
    """A published data set in its common folder layouts, with a download.

    A subclass names domains, classes, counts, mirrors and terms.

    Args:
        root: the folder of the domains, or one that contains it.
        size: height and width that the images are resized to; null for that of the backbone's weights, or 112.
        num_clients: N; in proportion to the domains' sizes, at least one each.
        test_fraction: share of every domain that is held out, rounded up.
        download: fetch the images into ``root`` if they are not there.
        **options: those of every data module.
    """

    counts: dict[str, tuple[int, ...]]
    """Images of each class, by domain."""
    mirrors: tuple[Mirror, ...]
    """Sources of the zip file, best first."""

    def __init__(
        self,
        root: str | None = None,
        size: int | None = None,
        num_clients: int = 10,
        test_fraction: float = 0.2,
        download: bool = False,
        **options: Unpack[DataOptions],
    ) -> None:
        super().__init__(root, size, num_clients, test_fraction, **options)
        self.download = download

    @property
    @abstractmethod
    def terms(self) -> str:
        """Terms of use of the images."""

    def find(self, root: Path) -> dict[str, dict[str, list[Path]]]:
        """Look for the domains in the root or below it, ignoring case and separators in folder names."""
        level = [root]
        for _ in range(_DEPTH + 1):
            for folder in level:
                domains = _match(folder, self.domain_names)
                if len(domains) == len(self.domain_names):
                    return {name: self._domain(name, path) for name, path in domains.items()}
            level = [below for folder in level for below in subfolders(folder).values()]
        names = ", ".join(self.domain_names)
        raise InputError(
            f"Expected {type(self).__name__} in --data.root but found no folder with {names} in {root}. "
            f"Pass --data.download true, or {self._instructions(root)}"
        )

    def _domain(self, name: str, folder: Path) -> dict[str, list[Path]]:
        classes = _match(folder, self.class_names)
        if not classes and (folder / "images").is_dir():
            classes = _match(folder / "images", self.class_names)
        return self._images(name, classes, self.class_names)

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """Download if asked and needed, then list and decode the images."""
        if self.download:
            self.fetch()
        data = super().load()
        _, labels, domains = data
        for domain, name in enumerate(self.domain_names):
            counts = tuple(torch.bincount(labels[domains == domain], minlength=len(self.class_names)).tolist())
            if counts != self.counts[name]:
                notify(
                    f"{type(self).__name__}'s {name} has {sum(counts):,} images here, {sum(self.counts[name]):,} as "
                    "published: results are not comparable.",
                )
        return data

    def _instructions(self, root: Path) -> str:
        return f"put the images as {root}/<domain>/<class>/<image> yourself; classes: {', '.join(self.class_names)}."

    def fetch(self) -> None:
        """Download the images into the root, if it is new or empty."""
        if self.root is None:
            raise InputError("Expected --data.root: the folder to download to.")
        root = Path(self.root)
        if root.is_dir() and any(root.iterdir()):
            return  # the folder is not empty: use it, or report what is wrong with it
        notify(f"Downloading {type(self).__name__} to {root}. Terms: {self.terms}")
        try:
            download(self.mirrors, root, self._check, self.progress)
        except InputError as error:
            raise InputError(f"{without_stop(error)}. Try again later, or {self._instructions(root)}") from error

    def _check(self, folder: Path) -> None:
        for domain, classes in self.find(folder).items():
            counts = tuple(len(paths) for paths in classes.values())
            if counts != self.counts[domain]:
                raise InputError(f"{domain} has {counts} images a class instead of {self.counts[domain]}")
