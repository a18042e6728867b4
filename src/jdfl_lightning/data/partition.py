"""Partition of images among clients: pure functions of the labels, the domains and a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.seeding import numpy_generator


@dataclass(frozen=True)
class Partition:
    """Indices of the images that each client trains on and that each domain is tested on."""

    clients: list[Tensor]
    """For each client, the indices of its training images."""
    client_domains: list[int]
    """For each client, its true domain; the server never sees it."""
    test: list[Tensor]
    """For each domain, the indices of the images held out."""

    @cached_property
    def sizes(self) -> list[int]:
        """For each client, the number of its training images."""
        return [len(indices) for indices in self.clients]


def apportion(sizes: Sequence[int], total: int) -> list[int]:
    """Share a total in proportion to sizes, at least one each (Webster's method).

    >>> apportion([1843, 2109, 1503, 3536], 10)
    [2, 2, 2, 4]
    >>> apportion([766, 898, 125, 236], 4)
    [1, 1, 1, 1]
    """
    shares = [1] * len(sizes)
    for _ in range(total - len(sizes)):
        shares[max(range(len(sizes)), key=lambda d: sizes[d] / (2 * shares[d] + 1))] += 1
    return shares


def hold_out(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Choose indices to hold out, stratified by class, rounded so that the sum is exact."""
    classes, sizes = np.unique(labels, return_counts=True)
    quotas = sizes * count / len(labels)
    given = np.floor(quotas).astype(int)
    for position in np.argsort(given - quotas, kind="stable")[: count - given.sum()]:
        given[position] += 1
    chosen = [rng.permutation(np.flatnonzero(labels == c))[:n] for c, n in zip(classes, given, strict=True)]
    return np.sort(np.concatenate(chosen))


def hold_out_share(
    labels: np.ndarray, indices: np.ndarray, share: float, name: str, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Divide indices into those held out, a share rounded up and stratified by class, and the rest."""
    count = math.ceil(round(share * len(indices), 9))
    if not 0 < count < len(indices):
        raise InputError(
            f"Expected --data.test_fraction to leave images to train and to test on but {share} of the "
            f"{len(indices)} images of {name} is {count}."
        )
    held = hold_out(labels[indices], count, rng)
    return indices[held], np.delete(indices, held)


def partition(
    labels: Tensor, domains: Tensor, domain_names: Sequence[str], num_clients: int, test_fraction: float, seed: int
) -> Partition:
    """Hold out a share of every domain, then divide the rest of each domain among its own clients.

    A domain at a time: its hold-out is stratified by class and rounded up, so that it does not depend on the number
    of clients; its other images are dealt class by class, one to each of its clients in turn. Clients are numbered
    domain by domain, and their number is in proportion to the domains' sizes.
    """
    num_domains = len(domain_names)
    if num_clients < num_domains:
        raise InputError(
            f"Expected --data.num_clients to be at least {num_domains}, one for each domain, but got {num_clients}."
        )
    rng = numpy_generator(seed, "partition")
    train: list[np.ndarray] = []
    test: list[Tensor] = []
    for domain, name in enumerate(domain_names):
        indices = np.flatnonzero(domains.numpy() == domain)
        held, rest = hold_out_share(labels.numpy(), indices, test_fraction, name, rng)
        test.append(torch.from_numpy(held))
        rest = rng.permutation(rest)
        train.append(rest[np.argsort(labels.numpy()[rest], kind="stable")])
    clients: list[Tensor] = []
    client_domains: list[int] = []
    for domain, share in enumerate(apportion([len(images) for images in train], num_clients)):
        if share > len(train[domain]):
            raise InputError(
                f"Expected --data.num_clients to leave every client an image but {num_clients} clients are more than "
                f"there are images: {domain_names[domain]} has {len(train[domain])} for {share} clients."
            )
        clients += [torch.from_numpy(np.sort(train[domain][start::share])) for start in range(share)]
        client_domains += [domain] * share
    return Partition(clients, client_domains, test)
