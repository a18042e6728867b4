"""Phase 1 at the server: from update vectors to pseudo-domains. Pure functions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score, silhouette_score
from torch import Tensor

from jdfl_lightning.clustering.criteria import Clusterings, Criterion, Silhouette
from jdfl_lightning.clustering.updates import Updates
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import UNKNOWN
from jdfl_lightning.core.seeding import derive_seed, numpy_generator
from jdfl_lightning.joint.targets import cosine_similarities

Vectors = npt.NDArray[np.float64]

_NOTHING = 1e-12
"""Share of the squared norms below which an inertia is rounding error."""
_SILHOUETTES = 2000
"""Largest number of clients for a silhouette, whose time is quadratic in it."""
_COLUMNS = 16384
"""Columns of the vectors that are converted to double precision at a time."""
_FEW_BYTES = 1 << 16
"""Size of the largest points whose clusters are kept."""


@dataclass(frozen=True)
class PseudoDomains:
    """The result of Phase 1."""

    assignments: dict[int, int]
    """z_i, the pseudo-domain of each client of Phase 1."""
    centroids: Tensor
    """mu_d (M, D)."""
    criterion: str
    """How M was chosen: given, or the name of the criterion."""
    inertias: dict[int, float]
    """Sum of squared distances to the centroids, for each M tried."""
    silhouettes: dict[int, float]
    """Mean silhouette, for each M from 2 that was tried."""
    note: str = ""
    """Why M was not chosen by the requested criterion, or the criterion's remark."""
    joined: dict[int, int] = field(default_factory=dict)
    """z_i of newcomers; `UNKNOWN` for a newcomer without a usable update."""
    moved: bool = False
    """Whether newcomers have moved the centroids."""

    @property
    def num_domains(self) -> int:
        """M."""
        return self.centroids.shape[0]

    @property
    def picks(self) -> dict[str, int | None]:
        """The M that each criterion would choose; None where it finds no structure."""
        tried = Clusterings(len(self.assignments), self.inertias, self.silhouettes)
        return {name: known().choose(tried)[0] for name, known in Criterion.short_names().items()}

    @property
    def newcomers(self) -> dict[int, int]:
        """The pseudo-domains of the newcomers that have one."""
        return {client: domain for client, domain in self.joined.items() if domain != UNKNOWN}

    def of(self, client: int) -> int:
        """Return a client's pseudo-domain, `UNKNOWN` if it has none."""
        return self.assignments.get(client, self.joined.get(client, UNKNOWN))

    def nearest(self, vector: Tensor) -> int:
        """Return the pseudo-domain whose centroid is nearest to an update vector."""
        return int((self.centroids.double() - vector.double()).norm(dim=1).argmin())

    def join(self, client: int, vector: Tensor | None, update: bool = False) -> PseudoDomains:
        """Return the pseudo-domains with a newcomer in the nearest one.

        Args:
            client: its id.
            vector: its update vector; None if it sent no usable one.
            update: move the centroid to the mean of its clients including this one.
        """
        if vector is None:
            return replace(self, joined=self.joined | {client: UNKNOWN})
        domain, centroids = self.nearest(vector), self.centroids
        if update:
            count = [*self.assignments.values(), *self.joined.values()].count(domain)
            centroids = centroids.clone()
            centroids[domain] += (vector - centroids[domain]) / (count + 1)
        joined = self.joined | {client: domain}
        return replace(self, joined=joined, centroids=centroids, moved=self.moved or update)

    def as_json(self, true_domains: Sequence[str] | None = None) -> dict[str, Any]:
        """Return plain numbers for ``discovery.json``, with the agreement with the true domains where they are known.

        The centroids themselves, vectors of a few hundred thousand numbers, are saved beside it as safetensors.

        Args:
            true_domains: the true domain of every client, by id.
        """
        record: dict[str, Any] = {
            "num_domains": self.num_domains,
            "criterion": self.criterion,
            "note": self.note,
            "picks": self.picks,
            "assignments": {str(client): domain for client, domain in self.assignments.items()},
            "inertias": {str(m): value for m, value in self.inertias.items()},
            "silhouettes": {str(m): value for m, value in self.silhouettes.items()},
            "similarities": cosine_similarities(self.centroids).tolist(),
        }
        if true_domains is not None:
            found = list(self.assignments.values())
            truth = [true_domains[client] for client in self.assignments]
            record["true_domains"] = {str(client): true_domains[client] for client in self.assignments}
            record["ari"] = float(adjusted_rand_score(truth, found))
            record["nmi"] = float(normalized_mutual_info_score(truth, found))
        return record


def _coordinates(vectors: Tensor) -> Vectors:
    """Return points with the same distances as the vectors, in at most as many dimensions as there are vectors.

    K-means depends on distances alone, so the long vectors are read only once.
    """
    count, length = vectors.shape
    if count >= length:
        exact: Vectors = vectors.double().numpy()
        return exact
    gram = torch.zeros(count, count, dtype=torch.float64)
    for part in vectors.split(_COLUMNS, dim=1):
        gram += part.double() @ part.double().T
    values, directions = np.linalg.eigh(gram.numpy())
    points: Vectors = directions * np.sqrt(values.clip(min=0))
    return points


def project(vectors: Tensor) -> list[list[float]]:
    """Return two coordinates of each vector, those along which the vectors differ most (principal components)."""
    points = _coordinates(vectors)
    flat = np.zeros((len(points), 2))
    dims = min(2, *points.shape)
    if not np.allclose(points, points[0]):  # else there is no principal direction
        flat[:, :dims] = PCA(dims, svd_solver="covariance_eigh").fit_transform(points)
    pairs: list[list[float]] = flat.tolist()
    return pairs


def _kmeans(points: Vectors, num_domains: int, seed: int) -> KMeans:
    """Run k-means; a few clients' clusters are kept, as all runs of a suite with the same seed share their updates."""
    if points.nbytes > _FEW_BYTES:
        return _new_kmeans(points, num_domains, seed)
    return _kept_kmeans(points.tobytes(), points.shape, str(points.dtype), num_domains, seed)


@lru_cache(maxsize=64)
def _kept_kmeans(points: bytes, shape: tuple[int, ...], dtype: str, num_domains: int, seed: int) -> KMeans:
    return _new_kmeans(np.frombuffer(points, dtype).reshape(shape), num_domains, seed)


def _new_kmeans(points: Vectors, num_domains: int, seed: int) -> KMeans:
    with warnings.catch_warnings():
        # fewer distinct vectors than clusters: an empty cluster is harmless, its inertia is 0
        warnings.simplefilter("ignore", ConvergenceWarning)
        return KMeans(num_domains, n_init=10, random_state=derive_seed(seed, "kmeans", num_domains) % 2**32).fit(points)


def _silhouettes(points: Vectors, fits: Mapping[int, KMeans], seed: int) -> dict[int, float]:
    """Return the mean silhouette for each M that has one, from a random sample of clients if there are many."""
    picked = np.arange(len(points))
    if len(points) > _SILHOUETTES:
        picked = np.sort(numpy_generator(seed, "silhouette").choice(len(points), _SILHOUETTES, replace=False))
    return {
        m: float(silhouette_score(points[picked], fit.labels_[picked]))
        for m, fit in fits.items()
        if 2 <= len(set(fit.labels_[picked])) < len(picked)
    }


def _choose(criterion: Criterion, tried: Clusterings) -> tuple[int, str, str]:
    """Return M, the criterion that chose it, and why this is not the requested one, or the criterion's remark."""
    try:
        m, note = criterion.choose(tried)
    except InputError:
        raise
    except Exception as error:  # whatever a user's class raises, or returns
        what = f"{type(error).__name__}: {error}"
        raise InputError(f"Expected the criterion {criterion.name} to return M and a remark but: {what}.") from error
    if m is not None:
        if not isinstance(m, (int, np.integer)) or isinstance(m, bool) or m not in tried.inertias:
            raise InputError(
                f"Expected the criterion {criterion.name} to choose a number that was tried, 1 to "
                f"{len(tried.inertias)}, but it chose {m!r}."
            )
        return int(m), criterion.name, note
    silhouette = Silhouette()
    m, why = silhouette.choose(tried)
    reasons = [note] if criterion.name == silhouette.name else [note, why]
    return m or 1, silhouette.name, ", ".join(filter(None, reasons))


def cluster(
    updates: Updates, num_domains: int | None, criterion: Criterion | str, max_domains: int, seed: int
) -> PseudoDomains:
    """Cluster normalised update vectors into pseudo-domains by k-means.

    Args:
        updates: the clients and their vectors.
        num_domains: M if it is given.
        criterion: how to choose M otherwise, as an object or a short name. If it sees no structure, the silhouette
            decides.
        max_domains: the largest M to try.
        seed: seed of k-means.

    >>> vectors = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0], [-1.0, 0.0], [-1.0, 0.1]])
    >>> cluster(Updates(list(range(6)), vectors), None, "elbow", 10, seed=0).num_domains
    3
    """
    count = len(updates.clients)
    if count == 0:
        raise InputError("Expected clients with an update to discover pseudo-domains from but none has one.")
    if num_domains is not None and not 1 <= num_domains <= count:
        raise InputError(
            f"Expected --num_domains to be between 1 and the number of clients in discovery, {count}, but got "
            f"{num_domains}."
        )
    points = _coordinates(updates.vectors)
    fits = {m: _kmeans(points, m, seed) for m in range(1, min(max(max_domains, num_domains or 1), count) + 1)}
    least = _NOTHING * float((points**2).sum())  # identical clients leave a rounding error
    inertias = {m: float(fit.inertia_) if fit.inertia_ > least else 0.0 for m, fit in fits.items()}
    silhouettes = _silhouettes(points, fits, seed) if inertias[1] > 0 else {}
    if num_domains is not None:
        chosen, by, note = num_domains, "given", ""
    else:
        chosen, by, note = _choose(Criterion.of(criterion), Clusterings(count, inertias, silhouettes))
    # numbered by first appearance, so that the numbers do not depend on k-means' own order
    labels, centres = fits[chosen].labels_, fits[chosen].cluster_centers_
    order = list(dict.fromkeys([*labels.tolist(), *range(chosen)]))
    return PseudoDomains(
        assignments={
            client: order.index(label) for client, label in zip(updates.clients, labels.tolist(), strict=True)
        },
        centroids=torch.stack([_centroid(updates.vectors, points, labels == label, centres[label]) for label in order]),
        criterion=by,
        inertias=inertias,
        silhouettes=silhouettes,
        note=note,
    )


def _centroid(vectors: Tensor, points: Vectors, members: npt.NDArray[np.bool_], centre: Vectors) -> Tensor:
    """Return the mean vector of a cluster; for an empty cluster, the vector nearest to k-means' centre."""
    if not members.any():
        return vectors[int(((points - centre) ** 2).sum(axis=1).argmin())].float()
    chosen = torch.from_numpy(np.flatnonzero(members))
    return torch.cat([part[chosen].double().mean(0).float() for part in vectors.split(_COLUMNS, dim=1)])
