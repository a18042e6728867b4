"""Phase 1: from the clients' update vectors to pseudo-domains. Pure functions, and the probe that makes the vectors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_rand_score, silhouette_score
from torch import Tensor

from jdfl_lightning.algorithms.base import LocalUpdate
from jdfl_lightning.errors import InputError
from jdfl_lightning.joint.targets import cosine_similarities
from jdfl_lightning.messages import FitTask
from jdfl_lightning.seeding import derive_seed
from jdfl_lightning.tensors import Record, Tensors, flatten, sub

Criterion = Literal["elbow", "silhouette"]
Vectors = npt.NDArray[np.float64]


def update_vector(before: Tensors, after: Tensors, names: Sequence[str]) -> Tensor:
    r"""Return :math:`\bar u = u / \|u\|_2` with :math:`u = \mathrm{vec}(\tilde\theta[P] - \theta_0[P])`.

    >>> update_vector({"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}, ["w"])
    tensor([0.6000, 0.8000])
    """
    update: Tensor = flatten(sub({name: after[name] for name in names}, before)).double()
    unit: Tensor = update / update.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return unit.float()


class DiscoveryProbe(LocalUpdate):
    """The client half of Phase 1: train plainly, then send the normalised update of the chosen layers alone.

    Args:
        task: what the server sent.
        names: the parameters P to look at.
    """

    def __init__(self, task: FitTask, names: Sequence[str]) -> None:
        super().__init__(task, {})
        self.names = list(names)

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        """Upload the update vector; a client keeps nothing from Phase 1."""
        return {"update": {"u": update_vector(self.task.weights, weights, self.names)}}, {}


@dataclass(frozen=True)
class PseudoDomains:
    """What Phase 1 found."""

    assignments: list[int]
    """z_i, the pseudo-domain of each client, by client id."""
    centroids: Tensor
    """mu_d (M, D)."""
    criterion: str
    """How M was chosen: given, elbow or silhouette."""
    inertias: dict[int, float]
    """Sum of squared distances to the centroids, for each M tried."""
    silhouettes: dict[int, float]
    """Mean silhouette, for each M from 2 that was tried."""

    @property
    def num_domains(self) -> int:
        """M."""
        return self.centroids.shape[0]

    def as_json(self, true_domains: Sequence[str] | None = None) -> dict[str, Any]:
        """Return plain numbers for ``discovery.json``, with the agreement with the true domains where they are known.

        The centroids themselves, vectors of a few hundred thousand numbers, are saved beside it as safetensors.
        """
        record: dict[str, Any] = {
            "num_domains": self.num_domains,
            "criterion": self.criterion,
            "assignments": self.assignments,
            "inertias": {str(m): value for m, value in self.inertias.items()},
            "silhouettes": {str(m): value for m, value in self.silhouettes.items()},
            "similarities": cosine_similarities(self.centroids).tolist(),
        }
        if true_domains is not None:
            record["true_domains"] = list(true_domains)
            record["ari"] = float(adjusted_rand_score(true_domains, self.assignments))
        return record


def elbow(inertias: dict[int, float]) -> int:
    """Return the M where the curve of inertias bends most: farthest below the chord from its first to its last point.

    >>> elbow({1: 10.0, 2: 6.0, 3: 2.0, 4: 1.5, 5: 1.0})
    3
    """
    ms = np.array(list(inertias), dtype=float)
    values = np.array(list(inertias.values()))
    if len(ms) < 3 or values[0] <= values[-1]:
        return int(ms[0])
    chord = (values - values[-1]) / (values[0] - values[-1]) + (ms - ms[0]) / (ms[-1] - ms[0])
    return int(ms[chord.argmin()])


def _kmeans(vectors: Vectors, num_domains: int, seed: int) -> KMeans:
    with warnings.catch_warnings():
        # fewer distinct vectors than clusters: an empty cluster is harmless, its inertia is 0
        warnings.simplefilter("ignore", ConvergenceWarning)
        return KMeans(num_domains, n_init=10, random_state=derive_seed(seed, "kmeans", num_domains) % 2**32).fit(
            vectors
        )


def cluster(
    vectors: Tensor, num_domains: int | None, criterion: Criterion, max_domains: int, seed: int
) -> PseudoDomains:
    """Cluster normalised update vectors into pseudo-domains by k-means.

    Args:
        vectors: (N, D), a row for each client.
        num_domains: M if it is given.
        criterion: how to choose M otherwise.
        max_domains: the largest M to try.
        seed: seed of k-means.

    >>> vectors = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0], [-1.0, 0.0], [-1.0, 0.1]])
    >>> cluster(vectors, None, "elbow", 10, seed=0).num_domains
    3
    """
    rows: Vectors = vectors.double().numpy()
    num_clients = len(rows)
    if num_domains is not None and not 1 <= num_domains <= num_clients:
        raise InputError(
            f"Expected --num_domains to be between 1 and the number of clients, {num_clients}, but got {num_domains}."
        )
    fits = {m: _kmeans(rows, m, seed) for m in range(1, min(max(max_domains, num_domains or 1), num_clients) + 1)}
    inertias = {m: float(fit.inertia_) for m, fit in fits.items()}
    silhouettes = {
        m: float(silhouette_score(rows, fit.labels_))
        for m, fit in fits.items()
        if 2 <= len(set(fit.labels_)) < num_clients
    }
    chosen = num_domains
    if chosen is None:
        chosen = (
            elbow(inertias)
            if criterion == "elbow" or not silhouettes
            else max(silhouettes, key=silhouettes.__getitem__)
        )
    # numbered by first appearance, so that the numbers do not depend on k-means' own order
    order = list(dict.fromkeys([*fits[chosen].labels_.tolist(), *range(chosen)]))
    return PseudoDomains(
        assignments=[order.index(label) for label in fits[chosen].labels_.tolist()],
        centroids=torch.from_numpy(fits[chosen].cluster_centers_[order]).float(),
        criterion="given" if num_domains is not None else criterion,
        inertias=inertias,
        silhouettes=silhouettes,
    )
