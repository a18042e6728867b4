"""HubDomains: a data set of the Hugging Face Hub, or a copy of it, with a column that names the domain."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jdfl_lightning.core.errors import InputError, require_choice
from jdfl_lightning.data.base import DomainDataModule
from jdfl_lightning.data.cache import decode_content, decode_each, file_key
from jdfl_lightning.data.options import DataOptions, Unpack


class HubDomains(DomainDataModule):
    """Images of the Hugging Face Hub, by the columns of image, class and domain; needs the extra ``hub``.

    Args:
        path: id of the data set on the Hub, such as flwrlabs/pacs.
        image: column of the images.
        label: column of the classes.
        domain: column of the domains.
        root: folder of a copy, as ``save_to_disk`` of Hugging Face datasets writes it.
        download: fetch the data set from the Hub if there is no copy; into root, if it is given.
        revision: commit or tag of the data set; null for the newest.
        splits: splits to use, one after the other; null for all.
        keep_classes: the classes to use, in this order; null for all.
        keep_domains: the domains to use, in this order; null for all.
        size: height and width that the images are resized to; null for that of the backbone's weights, or 112.
        num_clients: N; in proportion to the domains' sizes, at least one each.
        test_fraction: share of every domain that is held out, rounded up.
        **options: those of every data module.
    """

    def __init__(
        self,
        path: str | None = None,
        image: str = "image",
        label: str = "label",
        domain: str = "domain",
        root: str | None = None,
        download: bool = False,
        revision: str | None = None,
        splits: list[str] | None = None,
        keep_classes: list[str] | None = None,
        keep_domains: list[str] | None = None,
        size: int | None = None,
        num_clients: int = 10,
        test_fraction: float = 0.2,
        **options: Unpack[DataOptions],
    ) -> None:
        super().__init__(size, num_clients, test_fraction, **options)
        self.path, self.image, self.label, self.domain = path, image, label, domain
        self.root = None if root is None else str(Path(root).expanduser().absolute())
        self.download, self.revision, self.splits = download, revision, splits
        self.keep_classes, self.keep_domains = keep_classes, keep_domains

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """Open the data set, choose classes and domains, and decode the images, or read them from the cache."""
        table = self._open()
        for option in ("image", "label", "domain"):
            require_choice(f"--data.{option}", getattr(self, option), table.column_names)
        self.class_names, labels = self._column(table, self.label, self.keep_classes, "--data.keep_classes")
        self.domain_names, domains = self._column(table, self.domain, self.keep_domains, "--data.keep_domains")
        rows = ((labels >= 0) & (domains >= 0)).nonzero().flatten()
        labels, domains = labels[rows], domains[rows]
        self._check_classes(labels, domains)
        return self._decode(table, rows.tolist()), labels, domains

    def fetch(self) -> None:
        """Download the data set into the root, if there is no copy."""
        self._open()

    def _open(self) -> Any:
        """Return the data set as one table: the copy in the root, or that of the Hub."""
        datasets = _library()
        there = self.root is not None and Path(self.root).is_dir() and any(Path(self.root).iterdir())
        try:
            if there:
                found = datasets.load_from_disk(self.root)
            elif self.download and self.path is not None:
                found = datasets.load_dataset(self.path, revision=self.revision)
                if self.root is not None:
                    found.save_to_disk(self.root)
            else:
                raise InputError(
                    "Expected --data.root to be a copy of the data set, as save_to_disk writes it, but found none at "
                    f"{self.root}. Pass --data.path and --data.download true to fetch it from the Hub."
                )
        except InputError:
            raise
        except Exception as error:  # whatever the library raises: no network, no such data set, a damaged copy
            source = self.root if there else self.path
            what = " ".join(str(error).split())[:300]
            raise InputError(
                f"Expected a data set but {source} cannot be read: {type(error).__name__} {what}."
            ) from error
        if not isinstance(found, dict):
            if self.splits is not None:
                raise InputError(f"Expected --data.splits to be null, as {self.root} has none, but got {self.splits}.")
            return found
        for name in self.splits or ():
            require_choice("every one of --data.splits", name, list(found))
        parts = [found[name] for name in self.splits or found]
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)

    @staticmethod
    def _column(table: Any, name: str, keep: Sequence[str] | None, option: str) -> tuple[tuple[str, ...], Tensor]:
        """Return the names in a column, and the place of each row's among them; -1 for one that is not kept."""
        feature, values = table.features[name], table.with_format(None)[name][:]
        known = getattr(feature, "names", None)
        words = [known[value] for value in values] if known is not None else [str(value) for value in values]
        names = list(known) if known is not None else sorted(set(words), key=_natural)
        for chosen in keep or ():
            require_choice(f"every one of {option}", chosen, names)
        names = list(keep) if keep is not None else [word for word in names if word in set(words)]
        places = {word: place for place, word in enumerate(names)}
        return tuple(names), torch.tensor([places.get(word, -1) for word in words])

    def _check_classes(self, labels: Tensor, domains: Tensor) -> None:
        """Refuse a domain without some class, unless some may be missing."""
        for domain, name in enumerate(self.domain_names):
            counts = torch.bincount(labels[domains == domain], minlength=len(self.class_names))
            missing = [self.class_names[place] for place in (counts == 0).nonzero().flatten().tolist()]
            if missing and self.missing_classes == "refuse":
                raise InputError(
                    f"Expected every domain to have every class but {name} has no image of {missing[0]}: pass "
                    "--data.missing_classes allow, or choose others by --data.keep_classes and --data.keep_domains."
                )

    def _decode(self, table: Any, rows: list[int]) -> Tensor:
        raw = table.cast_column(self.image, _library().Image(decode=False)).with_format(None)

        def decode_one(position: int) -> Any:
            cell = raw[rows[position]][self.image]
            if cell["bytes"] is None:  # a path, which may lead anywhere on this machine
                raise InputError(f"Expected a data set that holds its images but row {rows[position]} names a file.")
            return decode_content(
                io.BytesIO(cell["bytes"]), f"the image in row {rows[position]}", self.size, self.resize
            )

        files = [Path(entry["filename"]) for entry in table.cache_files]
        chosen = json.dumps([self.image, self.splits, rows])
        key = hashlib.blake2b(
            f"{file_key(files, self.size, self.resize)} {chosen}".encode(), digest_size=16
        ).hexdigest()
        return decode_each(key, len(rows), self.size, decode_one, self.progress)


def _natural(word: str) -> tuple[int, int, str]:
    """Return a key that sorts numbers by their value, before words.

    >>> sorted(["10", "b", "9", "a"], key=_natural)
    ['9', '10', 'a', 'b']
    """
    return (0, int(word), "") if word.isdigit() else (1, 0, word)


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            "Expected the package datasets, which HubDomains reads: pip install 'jdfl-lightning[hub]'."
        ) from error
    datasets.disable_progress_bars()
    return datasets
