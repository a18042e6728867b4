"""Partition of images among clients: pure functions of the labels, the domains and a seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.seeding import numpy_generator

_DRAWS = 100  # of a Dirichlet distribution, until every client has an image


@dataclass(frozen=True)
class Partition:
    """Indices of the images that each client trains on and that each domain is validated and tested on."""

    clients: list[Tensor]
    """For each client, the indices of its training images."""
    client_domains: list[int]
    """For each client, its true domain, of which it has the most images; the server never sees it."""
    test: list[Tensor]
    """For each domain, the indices of its test images."""
    val: list[Tensor] = field(default_factory=list)
    """For each domain, the indices of its validation images; empty if there is no validation."""
    unseen: list[Tensor] = field(default_factory=list)
    """For each domain that no client has, the indices of its images."""
    dropped: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    """Indices of the images that nobody has, as they are copies of held-out ones."""
    whole_test: list[Tensor] | None = None
    """For each domain, the indices of all its test images, if `test` is one site's share of them."""
    own_test: list[Tensor] | None = None
    """For each client, the indices of those test images that are its own; None if they belong to no client."""

    @cached_property
    def sizes(self) -> list[int]:
        """For each client, the number of its training images."""
        return [len(indices) for indices in self.clients]

    def test_of(self, client: int) -> dict[str, Tensor]:
        """Return the indices of the test images of a client's domain and, by ``own``, of those that are its own."""
        domain = (self.whole_test or self.test)[self.client_domains[client]]
        return {"domain": domain} | ({} if self.own_test is None else {"own": self.own_test[client]})

    @cached_property
    def held_out(self) -> Tensor:
        """The indices of all images that nobody trains on: test, validation and unseen domains."""
        return torch.cat([*self.test, *self.val, *self.unseen])


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
    labels: np.ndarray,
    indices: np.ndarray,
    share: float,
    name: str,
    rng: np.random.Generator,
    flag: str = "--data.test_fraction",
) -> tuple[np.ndarray, np.ndarray]:
    """Divide indices into those held out, a share rounded up and stratified by class, and the rest."""
    count = math.ceil(round(share * len(indices), 9))
    if not 0 < count < len(indices):
        raise InputError(
            f"Expected {flag} to leave images to train and to test on but {share} of the {len(indices)} images of "
            f"{name} is {count}."
        )
    held = hold_out(labels[indices], count, rng)
    return indices[held], np.delete(indices, held)


def partition(
    labels: Tensor,
    domains: Tensor,
    domain_names: Sequence[str],
    num_clients: int,
    test_fraction: float,
    seed: int,
    *,
    val_fraction: float = 0.0,
    domain_mix: float = 0.0,
    label_skew: float | None = None,
    copies: Tensor | None = None,
) -> Partition:
    """Hold out a share of every domain, then divide the rest of each domain among its own clients.

    A domain at a time: its hold-out is stratified by class and rounded up, so that it does not depend on the number
    of clients; its other images are dealt class by class, one to each of its clients in turn. Clients are numbered
    domain by domain, and their number is in proportion to the domains' sizes. Test images depend on none of the
    keyword arguments, and validation images only on their share.

    Args:
        labels: the class of every image.
        domains: the domain of every image, as a place in the names; images of further domains are unseen.
        domain_names: the domains that clients have.
        num_clients: N.
        test_fraction: share of every domain that is held out for tests.
        seed: decides what is random.
        val_fraction: share of every domain's other images that is held out for validation.
        domain_mix: share of every client's images that is exchanged for images of all domains.
        label_skew: alpha of the Dirichlet distribution that divides a class of a domain among its clients; None to
            deal them evenly.
        copies: a number for every image that identical ones share; training images that are copies of held-out ones
            are dropped. None to drop none.
    """
    num_domains = len(domain_names)
    if num_clients < num_domains:
        raise InputError(
            f"Expected --data.num_clients to be at least {num_domains}, one for each domain, but got {num_clients}."
        )
    rng, val_rng = numpy_generator(seed, "partition"), numpy_generator(seed, "validation")
    known, groups = labels.numpy(), domains.numpy()
    rest: list[np.ndarray] = []
    test: list[np.ndarray] = []
    val: list[np.ndarray] = []
    for domain, name in enumerate(domain_names):
        held, other = hold_out_share(known, np.flatnonzero(groups == domain), test_fraction, name, rng)
        test.append(held)
        rest.append(rng.permutation(other))
        if val_fraction:
            flag = "--data.val_fraction"
            val.append(hold_out_share(known, other, val_fraction, name, val_rng, flag)[0])
    unseen = [np.flatnonzero(groups == domain) for domain in range(num_domains, int(groups.max(initial=-1)) + 1)]
    held_out = np.concatenate([*test, *val, *unseen])
    gone = np.zeros(len(known), dtype=bool)
    if copies is not None:
        gone = np.isin(copies.numpy(), copies.numpy()[held_out])
    train = []
    for order in rest:
        order = order[~(gone[order] | np.isin(order, held_out))]
        train.append(order[np.argsort(known[order], kind="stable")])
    clients = _deal(train, known, domain_names, num_clients, label_skew, numpy_generator(seed, "label_skew"))
    if domain_mix:
        clients = mix(clients, groups, known, domain_mix)
    majority = [int(np.bincount(groups[own]).argmax()) for own in clients]
    gone[held_out] = False
    return Partition(
        [torch.from_numpy(np.sort(own)) for own in clients],
        majority,
        [torch.from_numpy(held) for held in test],
        [torch.from_numpy(held) for held in val],
        [torch.from_numpy(held) for held in unseen],
        torch.from_numpy(np.flatnonzero(gone)),
    )


def _deal(
    train: Sequence[np.ndarray],
    labels: np.ndarray,
    domain_names: Sequence[str],
    num_clients: int,
    label_skew: float | None,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Divide each domain's images, sorted by class, among its own clients."""
    clients: list[np.ndarray] = []
    for name, images, share in zip(
        domain_names, train, apportion([len(own) for own in train], num_clients), strict=True
    ):
        if share > len(images):
            raise InputError(
                f"Expected --data.num_clients to leave every client an image but {num_clients} clients are more than "
                f"there are images: {name} has {len(images)} for {share} clients."
            )
        if label_skew is None:
            clients += [images[start::share] for start in range(share)]
        else:
            clients += skew(images, labels[images], share, label_skew, name, rng)
    return clients


def skew(
    images: np.ndarray, labels: np.ndarray, share: int, alpha: float, name: str, rng: np.random.Generator
) -> list[np.ndarray]:
    """Divide each class among clients by proportions drawn from a Dirichlet distribution; every client gets an image.

    Args:
        images: what is divided.
        labels: their classes.
        share: the number of clients.
        alpha: concentration; the smaller, the fewer clients have most of a class.
        name: of the domain, for the error if no draw leaves every client an image.
        rng: draws the proportions.
    """
    for _ in range(_DRAWS):
        parts: list[list[np.ndarray]] = [[] for _ in range(share)]
        for label in np.unique(labels):
            own = images[labels == label]
            ends = np.rint(np.cumsum(rng.dirichlet([alpha] * share)) * len(own)).astype(int)
            for client, piece in enumerate(np.split(own, ends[:-1])):
                parts[client].append(piece)
        clients = [np.concatenate(pieces) for pieces in parts]
        if all(len(own) for own in clients):
            return clients
    raise InputError(
        f"Expected --data.label_skew to leave every client an image but at {alpha:g} none of {_DRAWS} draws does for "
        f"the {share} clients of {name}, with {len(images)} images: raise it, or lower --data.num_clients."
    )


def mix(clients: Sequence[np.ndarray], domains: np.ndarray, labels: np.ndarray, share: float) -> list[np.ndarray]:
    """Have every client exchange a share of its images, evenly over its classes, for images of all domains.

    What clients give is sorted by domain and class and dealt back, to every client as many as it gave and evenly over
    this order. So sizes do not change, and what a client gets has domains and classes in the proportions of all that
    was given.

    >>> mix([np.arange(4), np.arange(4, 8)], np.arange(8) // 4, np.zeros(8), 0.5)
    [array([0, 2, 1, 5]), array([4, 6, 3, 7])]
    """
    kept, given, turns = [], [], []
    for client, own in enumerate(clients):
        own = own[np.argsort(labels[own], kind="stable")]
        count = math.floor(share * len(own) + 0.5)
        places = ((np.arange(count) + 0.5) * len(own) / max(count, 1)).astype(int)
        given.append(own[places])
        kept.append(np.delete(own, places))
        turns += [((turn + 0.5) / count, client) for turn in range(count)]
    pool = np.concatenate(given)
    pool = pool[np.lexsort((labels[pool], domains[pool]))]
    getters = np.array([client for _, client in sorted(turns)], dtype=int)
    return [np.concatenate([own, pool[getters == client]]) for client, own in enumerate(kept)]
