"""Phase 1: update vectors, clustering, the choice of M."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score

from helpers import experiment
from jdfl_lightning import Clustering
from jdfl_lightning.backends import LocalBackend
from jdfl_lightning.checkpoint import ClientStates
from jdfl_lightning.client import Site, fit_client
from jdfl_lightning.discovery import cluster, elbow, update_vector
from jdfl_lightning.errors import InputError
from jdfl_lightning.experiment import discover
from jdfl_lightning.messages import DISCOVERY, FitTask
from jdfl_lightning.rounds import Journal


def blobs(sizes: list[int], noise: float, seed: int, dim: int = 40) -> tuple[torch.Tensor, list[int]]:
    """Unit vectors around random directions."""
    g = torch.Generator().manual_seed(seed)
    truth = [d for d, size in enumerate(sizes) for _ in range(size)]
    centres = torch.nn.functional.normalize(torch.randn(len(sizes), dim, generator=g), dim=1)
    noisy = centres[truth] + noise * torch.randn(len(truth), dim, generator=g) / dim**0.5
    return torch.nn.functional.normalize(noisy, dim=1), truth


def test_update_vector_by_hand() -> None:
    """(3, 0) and (0, 4) concatenated are (3, 0, 0, 4), of length 5; a layer that is not chosen does not count."""
    before = {"a": torch.ones(2), "b": torch.zeros(2), "c": torch.zeros(1)}
    after = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([0.0, 4.0]), "c": torch.tensor([100.0])}
    assert update_vector(before, after, ["a", "b"]).tolist() == pytest.approx([0.6, 0, 0, 0.8])
    assert update_vector(before, before, ["a"]).tolist() == [0, 0]  # no update: no direction, and no NaN


@pytest.mark.parametrize("criterion", ["elbow", "silhouette"])
@pytest.mark.parametrize("sizes", [[2, 2, 2, 4], [8, 9, 7, 16], [3, 3]])
def test_clear_clusters_are_found(criterion: str, sizes: list[int]) -> None:
    vectors, truth = blobs(sizes, noise=0.3, seed=0)
    found = cluster(vectors, None, criterion, 10, seed=0)  # type: ignore[arg-type]
    assert found.num_domains == len(sizes)
    assert adjusted_rand_score(truth, found.assignments) == 1
    assert found.criterion == criterion
    assert found.centroids.shape == (len(sizes), 40)
    record = found.as_json([str(t) for t in truth])
    assert record["ari"] == 1
    assert list(record["inertias"]) == [str(m) for m in range(1, min(10, sum(sizes)) + 1)]
    for domain in range(len(sizes)):
        mean = vectors[[i for i, z in enumerate(found.assignments) if z == domain]].mean(0)
        torch.testing.assert_close(found.centroids[domain], mean)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100), m=st.integers(1, 6))
def test_clusters_do_not_depend_on_the_order_of_clients(seed: int, m: int) -> None:
    vectors, _ = blobs([2, 3, 2, 3, 2, 4], noise=0.2, seed=seed)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
    straight = cluster(vectors, m, "elbow", 10, seed=0)
    shuffled = cluster(vectors[order], m, "elbow", 10, seed=0)
    assert straight.num_domains == shuffled.num_domains == m
    assert straight.inertias[6] == pytest.approx(shuffled.inertias[6])
    if m == 6:  # with fewer clusters than blobs, which ones are joined may be a close call
        permuted = [straight.assignments[i] for i in order.tolist()]
        assert adjusted_rand_score(permuted, shuffled.assignments) == 1
    assert sorted(set(straight.assignments)) == list(range(m))
    assert straight.assignments[0] == 0  # numbered by first appearance


def test_inertias_fall() -> None:
    found = cluster(torch.randn(12, 5), 12, "elbow", 3, seed=0)
    values = list(found.inertias.values())
    assert len(values) == 12
    assert all(b <= a + 1e-9 for a, b in pairwise(values))
    assert values[-1] == pytest.approx(0, abs=1e-9)


def test_elbow_by_hand() -> None:
    assert elbow({1: 9.0, 2: 5.0, 3: 1.0, 4: 0.9, 5: 0.8, 6: 0.0}) == 3
    assert elbow({1: 1.0}) == 1
    assert elbow({1: 1.0, 2: 0.0}) == 1
    assert elbow({1: 0.0, 2: 0.0, 3: 0.0}) == 1


@pytest.mark.parametrize("m", [0, 5])
def test_impossible_m(m: int) -> None:
    with pytest.raises(InputError, match="--num_domains"):
        cluster(torch.randn(4, 3), m, "elbow", 10, seed=0)


def test_equal_updates_are_one_domain() -> None:
    found = cluster(torch.ones(5, 3), None, "silhouette", 10, seed=0)
    assert found.num_domains == 1
    assert cluster(torch.ones(1, 3), None, "silhouette", 10, seed=0).assignments == [0]
    given = cluster(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]), 4, "elbow", 10, seed=0)
    assert given.num_domains == 4  # M given stays M, even if some pseudo-domains have no client
    assert given.assignments == [0, 0, 1, 1]


def test_client_sends_only_the_update_of_the_chosen_layers() -> None:
    run = experiment(clustering=Clustering(layers="A", epochs=2))
    site = Site(run)
    weights, buffers = site.initial(1)
    result, state = fit_client(site, FitTask(1, DISCOVERY, 0, weights, buffers), {})
    (vector,) = result.upload["update"].values()
    assert vector.shape == (12 * 10 + 10,)
    assert vector.norm().item() == pytest.approx(1)
    assert (result.weights, result.buffers, state) == ({}, {}, {})
    assert result.num_steps == 2 * -(-result.num_examples // run.batch_size)


def test_discovery_gives_the_same_for_the_same_seed() -> None:
    outcomes = []
    for _ in range(2):
        run = experiment(num_domains=None)
        with LocalBackend().open(run, ClientStates(Path("clients"))) as runner:
            outcomes.append(discover(run, Site(run), runner, Journal()))
    assert outcomes[0].assignments == outcomes[1].assignments
    assert torch.equal(outcomes[0].centroids, outcomes[1].centroids)
    assert len(outcomes[0].assignments) == 4
