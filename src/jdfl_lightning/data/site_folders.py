"""SiteFolders: sites with a folder of images each, all on one machine or each on its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jdfl_lightning.core.errors import InputError, require
from jdfl_lightning.core.seeding import numpy_generator
from jdfl_lightning.data.base import DomainDataModule, option_defaults
from jdfl_lightning.data.cache import decode_all
from jdfl_lightning.data.folder import image_files, subfolders
from jdfl_lightning.data.options import DataOptions, Unpack
from jdfl_lightning.data.partition import Partition, hold_out_share


class SiteFolders(DomainDataModule):
    """The images of sites: a folder ``<class>/<image>`` for each, or ``<client>/<class>/<image>`` if it has several.

    In a federation every site has only its own folder. With all folders on one machine, the same settings train the
    same clients on the same splits. Accuracy is reported for each site, by its number.

    Args:
        roots: the folders, one for each site.
        size: height and width that the images are resized to; null for that of the backbone's weights, or 112.
        num_clients: N, the clients of all sites together.
        test_fraction: share of every client's images that is held out, rounded up.
        classes: names of the classes; null if every client has images of all of them.
        **options: those of every data module.
    """

    def __init__(
        self,
        roots: list[str] | None = None,
        size: int | None = None,
        num_clients: int = 2,
        test_fraction: float = 0.2,
        classes: list[str] | None = None,
        **options: Unpack[DataOptions],
    ) -> None:
        super().__init__(size, num_clients, test_fraction, **options)
        for name in ("unseen", "domain_mix", "label_skew", "missing_classes", "drop_duplicates"):
            given, default = getattr(self, name), option_defaults()[name]
            require(
                given == default,
                f"--data.{name}",
                f"{default!r} for SiteFolders, whose sites keep what they have,",
                given,
            )
        self.roots = None if roots is None else [str(Path(root).expanduser().absolute()) for root in roots]
        self.classes = classes
        self.alone: int | None = None
        """In a federation, the number of this site."""
        self._sites: list[int] = []
        """The site of each client, as an index into `domain_names`."""
        self._holders = torch.empty(0)
        """The client of each image."""

    def stand_alone(self, site: int, root: str) -> None:
        """Use only one site of a federation, with its own folder."""
        self.alone, self.roots = site, [str(Path(root).expanduser().absolute())]

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """List the images of every client and decode them, or read them from the cache."""
        if not self.roots:
            raise InputError("Expected --data.roots: the folder of every site, as <class>/<image>.")
        numbers = range(len(self.roots)) if self.alone is None else [self.alone]
        clients = [(site, folder) for site, root in enumerate(self.roots) for folder in _clients(Path(root))]
        if self.alone is None and len(clients) != self.num_clients:
            raise InputError(
                f"Expected --data.num_clients to be {len(clients)}, the clients in --data.roots, but got "
                f"{self.num_clients}."
            )
        self.domain_names = tuple(f"site{number}" for number in numbers)
        self.class_names = tuple(self.classes or sorted({name for _, folder in clients for name in subfolders(folder)}))
        self._sites = [site for site, _ in clients]
        listed = [
            (path, label, client) for client, (_, folder) in enumerate(clients) for path, label in self._images(folder)
        ]
        images = decode_all([path for path, _, _ in listed], self.size, self.progress, self.resize)
        self._holders = torch.tensor([client for _, _, client in listed])
        return images, torch.tensor([label for _, label, _ in listed]), torch.tensor(self._sites)[self._holders]

    def _images(self, folder: Path) -> list[tuple[Path, int]]:
        """Return a client's images with their classes."""
        found = {name: image_files(path) for name, path in subfolders(folder).items()}
        if unknown := set(found) - set(self.class_names):
            raise InputError(f"Expected folders of --data.classes in {folder} but found {sorted(unknown)[0]!r}.")
        missing = [name for name in self.class_names if not found.get(name)]
        if self.classes is None and missing:
            raise InputError(
                f"Expected every client to have every class but {folder} has no image of {missing[0]}: "
                "name them all in --data.classes."
            )
        return [(path, label) for label, name in enumerate(self.class_names) for path in found.get(name, [])]

    def deal(self, seed: int) -> Partition:
        """Hold out a share of every client's images, as a function of (seed, site, client) alone."""
        self.load_once()
        train: list[Tensor] = []
        own_test: list[Tensor] = []
        test: list[list[np.ndarray]] = [[] for _ in self.domain_names]
        val: list[list[np.ndarray]] = [[] for _ in self.domain_names]
        for client, site in enumerate(self._sites):
            name, number = self.domain_names[site], client - self._sites.index(site)
            own = np.flatnonzero(self._holders.numpy() == client)
            rng = numpy_generator(seed, name, number)
            held, rest = hold_out_share(self.labels.numpy(), own, self.test_fraction, f"{name}, client {number}", rng)
            test[site].append(held)
            own_test.append(torch.from_numpy(held))
            if self.val_fraction:
                rng, flag = numpy_generator(seed, "validation", name, number), "--data.val_fraction"
                held, rest = hold_out_share(
                    self.labels.numpy(), rest, self.val_fraction, f"{name}, client {number}", rng, flag
                )
                val[site].append(held)
            train.append(torch.from_numpy(rest))
        tested, validated = ([torch.from_numpy(np.concatenate(p)) for p in parts if p] for parts in (test, val))
        self.partition = Partition(train, list(self._sites), tested, validated, own_test=own_test)
        return self.partition


def _clients(root: Path) -> Sequence[Path]:
    """Return the folders of a site's clients: the site's folder, or its subfolders if images are a level deeper."""
    if not root.is_dir():
        raise InputError(f"Expected the folder of a site but found none at {root}.")
    below = list(subfolders(root).values())
    if any(image_files(folder) for folder in below):
        return [root]
    if not any(image_files(folder) for client in below for folder in subfolders(client).values()):
        raise InputError(f"Expected <class>/<image> or <client>/<class>/<image> in {root} but found no image there.")
    return below
