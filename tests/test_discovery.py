"""Phase 1: update vectors, clustering, the choice of M."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from helpers import Reports, contents, digits, discovered, examples, experiment, targets
from jdfl_lightning import Clustering, Experiment, GradedTargets, PoolBackend, TrainerOptions, fit
from jdfl_lightning.backends.local import LocalRunner
from jdfl_lightning.cli import main
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.clustering.clusters import PseudoDomains, cluster, project
from jdfl_lightning.clustering.criteria import best_silhouette, elbow
from jdfl_lightning.clustering.updates import Updates, unit, update_vector
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import DISCOVERY_ROUND, UNKNOWN, FitFailure, FitResult, FitTask
from jdfl_lightning.server.events import Events
from jdfl_lightning.server.phase1 import assign_newcomers, collect_updates, discovery_clients
from jdfl_lightning.server.rounds import Rounds
from jdfl_lightning.server.run import discover
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.storage.checkpoint import ClientStates
from jdfl_lightning.storage.discoveries import read_discovery
from jdfl_lightning.storage.records import load_record
from jdfl_lightning.supervision import Random
from jdfl_lightning.ui.display import Display


def of(vectors: torch.Tensor) -> Updates:
    """Updates of clients 0, 1, 2 and so on."""
    return Updates(list(range(len(vectors))), vectors)


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
    found = cluster(of(vectors), None, criterion, 10, seed=0)
    assert found.num_domains == len(sizes)
    assert adjusted_rand_score(truth, list(found.assignments.values())) == 1
    assert found.criterion == criterion
    assert found.centroids.shape == (len(sizes), 40)
    record = found.as_json([str(t) for t in truth])
    assert record["ari"] == record["nmi"] == 1
    assert list(record["inertias"]) == [str(m) for m in range(1, min(10, sum(sizes)) + 1)]
    for domain in range(len(sizes)):
        mean = vectors[[i for i, z in found.assignments.items() if z == domain]].mean(0)
        torch.testing.assert_close(found.centroids[domain], mean)


@examples(20)
@given(seed=st.integers(0, 100), m=st.integers(1, 6))
def test_clusters_do_not_depend_on_the_order_of_clients(seed: int, m: int) -> None:
    vectors, _ = blobs([2, 3, 2, 3, 2, 4], noise=0.2, seed=seed)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
    straight = cluster(of(vectors), m, "elbow", 10, seed=0)
    shuffled = cluster(of(vectors[order]), m, "elbow", 10, seed=0)
    assert straight.num_domains == shuffled.num_domains == m
    assert straight.inertias[6] == pytest.approx(shuffled.inertias[6])
    if m == 6:  # with fewer clusters than blobs, which ones are joined may be a close call
        permuted = [straight.assignments[i] for i in order.tolist()]
        assert adjusted_rand_score(permuted, list(shuffled.assignments.values())) == 1
    assert sorted(set(straight.assignments.values())) == list(range(m))
    assert straight.assignments[0] == 0  # numbered by first appearance


def test_inertias_fall() -> None:
    found = cluster(of(torch.randn(12, 5)), 12, "elbow", 3, seed=0)
    values = list(found.inertias.values())
    assert len(values) == 12
    assert all(b <= a + 1e-9 for a, b in pairwise(values))
    assert values[-1] == pytest.approx(0, abs=1e-9)


def test_elbow_by_hand() -> None:
    """At M = 3 the chord from (1, 9) to (6, 0) is at 5.4, the curve at 1: a depth of 4.4 / 9. Two points have no elbow.

    A straight curve has depth 0; one that is 0.4 of 10 below it has a depth of 0.04, which is not seen, 0.6 is.
    """
    assert elbow({1: 9.0, 2: 5.0, 3: 1.0, 4: 0.9, 5: 0.8, 6: 0.0}) == 3
    assert elbow({1: 1.0}) is None
    assert elbow({1: 1.0, 2: 0.0}) is None
    assert elbow({1: 0.0, 2: 0.0, 3: 0.0}) is None
    assert elbow({1: 10.0, 2: 4.6, 3: 0.0}) is None
    assert elbow({1: 10.0, 2: 4.4, 3: 0.0}) == 2


@examples(30)
@given(count=st.integers(4, 12), seed=st.integers(0, 100))
def test_equally_distant_clients_show_no_elbow(count: int, seed: int) -> None:
    """Orthogonal updates: M clusters have an inertia of N - M whoever is joined, which is a straight line."""
    found = cluster(of(torch.eye(count)), None, "elbow", 10, seed)
    for m, inertia in found.inertias.items():
        assert inertia == pytest.approx(count - m, abs=1e-9)
    assert found.picks == {"elbow": None, "silhouette": None}
    assert (found.num_domains, found.criterion) == (1, "silhouette")
    assert found.note == "no elbow is visible, no silhouette says that there are several"


def test_few_clients_are_left_to_the_silhouette() -> None:
    """Two alike and one apart: silhouettes are about 1, 1 and 0 (alone in its cluster), so M = 2."""
    found = cluster(of(torch.tensor([[1.0, 0.0], [1.0, 0.01], [0.0, 1.0]])), None, "elbow", 10, seed=0)
    assert (found.num_domains, found.criterion) == (2, "silhouette")
    assert found.note == "3 clients are too few for an elbow"
    assert found.silhouettes[2] == pytest.approx(2 / 3, abs=0.01)
    alone = cluster(of(torch.ones(1, 3)), None, "elbow", 10, seed=0)
    assert alone.num_domains == 1
    assert alone.note == "1 clients are too few for an elbow, no silhouette says that there are several"
    assert found.picks == {"elbow": None, "silhouette": 2}


def test_best_silhouette_by_hand() -> None:
    assert best_silhouette({2: 0.2, 3: 0.5, 4: 0.5}) == 3
    assert best_silhouette({2: 0.049}) is None
    assert best_silhouette({2: 0.05}) == 2
    assert best_silhouette({}) is None


@examples(15)
@given(seed=st.integers(0, 100), m=st.integers(1, 5))
def test_fewer_dimensions_change_nothing(seed: int, m: int) -> None:
    """What k-means finds is of the vectors themselves: their inertia, and each with its nearest mean.

    Where it has to find four groups, it finds those that scikit-learn finds in all dimensions. Other numbers of groups
    have several optima that are almost as good, and which one is reached is chance.
    """
    vectors, _ = blobs([3, 4, 2, 3], noise=0.5, seed=seed, dim=300)
    exact = vectors.double()
    found = cluster(of(vectors), m, "elbow", 5, seed)
    labels = torch.tensor(list(found.assignments.values()))
    means = torch.stack([exact[labels == domain].mean(dim=0) for domain in range(m)])
    distances = torch.cdist(exact, means)
    assert found.inertias[m] == pytest.approx(float((exact - means[labels]).square().sum()), rel=1e-6)
    assert (distances.gather(1, labels[:, None])[:, 0] <= distances.min(dim=1).values + 1e-9).all()
    if m in (1, 4):
        plain = KMeans(m, n_init=30, random_state=0).fit(exact.numpy())
        assert found.inertias[m] == pytest.approx(plain.inertia_, rel=1e-6)
        assert adjusted_rand_score(plain.labels_, labels) == 1


def test_projection_keeps_what_lies_in_a_plane() -> None:
    """Points of a plane in 50 dimensions keep their distances."""
    generator = torch.Generator().manual_seed(0)
    plane = torch.linalg.qr(torch.randn(50, 2, generator=generator)).Q
    points = torch.randn(7, 2, generator=generator)
    flat = torch.tensor(project(points @ plane.T))
    torch.testing.assert_close(torch.cdist(flat, flat), torch.cdist(points, points).float(), atol=1e-4, rtol=1e-4)
    assert project(torch.ones(3, 9)) == [[0, 0], [0, 0], [0, 0]]
    assert project(torch.ones(1, 9)) == [[0, 0]]


def test_many_clients() -> None:
    """More clients than entries, and more than a silhouette is computed from."""
    vectors, truth = blobs([900, 800, 700], noise=0.3, seed=0, dim=12)
    found = cluster(of(vectors), None, "silhouette", 4, seed=0)
    assert found.num_domains == 3
    assert adjusted_rand_score(truth, list(found.assignments.values())) == 1


@pytest.mark.parametrize("m", [0, 5])
def test_impossible_m(m: int) -> None:
    with pytest.raises(InputError, match="--num_domains"):
        cluster(of(torch.randn(4, 3)), m, "elbow", 10, seed=0)


def test_equal_updates_are_one_domain() -> None:
    found = cluster(of(torch.ones(5, 3)), None, "silhouette", 10, seed=0)
    assert found.num_domains == 1
    assert cluster(of(torch.ones(1, 3)), None, "silhouette", 10, seed=0).assignments == {0: 0}
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    given = cluster(of(vectors), 4, "elbow", 10, seed=0)
    assert given.num_domains == 4  # M given stays M, even if some pseudo-domains have no client
    assert given.assignments == {0: 0, 1: 0, 2: 1, 3: 1}
    assert torch.isfinite(given.centroids).all()


@pytest.mark.parametrize("count", [2, 5, 12])
def test_equal_updates_of_many_entries_are_one_domain(count: int) -> None:
    """Rounding leaves distances of 1e-8 or so, which are no structure."""
    one = unit(torch.randn(3000, generator=torch.Generator().manual_seed(count)))
    found = cluster(of(one.repeat(count, 1)), None, "elbow", 10, seed=0)
    assert found.num_domains == 1
    assert set(found.inertias.values()) == {0.0}
    assert found.picks == {"elbow": None, "silhouette": None}


@examples(20)
@given(count=st.integers(4, 40), length=st.integers(1000, 3000), seed=st.integers(0, 100))
def test_nothing_is_found_in_noise(count: int, length: int, seed: int) -> None:
    vectors = torch.randn(count, length, generator=torch.Generator().manual_seed(seed))
    found = cluster(of(torch.nn.functional.normalize(vectors, dim=1)), None, "elbow", 10, seed)
    assert found.num_domains == 1


def test_client_sends_only_the_update_of_the_chosen_layers() -> None:
    run = experiment(clustering=Clustering(layers="A", epochs=2))
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    result, state = fit_client(workspace, FitTask(1, DISCOVERY_ROUND, 0, weights, buffers), {})
    (vector,) = result.upload["update"].values()
    assert vector.shape == (12 * 10 + 10,)
    assert vector.norm().item() == pytest.approx(1)
    assert (result.weights, result.buffers, state) == ({}, {}, {})
    assert result.num_steps == 2 * -(-result.num_examples // run.batch_size)


def centroids(m: int, length: int = 5) -> st.SearchStrategy[torch.Tensor]:
    entries = st.floats(-100, 100, width=32)
    return st.lists(st.lists(entries, min_size=length, max_size=length), min_size=m, max_size=m).map(torch.tensor)


@examples(200)
@given(
    mu=st.integers(1, 8).flatmap(centroids),
    alpha=st.floats(0.01, 1),
    tau=st.floats(0.01, 10),
    given_alpha=st.booleans(),
)
def test_graded_targets_for_any_centroids(mu: torch.Tensor, alpha: float, tau: float, given_alpha: bool) -> None:
    """Rows sum to 1, alpha is on the own pseudo-domain, and a more similar one never gets less."""
    m = len(mu)
    table = GradedTargets(mu, alpha if given_alpha else None, tau).table
    own = (alpha if given_alpha else 0.55 if m <= 5 else 0.45) if m > 1 else 1.0
    assert table.shape == (m, m)
    assert table.sum(dim=1).tolist() == pytest.approx([1] * m, abs=1e-6)
    assert table.diagonal().tolist() == pytest.approx([own] * m)
    assert (table >= 0).all()
    # torch's own cosines are wrong for very short vectors
    lengths = [math.sqrt(sum(x * x for x in row)) or 1.0 for row in mu.tolist()]
    unit = [[x / length for x in row] for row, length in zip(mu.tolist(), lengths, strict=True)]
    similarities = torch.tensor([[sum(x * y for x, y in zip(a, b, strict=True)) for b in unit] for a in unit]).double()
    for d in range(m):
        others = [other for other in range(m) if other != d]
        for a in others:
            for b in others:
                if similarities[d, a] > similarities[d, b] + 1e-9:
                    assert table[d, a] >= table[d, b]
    if m == 2:
        assert table[0, 1].item() == pytest.approx(1 - own, abs=1e-6)


class Faulty(LocalRunner):
    """Changes what some clients send in Phase 1."""

    def __init__(self, run: Experiment, faults: dict[int, Any]) -> None:
        super().__init__(Workspace(run), ClientStates(Path("clients")))
        self.faults = faults
        self.asked: list[FitTask] = []

    def fit(self, tasks: Sequence[FitTask]) -> Iterator[FitResult | FitFailure]:
        self.asked += tasks
        for result in super().fit(tasks):
            fault = self.faults.get(result.client)
            if fault is None or not isinstance(result, FitResult):
                yield result
            elif fault == "fails":
                yield FitFailure(result.client, "its disk is broken")
            else:
                yield replace(result, upload={"update": {"u": result.upload["update"]["u"] * fault}})


def nothing(*_: object) -> None:
    pass


def test_clients_without_a_usable_update_are_named_and_left_out() -> None:
    run = experiment(data=digits(6), num_domains=2)
    runner = Faulty(run, {0: "fails", 2: 0.0, 3: float("nan")})
    named: dict[int, str] = {}
    updates = collect_updates(run, runner, Workspace(run), nothing, named.__setitem__)
    assert updates.clients == [1, 4, 5]
    assert named == updates.left_out
    assert list(named) == [0, 2, 3]
    assert "disk is broken" in named[0]
    assert named[2] == "its update is zero"
    assert "not finite" in named[3]
    assert updates.bytes_up == 3 * updates.vectors.shape[1] * 4
    found = cluster(updates, 2, "elbow", 10, seed=0)
    assert [found.of(client) for client in (0, 2, 3)] == [UNKNOWN] * 3
    # later: those who answer get the nearest pseudo-domain, who does not stays without and stops nobody
    later = Faulty(run, {0: "fails"})
    joined, down, up = assign_newcomers(
        run, later, Workspace(run).initial(1), found, [0, 1, 2, 3], 7, nothing, named.__setitem__
    )
    assert [task.client for task in later.asked] == [0, 2, 3]
    assert [task.attempt for task in later.asked] == [7, 7, 7]  # they draw anew
    assert joined.of(0) == UNKNOWN
    assert set(joined.newcomers) == {2, 3}
    assert joined.assignments == found.assignments
    assert torch.equal(joined.centroids, found.centroids)
    assert up == 2 * updates.vectors.shape[1] * 4
    assert down > 0
    nobody = Faulty(run, dict.fromkeys(range(6), 0.0))
    with pytest.raises(InputError, match=r"none has one\. Client 0: its update is zero"):
        collect_updates(run, nobody, Workspace(run), nothing, nothing)


def test_newcomers_send_what_they_would_have_sent() -> None:
    """A share of the clients takes part; the others' vectors, when they come, are those of a full Phase 1."""
    full = experiment(data=digits(8))
    part = replace(full, clustering=Clustering(epochs=1, fraction=0.5))
    asked = discovery_clients(part)
    assert len(asked) == 4
    assert asked == discovery_clients(part)
    assert discovery_clients(full) == list(range(8))
    theta_0 = Workspace(full).initial(1)
    everyone = collect_updates(full, Faulty(full, {}), Workspace(full), nothing, nothing)
    found = cluster(collect_updates(part, Faulty(part, {}), Workspace(part), nothing, nothing), 3, "elbow", 10, seed=0)
    others = [client for client in range(8) if client not in asked]
    joined, _, _ = assign_newcomers(part, Faulty(part, {}), theta_0, found, range(8), 3, nothing, nothing)
    assert joined.newcomers == {client: found.nearest(everyone.vectors[client]) for client in others}
    assert asked != list(range(4))  # drawn, not the first ones


def test_a_newcomer_that_fails_draws_anew() -> None:
    """Its first answer is that of Phase 1; if it is of no use, the next ones are others, in every attempt."""
    part = experiment(data=digits(8), clustering=Clustering(epochs=1, fraction=0.5))
    theta_0 = Workspace(part).initial(1)
    domains = cluster(
        collect_updates(part, Faulty(part, {}), Workspace(part), nothing, nothing), 3, "elbow", 10, seed=0
    )
    client = next(client for client in range(8) if client not in discovery_clients(part))
    tried = []
    for draw in (4, 5, 9):
        runner = Faulty(part, {client: 0.0})
        domains, _, up = assign_newcomers(part, runner, theta_0, domains, [client], draw, nothing, nothing)
        tried += [task.attempt for task in runner.asked]
        assert (domains.of(client), domains.newcomers, up) == (UNKNOWN, {}, 0)
    assert tried == [0, 5, 9]
    domains, _, _ = assign_newcomers(part, Faulty(part, {}), theta_0, domains, [client], 12, nothing, nothing)
    assert domains.of(client) != UNKNOWN


class Recorder(LocalRunner):
    """Remembers the tasks of each call."""

    def __init__(self, run: Experiment, void: int = 0) -> None:
        super().__init__(Workspace(run), ClientStates(Path("clients")))
        self.calls: list[list[FitTask]] = []
        self.void = void

    def fit(self, tasks: Sequence[FitTask]) -> Iterator[FitResult | FitFailure]:
        self.calls.append(list(tasks))
        if self.void and tasks[0].round != DISCOVERY_ROUND:
            self.void -= 1
            return iter([FitFailure(task.client, "it is away") for task in tasks])
        return super().fit(tasks)


@pytest.mark.parametrize("void", [0, 1])
def test_newcomers_have_their_pseudo_domain_in_their_first_round(void: int) -> None:
    """Its task has the nearest one, and the table that the moved centroids give; what crossed is counted once."""
    run = experiment(data=digits(8), rounds=1, **{k: v for k, v in LATE.items() if k != "rounds"})
    workspace = Workspace(run)
    updates = collect_updates(run, Faulty(run, {}), workspace, nothing, nothing)
    domains = cluster(updates, 3, "elbow", 10, seed=0)
    weights, buffers = workspace.initial(3)
    state = ServerState(0, weights, buffers, {}, domains=domains)
    runner, reports = Recorder(run, void), Reports()
    after = Rounds(run, runner, Events(reports), workspace.initial(1)).run(state).domains
    assert after is not None
    probes = [task for call in runner.calls for task in call if task.round == DISCOVERY_ROUND]
    fits = [call for call in runner.calls if call[0].round == 1]
    assert len(fits) == 1 + void
    assert {task.client for task in probes} == set(after.newcomers)
    assert after.newcomers
    for task in fits[-1]:
        assert task.domain == after.of(task.client) != UNKNOWN
        table = task.learned["supervision"]["table"]
        assert torch.equal(table, GradedTargets(after.centroids).table)
        assert not torch.equal(table, GradedTargets(domains.centroids).table)
    metrics = reports.all[0].metrics
    assert metrics["joined"] == len(after.newcomers)
    sent = sum(task.num_bytes for task in probes) + sum(task.num_bytes for task in fits[-1])
    assert metrics["bytes/down"] == sent
    assert metrics["bytes/up"] == len(probes) * 64 * 4 + len(fits[-1]) * sum(4 * w.numel() for w in weights.values())


def test_joining_by_hand() -> None:
    """(0, 0.6) is nearest to (0, 1), which three clients with it would have at (0, (1 + 1 + 0.6) / 3)."""
    mu = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    found = PseudoDomains({0: 0, 1: 1, 2: 1}, mu, "given", {}, {})
    stays = found.join(5, torch.tensor([0.0, 0.6]))
    assert (stays.joined, stays.of(5), stays.moved) == ({5: 1}, 1, False)
    assert torch.equal(stays.centroids, mu)
    moves = found.join(5, torch.tensor([0.0, 0.6]), update=True)
    torch.testing.assert_close(moves.centroids, torch.tensor([[1.0, 0.0], [0.0, 2.6 / 3]]))
    assert moves.moved
    again = moves.join(6, torch.tensor([0.0, 1.0]), update=True)
    torch.testing.assert_close(again.centroids[1], torch.tensor([0.0, 3.6 / 4]))
    assert (again.joined, found.joined) == ({5: 1, 6: 1}, {})


@examples(25)
@given(seed=st.integers(0, 1000), m=st.integers(1, 5))
def test_everybody_is_nearest_to_the_own_centroid(seed: int, m: int) -> None:
    vectors, _ = blobs([3, 4, 2, 3], noise=0.6, seed=seed)
    found = cluster(of(vectors), m, "elbow", 5, seed)
    assert [found.nearest(vector) for vector in vectors] == list(found.assignments.values())


def test_an_unknown_client_shares_its_mass_among_all() -> None:
    """Hard targets of an unknown client are those of a table of 1/M; random ones do not look at the client."""
    run = experiment(supervision="hard")
    workspace = Workspace(run)
    weights, buffers = workspace.initial(3)
    task = FitTask(1, 1, 0, weights, buffers, domain=UNKNOWN, learned=targets(torch.eye(3)))
    even = replace(task, domain=2, learned=targets(torch.full((3, 3), 1 / 3)))
    assert _equal(fit_client(workspace, task, {})[0], fit_client(workspace, even, {})[0])
    assert not _equal(fit_client(workspace, task, {})[0], fit_client(workspace, replace(task, domain=0), {})[0])
    workspace = Workspace(replace(run, supervision=Random()))
    assert _equal(fit_client(workspace, task, {})[0], fit_client(workspace, replace(task, domain=1), {})[0])


def _equal(a: FitResult, b: FitResult) -> bool:
    return all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


LATE: dict[str, Any] = {
    "supervision": "graded",
    "rounds": 4,
    "client_fraction": 0.5,
    "clustering": Clustering(epochs=1, fraction=0.5, sketch_dim=64, newcomers="update"),
}


class CutError(Exception):
    pass


class CutAt(Display):
    """Ends a run when a round's line is due."""

    def __init__(self, round: int) -> None:
        self.at = round

    def round(self, number: int, total: int, metrics: Any) -> None:
        if number == self.at:
            raise CutError


@pytest.mark.parametrize("at", [1, 2, 3])
def test_newcomers_survive_a_restart(at: int) -> None:
    """Pseudo-domains of those who joined, and centroids that moved with them, are what they were, to the bit."""
    fit(experiment(data=digits(8), run_dir="whole", **LATE))
    with pytest.raises(CutError):
        fit(experiment(data=digits(8), run_dir="cut", **LATE), CutAt(at))
    run = fit(experiment(data=digits(8), resume="cut", **LATE))
    assert contents("cut") == contents("whole")
    assert run.discovery is not None
    assert len(run.discovery["assignments"]) == 4
    assert len(run.discovery["joined"]) == run.last["joined"] > 0
    moved = load_record(Path("cut/checkpoints/4.safetensors"))[0]["domains"]["mu"]
    assert moved.shape == (3, 64)
    assert not torch.equal(moved, load_record(Path("cut/discovery.safetensors"))[0]["centroids"]["mu"])


@pytest.mark.slow
def test_newcomers_in_a_pool() -> None:
    local = fit(experiment(data=digits(8), run_dir="local", **LATE))
    pool = fit(experiment(data=digits(8), run_dir="pool", backend=PoolBackend(workers=2, threads=1), **LATE))
    ours, theirs = contents("pool"), contents("local")
    assert ours.pop("config.yaml") != theirs.pop("config.yaml")
    assert ours == theirs
    assert local.last["joined"] == pool.last["joined"] > 0


def test_nobody_is_asked_again_for_random_targets() -> None:
    run = fit(experiment(data=digits(8), **(LATE | {"supervision": "random"})))
    assert run.last["joined"] == 0


def test_discovery_is_taken_up() -> None:
    """The same run as one that discovers for itself, and with another M what that one finds."""
    settings: dict[str, Any] = {"data": digits(6), "supervision": "graded"}
    folder = discover(experiment(num_domains=None, **settings))
    assert {file.name for file in folder.iterdir()} == {
        "config.yaml",
        "discovery.json",
        "discovery.png",
        "discovery.safetensors",
    }
    for m in (None, 2, 5):
        own = fit(experiment(num_domains=m, run_dir=f"own{m}", **settings))
        taken = fit(experiment(num_domains=m, run_dir=f"taken{m}", discovery=str(folder), **settings))
        ours, theirs = contents(str(taken.folder)), contents(str(own.folder))
        assert ours.pop("config.yaml") != theirs.pop("config.yaml")
        assert ours == theirs
    shutil.rmtree(folder)  # it is not needed again
    fit(experiment(num_domains=2, resume="taken2", rounds=3, discovery=str(folder), **settings))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed_everything": 1}, "--seed_everything to be 0"),
        ({"lr": 0.02}, "--lr to be 0.05"),
        ({"batch_size": 8}, "--clustering.batch_size to be 192"),
        ({"clustering": Clustering(epochs=2)}, "--clustering.epochs to be 1"),
        ({"clustering": Clustering(epochs=1, sketch_dim=8)}, "--clustering.sketch_dim to be None"),
        ({"clustering": Clustering(epochs=1, fraction=0.8)}, "--clustering.fraction to be 1.0"),
        ({"clustering": Clustering(epochs=1, layers="A")}, "--clustering.layers to be 'B'"),
        ({"momentum": 0.5}, "--momentum to be 0.0"),
        ({"weight_decay": 0.5}, "--weight_decay to be 0.0"),
        ({"trainer": TrainerOptions(precision="64-true")}, "--trainer.precision to be '32-true'"),
        ({"trainer": TrainerOptions(gradient_clip_val=1.0)}, "--trainer.gradient_clip_val to be None"),
        ({"data": digits(5)}, "--data.num_clients to be 4"),
        ({"backbone": "helpers.batch_norm_net"}, "--backbone to be"),
        ({"discovery": "nowhere"}, "--discovery to be a folder with a discovery.json but got nowhere"),
    ],
)
def test_another_discovery_is_refused(changes: dict[str, Any], named: str) -> None:
    folder = discovered("found")
    with pytest.raises(InputError, match=named):
        fit(experiment(**({"discovery": str(folder), "run_dir": "new"} | changes)))
    assert not Path("new").exists()


def test_discovery_of_other_images_is_refused() -> None:
    folder = discovered("found")
    record = read_discovery(folder)
    (folder / "discovery.json").write_text(json.dumps(record | {"data": "others"}))
    with pytest.raises(InputError, match="of the same images"):
        fit(experiment(discovery=str(folder)))
    (folder / "discovery.json").write_text("[")
    with pytest.raises(InputError, match=r"discovery\.json cannot be read"):
        fit(experiment(discovery=str(folder)))


def test_sketches_cross_instead_of_vectors() -> None:
    run = experiment(clustering=Clustering(epochs=1, sketch_dim=64))
    updates = collect_updates(run, Faulty(run, {}), Workspace(run), nothing, nothing)
    assert updates.vectors.shape == (4, 64)
    assert updates.bytes_up == 4 * 64 * 4
    assert updates.vectors.norm(dim=1).tolist() == pytest.approx([1] * 4)
    assert unit(torch.zeros(3)).tolist() == [0, 0, 0]


def test_discover_shows_what_it_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    options = ["--data.size", "8", "--backbone", "helpers.tiny_net", "--backend", "LocalBackend"]
    assert main(["discover", *options, "--run_dir", "found"]) == 0
    shown = capsys.readouterr().out
    record = read_discovery(Path("found"))
    for part in (f"M = {record['num_domains']} (", "silhouette", "taken", f"ARI {record['ari']:.3f}", "NMI", "graded"):
        assert part in shown
    for name in ("ink", "chalk", "photo", "outline"):
        assert name in shown
    assert "--discovery found" in shown
    assert record["bytes_up"] == 10 * 4 * record["vector_length"]
    before = {file: file.read_bytes() for file in Path("found").iterdir()}
    for bad, named in (
        (["--resume", "auto"], "--resume to be left out"),
        (["--num_domains", "4", "--clustering.fraction", "0.1"], "number of clients in Phase 1, 1,"),
        (["--clustering.layers", "A", "--clustering.sketch_dim", "1024"], "at most the 130 entries"),
        (["--clustering.sketch_dim", "6"], "--clustering.sketch_dim to be a positive multiple of 4"),
        (["--run_dir", "found"], "new or empty"),
    ):
        assert main(["discover", *options, *bad]) == 2
        assert named in capsys.readouterr().err
    assert {file: file.read_bytes() for file in Path("found").iterdir()} == before
    assert [path.name for path in Path().iterdir()] == ["found"]
    assert main(["discover", *options, "--supervision", "base", "--algorithm", "PrivateFedAvg"]) == 2
    assert "--algorithm to be another one" in capsys.readouterr().err
