"""Models of one's own: tensors that clients keep, personal models, and what is known of them at the server."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from helpers import ScalarNet, contents, digits, experiment, same
from jdfl_lightning import (
    ClusterAvg,
    Clustering,
    Ditto,
    Experiment,
    FedRep,
    InputError,
    PoolBackend,
    PrivateFedAvg,
    RayBackend,
    SiteFolders,
    VectorBackend,
    algorithms,
    fit,
)
from jdfl_lightning.backends.worker import receive, without_images
from jdfl_lightning.cli import main
from jdfl_lightning.client.evaluation import estimate_statistics, own_scorer
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.clustering.clusters import PseudoDomains
from jdfl_lightning.config import parse_experiment
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitTask
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.storage.checkpoint import Checkpoints, ClientStates
from jdfl_lightning.storage.records import load_record
from test_algorithms import A, B, Played, close, quadratic, toy
from test_loop import both_ways
from test_vector import agree

if TYPE_CHECKING:
    from flower_grid import FakeGrid

X, Y = "backbone.x", "backbone.y"


class PairNet(nn.Module):
    """Two parameters x and y, 0 at first, whose sum is the feature of every image."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        return (self.x + self.y).expand(len(images), 1)


def pair_net(size: int) -> nn.Module:
    return PairNet()


def at_three(size: int) -> nn.Module:
    """x is 3 at first."""
    net = ScalarNet()
    nn.init.constant_(net.x, 3.0)
    return net


def kept(play: Played, group: str, name: str, number: int) -> list[float]:
    """A tensor of every client's state after a round."""
    return [state[group][name].item() for state in play.kept[number - 1] if state is not None]


# --- numbers by hand ------------------------------------------------------------------------------------------------


def test_a_shared_and_a_private_parameter(tmp_path: Path) -> None:
    """f_i = a_i/2 (x + y - b_i)^2 with y private; one step of 0.1, a = (1, 2), b = (1, 4), equal n.

    Both parameters have the gradient g = a (x + y - b).
    Round 1, x = y = 0: g = (-1, -8), so x_i = y_i = (0.1, 0.8), and the server's x = 0.45.
    Round 2: x + y = (0.55, 1.25), g = (-0.45, -5.5); x_i = (0.495, 1.0), y_i = (0.145, 1.35), x = 0.7475.
    """
    run = toy(quadratic("FedAvg", A, B), steps=1, rounds=2, backbone="test_personal.pair_net", private=[Y])
    play = Played(run, tmp_path)
    close([play.theta(1), *kept(play, "private", Y, 1)], [0.45, 0.1, 0.8])
    close(play.locals(2), [0.495, 1.0])
    close([play.theta(2), *kept(play, "private", Y, 2)], [0.7475, 0.145, 1.35])
    messages = [*(task.weights for task in play.tasks[1]), *(result.weights for result in play.results[1])]
    assert all(set(weights) == {X, "head.weight", "head.bias"} for weights in messages)


def test_a_variate_covers_what_travels_alone(tmp_path: Path) -> None:
    """SCAFFOLD on the same problem; the first round is the same, with c_i = -g's: (-1, -8), c = -4.5.

    Round 2: g = (-0.45, -5.5) as above. x steps by g + c - c_i = (-3.95, -2): x_i = 0.45 + (0.395, 0.2), which is
    (0.845, 0.65), mean 0.7475. y steps by g alone: (0.145, 1.35).
    c_i+ = c_i - c + (x - x_i) / 0.1 = (-0.45, -5.5), c = -2.975.
    """
    run = toy(quadratic("SCAFFOLD", A, B), steps=1, rounds=2, backbone="test_personal.pair_net", private=[Y])
    play = Played(run, tmp_path)
    close(play.locals(2), [0.845, 0.65])
    close((play.theta(2), play.server("c", 2)), (0.7475, -2.975))
    close(kept(play, "c", X, 2), [-0.45, -5.5])
    close(kept(play, "private", Y, 2), [0.145, 1.35])
    assert set(play.kept[1][0]["c"]) == {X, "head.weight", "head.bias"}  # type: ignore[index]


@pytest.mark.parametrize("name", ["FedAvg", "SCAFFOLD", "FedDyn", "FedDC", "FedProx", "RobustFedAvg", "MOON"])
def test_all_names_are_local_training(name: str, tmp_path: Path) -> None:
    """Whatever the algorithm, x_i - b_i shrinks by 1 - 0.1 a_i in each of 4 steps: x = (1 - 0.9^4, 4 (1 - 0.8^4))."""
    play = Played(toy(quadratic(name, A, B), rounds=2, private=["*"]), tmp_path)
    close(kept(play, "private", X, 2), [0.3439, 2.3616])
    assert play.reports[1].state.weights == {}
    assert play.reports[1].metrics["bytes/down"] == play.reports[1].metrics["bytes/up"] == 0


def test_fedrep_numbers(tmp_path: Path) -> None:
    """The same problem; of two epochs of one step of 0.1 the first is y's, the second x's.

    Round 1, client 1: g = -1, y = 0.1; then g = 0.1 - 1 = -0.9, x = 0.09. Client 2: g = -8, y = 0.8; then
    g = 2 (0.8 - 4) = -6.4, x = 0.64. The server's x = 0.365.
    Round 2, client 1: g = 0.465 - 1 = -0.535, y = 0.1535; g = 0.5185 - 1 = -0.4815, x = 0.41315. Client 2:
    g = 2 (1.165 - 4) = -5.67, y = 1.367; g = 2 (1.732 - 4) = -4.536, x = 0.8186. The server's x = 0.615875.
    """
    run = toy(quadratic("FedRep", A, B), rounds=2, backbone="test_personal.pair_net", private=[Y])
    play = Played(run, tmp_path)
    close([*play.locals(1), play.theta(1)], [0.09, 0.64, 0.365])
    close([*play.locals(2), play.theta(2)], [0.41315, 0.8186, 0.615875])
    close(kept(play, "private", Y, 2), [0.1535, 1.367])


def test_a_part_at_rest_feels_no_momentum_and_no_decay(tmp_path: Path) -> None:
    """FedRep with momentum and weight decay: y, which rests in the second epoch, is as after the first.

    From x = y = 0, decay does not matter in the first step: y_1 = 0.1 after it, as above.
    """
    settings: dict[str, Any] = {"backbone": "test_personal.pair_net", "private": [Y], "momentum": 0.9}
    run = toy(quadratic("FedRep", A, B), rounds=1, weight_decay=0.5, **settings)
    close(kept(Played(run, tmp_path), "private", Y, 1), [0.1, 0.8])


def test_ditto_numbers(tmp_path: Path) -> None:
    """mu = 0.5, two steps of 0.1 a round. The global model is FedAvg's: 0, then 0.815, then 1.405875.

    Round 1: v from 0, pulled to 0, as FedProx: (0.185, 1.4). Round 2, pulled to 0.815:
    v <- v - 0.1 ((v - 1) + 0.5 (v - 0.815)) = 0.85 v + 0.14075: 0.185, 0.298, 0.39405;
    v <- v - 0.1 (2 (v - 4) + 0.5 (v - 0.815)) = 0.75 v + 0.84075: 1.4, 1.89075, 2.2588125.
    """
    play = Played(toy(quadratic("Ditto", A, B, mu=0.5), rounds=2), tmp_path)
    close((play.theta(1), play.theta(2)), (0.815, 1.405875))
    close(kept(play, "personal", X, 1), [0.185, 1.4])
    close(kept(play, "personal", X, 2), [0.39405, 2.2588125])
    assert all(not result.upload for results in play.results for result in results)


def test_ditto_without_a_pull_is_local_training(tmp_path: Path) -> None:
    """mu = 0: v = (1 - 0.9^4, 4 (1 - 0.8^4)) after 4 steps."""
    play = Played(toy(quadratic("Ditto", A, B, mu=0.0), rounds=2), tmp_path)
    close(kept(play, "personal", X, 2), [0.3439, 2.3616])


def test_ditto_with_an_infinite_pull_is_the_global_model(tmp_path: Path) -> None:
    """a = 1, lr = 1 / (1 + mu): one step reaches the minimum of f + mu/2 (v - theta)^2, v = (b + mu theta) / (1 + mu).

    From theta = 3 and b = (1, 4), v - theta = (b - 3) / (1 + mu), which vanishes as mu grows.
    """
    for mu in (1.0, 1e3, 1e6):
        rule = quadratic("Ditto", (1.0, 1.0), B, mu=mu)
        run = toy(rule, steps=1, rounds=1, lr=1 / (1 + mu), backbone="test_personal.at_three")
        play = Played(run, tmp_path / f"{mu:g}")
        found = [v - 3 for v in kept(play, "personal", X, 1)]
        assert found == pytest.approx([-2 / (1 + mu), 1 / (1 + mu)], rel=1e-6, abs=1e-14)


def test_clusteravg_numbers(tmp_path: Path) -> None:
    """a = (1, 2, 1), b = (1, 4, 3), n = (1, 2, 3), two steps of 0.1; clients 0 and 2 are of pseudo-domain 0.

    Two steps of client 0 and 2 take x to b + 0.81 (x - b), of client 1 to b + 0.64 (x - b).
    Round 1: x = (0.19, 1.44, 0.57); theta_0 = (0.19 + 3 * 0.57) / 4 = 0.475, theta_1 = 1.44.
    Round 2: 1 - 0.81 * 0.525 = 0.57475, 4 - 0.64 * 2.56 = 2.3616, 3 - 0.81 * 2.525 = 0.95475;
    theta_0 = (0.57475 + 3 * 0.95475) / 4 = 0.85975, theta_1 = 2.3616.
    The global model: (0.57475 + 2 * 2.3616 + 3 * 0.95475) / 6 = 1.360366...
    """
    rule = quadratic("ClusterAvg", (1.0, 2.0, 1.0), (1.0, 4.0, 3.0))
    domains = PseudoDomains({0: 0, 1: 1, 2: 0}, torch.eye(2), "given", {}, {})
    play = Played(toy(rule, (1, 2, 3), rounds=2), tmp_path, domains)
    close([play.server(f"weights{d}", 1) for d in (0, 1)], [0.475, 1.44])
    close([play.server(f"weights{d}", 2) for d in (0, 1)], [0.85975, 2.3616])
    close(play.theta(2), (0.57475 + 2 * 2.3616 + 3 * 0.95475) / 6)
    sent = {task.client: task.weights[X].item() for tasks in play.tasks[1:] for task in tasks if task.round == 2}
    close(sent, {0: 0.475, 1: 1.44, 2: 0.475})
    assert all(not task.server for tasks in play.tasks for task in tasks)


# --- every algorithm, supervision and backend -----------------------------------------------------------------------

HEAD, BODY = ["head.*"], ["backbone.*"]
CASES = {
    "FedAvg": ("random", HEAD),
    "FedProx": ("graded", BODY),
    "SCAFFOLD": ("online", ["backbone.0.*", "head.bias"]),
    "FedDyn": ("graded", HEAD),
    "FedDC": ("base", ["backbone.3.*"]),
    "FedProc": ("online", HEAD),
    "MOON": ("graded", ["backbone.0.*"]),
    "RobustFedAvg": ("hard", ["*"]),
    "Ditto": ("graded", ["backbone.0.*"]),
    "FedRep": ("random", HEAD),
    "ClusterAvg": ("base", HEAD),
}


def setting(algorithm: str, **changes: Any) -> Experiment:
    supervision, private = CASES[algorithm]
    needed = {"clustering": Clustering(epochs=1, layers=["*"])}
    if private == ["*"]:  # nothing is sent to cluster by
        supervision = "base"
    settings = {"algorithm": getattr(algorithms, algorithm)(), "supervision": supervision, "private": private}
    settings |= {"epochs": 1 + (algorithm == "FedRep"), "rounds": 2, "client_fraction": 0.75, "lr": 0.2, **needed}
    return experiment(**(settings | changes))


def some(algorithms: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Algorithms as parameters, some of them for the slow tests alone."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in algorithms]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", some(CASES, slow=("FedProx", "FedDyn", "FedDC", "RobustFedAvg", "FedAvg")))
def test_same_bits_in_a_pool_and_on_resume(algorithm: str) -> None:
    """Personal accuracies too: they are in clients.csv and evaluation.json."""
    run, pool = setting(algorithm), PoolBackend(workers=2, threads=1)
    fit(replace(run, run_dir="local"))
    if run.algorithm.has_schedule:  # no rounds can be added
        fit(replace(run, run_dir="pool", backend=pool))
    else:
        fit(replace(run, run_dir="pool", rounds=1))
        fit(replace(run, resume="pool", backend=pool))
    assert same("local", "pool")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:Waiting for room on the Ray cluster")
@pytest.mark.parametrize("algorithm", ["SCAFFOLD", "Ditto", "FedRep", "ClusterAvg"])
def test_same_bits_on_ray(algorithm: str) -> None:
    run = setting(algorithm)
    fit(replace(run, run_dir="local"))
    fit(replace(run, run_dir="ray", backend=RayBackend(actors=1)))
    assert same("local", "ray")


@pytest.mark.parametrize("algorithm", ["FedAvg", "SCAFFOLD", "FedDC", "MOON", "Ditto", "ClusterAvg"])
def test_same_weights_in_a_stack(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding, as all weights of the VectorBackend; clients' own tensors too."""
    private = {"private": ["backbone.1.*"], "backbone": "test_vector.small_net", "lr": 0.1}
    if algorithm == "FedAvg":
        private["private"] = HEAD
    run = setting(algorithm, client_fraction=1.0, **private)
    monkeypatch.setattr("jdfl_lightning.server.closing.evaluate_clients", lambda *args: {})  # is done one by one
    agree(run, monkeypatch)
    ours, theirs = ClientStates(Path("vector/clients")), ClientStates(Path("local/clients"))
    assert sorted(ours.kept()) == sorted(theirs.kept())
    for state in theirs.kept():
        torch.testing.assert_close(ours.load(*state), theirs.load(*state), rtol=1e-5, atol=1e-6)


# --- Flower ---------------------------------------------------------------------------------------------------------


def watched(config: str, sites: int) -> tuple[FakeGrid, list[Any]]:
    """A grid that remembers every message, in both directions."""
    from flower_grid import on_grid, over_the_wire

    grid, seen = on_grid(config, {"run_dir": "flower"}, sites), []

    def remember(message: Any, reply: Any) -> Any:
        seen.extend([message, over_the_wire(reply)])
        return reply

    grid.tamper = remember
    return grid, seen


def named_arrays(message: Any) -> Iterator[tuple[str, bytes]]:
    for record in message.content.array_records.values():
        for name, array in record.items():
            yield name, array.data


@pytest.mark.parametrize("algorithm", some(["SCAFFOLD", "FedProc", "Ditto", "FedRep", "ClusterAvg"], slow=("FedProc",)))
def test_private_tensors_never_leave_a_site(algorithm: str) -> None:
    """Neither by their names nor by their values: every message of a run is looked at, Phase 1 and the end too.

    What the server sends is the shared initialisation of a private head, with models to evaluate, and nothing else.
    """
    from flower_grid import serve, write_config

    run = setting(algorithm)
    fit(replace(run, run_dir="local"))
    config = write_config(run)
    grid, seen = watched(config, sites=2)
    serve(config, grid, {"run_dir": "flower"})
    workspace = Workspace(run)
    private, theta_0 = workspace.private, workspace.initial(1 if run.supervision.name == "base" else 3)[0]
    assert private
    requests, replies = (
        [pair for message in seen[first::2] if message.has_content() for pair in named_arrays(message)]
        for first in (0, 1)
    )
    sent = [*requests, *replies]
    for name, tensor in load_record(Path("flower/checkpoints/2.safetensors"))[0]["weights"].items():
        assert any(
            tensor.numpy().tobytes() in data for known, data in requests if known == name
        )  # what is sent is found
    assert not private & {name for name, _ in replies}
    for name, data in requests:
        assert name not in private or (name.startswith("head.") and theta_0[name].numpy().tobytes() in data)
    states = [load_record(file)[0] for file in Path("states").rglob("*.safetensors")]
    for state in states:
        for group in ("private", "personal"):
            for name, tensor in state.get(group, {}).items():
                if name in private or group == "personal":
                    assert not any(tensor.numpy().tobytes() in data for _, data in sent), name
    ours, theirs = contents("local"), contents("flower")
    assert ours["rows"] == theirs["rows"]
    assert ours["last.safetensors"] == theirs["last.safetensors"]
    files = {file.name: file.read_bytes() for file in Path("states").rglob("*.safetensors")}
    assert all(files[file.name] == file.read_bytes() for file in Path("local/clients").iterdir())
    assert personal_of("local") == personal_of("flower")


def personal_of(folder: str) -> tuple[Any, list[dict[str, str]]]:
    """What is known of personal models: the summary, and the clients' accuracies."""
    details = json.loads(Path(folder, "evaluation.json").read_text())["personal"]
    return details, [{name: row[name] for name in row if "_accuracy" in name} for row in clients_of(folder)]


def clients_of(folder: str) -> list[dict[str, str]]:
    with Path(folder, "clients.csv").open() as file:
        return list(csv.DictReader(file))


# --- personal evaluation --------------------------------------------------------------------------------------------

LEARNS: dict[str, Any] = {"backbone": "test_vector.small_net", "lr": 0.3, "batch_size": 32, "epochs": 3}
"""Settings under which two rounds are enough to know some digits."""


def accuracy(run: Experiment, client: int, weights: Tensors, buffers: Tensors, domain: int | None = None) -> float:
    """The share of right answers on the test images of a client's domain, by the plainest means."""
    data, workspace = run.data, Workspace(replace(run, private=[]))
    module = workspace.module(weights, buffers).eval()
    indices = data.partition.test[data.partition.client_domains[client]]
    images, labels = data.images[indices].permute(0, 3, 1, 2).float() / 127.5 - 1, data.labels[indices]
    with torch.no_grad():
        logits = module(images).unflatten(1, (-1, 10))
    scores = logits.amax(dim=1) if domain is None else logits[:, domain]
    return float((scores.argmax(dim=1) == labels).double().mean())


@pytest.mark.parametrize("score", ["max", "own"])
def test_personal_accuracies_are_those_of_the_clients_models(score: Any) -> None:
    """Private heads of M x C outputs: each with the last round's backbone, on the images of its client's domain."""
    run = setting("FedAvg", client_fraction=0.5, score=score, run_dir="run", supervision="graded", **LEARNS)
    fit(run)
    round, weights, _ = last_state("run")
    found, missing = {}, 0
    known = json.loads(Path("run/discovery.json").read_text())["assignments"]
    for client, row in enumerate(clients_of("run")):
        if client not in round:
            missing += 1
            assert (row["personal_accuracy"], row["global_accuracy"], row["rounds"]) == ("", "", "0")
            continue
        state = ClientStates(Path("run/clients")).load(client, round[client])
        own = weights | state["private"]
        domain = int(known[str(client)]) if score == "own" else None
        found[client] = accuracy(run, client, own, {}, domain)
        assert float(row["personal_accuracy"]) == pytest.approx(found[client])
    details = json.loads(Path("run/evaluation.json").read_text())["personal"]
    assert (details["round"], details["score"]) == (2, score)
    assert main(["test", "--run", "run"]) == 0  # the global model, with the initial head, is that of metrics.csv
    assert json.loads(Path("run/evaluation.json").read_text())["personal"] == details
    each = list(found.values())
    assert len(set(each)) == len(each)  # none of them is a guess
    model = details["models"]["personal"]
    assert model["clients"] == len(each) == 4 - missing
    expected = [statistics.fmean(each), min(each), statistics.stdev(each)]
    assert [model["mean"], model["worst"], model["std"]] == pytest.approx(expected)


def last_state(folder: str) -> tuple[dict[int, int], Tensors, Tensors]:
    """The rounds of clients' states, and the server's weights and buffers."""
    checkpoints = Checkpoints(Path(folder), keep=1)
    record, header = checkpoints.load(checkpoints.file(checkpoints.rounds()[0]))
    return header.clients, record.get("weights", {}), record.get("buffers", {})


def test_own_scorer() -> None:
    weights = {
        "head.weight": torch.arange(12.0).view(6, 2),
        "head.bias": torch.arange(6.0),
        "backbone.w": torch.ones(6),
    }
    own = own_scorer(weights, domain=1, num_classes=2)
    assert own["head.weight"].tolist() == [[4, 5], [6, 7]]
    assert own["head.bias"].tolist() == [2, 3]
    assert own["backbone.w"] is weights["backbone.w"]
    assert own_scorer(weights, -1, 2) is weights


def test_ditto_and_clusters_evaluate_their_models() -> None:
    run = experiment(algorithm=Ditto(mu=0.5), supervision="base", run_dir="ditto", **LEARNS)
    fit(run)
    clients, weights, _ = last_state("ditto")
    for client, row in enumerate(clients_of("ditto")):
        state = ClientStates(Path("ditto/clients")).load(client, clients[client])
        assert float(row["personal_accuracy"]) == pytest.approx(accuracy(run, client, state["personal"], {}))
        assert float(row["global_accuracy"]) == pytest.approx(accuracy(run, client, weights, {}))
    run = experiment(algorithm=ClusterAvg(), supervision="base", run_dir="clusters", **LEARNS)
    fit(run)
    record, _ = load_record(Path("clusters/checkpoints/2.safetensors"))
    known = json.loads(Path("clusters/discovery.json").read_text())["assignments"]
    for client, row in enumerate(clients_of("clusters")):
        own = record[f"server.weights{known[str(client)]}"]
        assert float(row["personal_accuracy"]) == pytest.approx(accuracy(run, client, own, {}))
        assert float(row["global_accuracy"]) == pytest.approx(accuracy(run, client, record["weights"], {}))


def test_fine_tuning_is_a_baseline_that_changes_nothing_else() -> None:
    """With a rate of almost 0 it is the global model; with a real one another; the run's weights are the same."""
    settings: dict[str, Any] = {"supervision": "base", **LEARNS}
    fit(experiment(run_dir="plain", **settings))
    assert "personal_accuracy" not in clients_of("plain")[0]
    fit(experiment(run_dir="tuned", finetune_epochs=4, **settings))
    assert contents("plain")["last.safetensors"] == contents("tuned")["last.safetensors"]
    models = personal_of("tuned")[0]["models"]
    assert models["global"] == models["personal"]
    assert models["finetuned"]["mean"] > models["global"]["mean"] + 0.02  # more epochs help after 2 rounds
    fit(experiment(run_dir="still", finetune_epochs=1, **(settings | {"lr": 1e-12})))
    models = personal_of("still")[0]["models"]
    assert models["finetuned"] == models["global"]


def test_clients_of_a_site_have_held_out_images_of_their_own(image_tree: Path) -> None:
    """Two clients at one site: each is evaluated on what the site holds out, and on its own part of that."""
    data = SiteFolders([str(image_tree)], size=8, num_clients=2)
    settings: dict[str, Any] = {"supervision": "base", "num_domains": None, "rounds": 1, "batch_size": 6}
    run = experiment(data=data, private=HEAD, run_dir="run", **settings)
    fit(run)
    held = data.partition.test_of(1)
    assert (
        set(held["own"].tolist())
        < set(held["domain"].tolist())
        == {i for part in data.partition.test for i in part.tolist()}
    )
    clients, weights, _ = last_state("run")
    own = weights | ClientStates(Path("run/clients")).load(1, clients[1])["private"]
    module = Workspace(replace(run, private=[])).module(own, {}).eval()
    for name, indices in (("", held["domain"]), ("_on_own_images", held["own"])):
        images = data.images[indices].permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            right = module(images).argmax(dim=1) == data.labels[indices]
        assert float(clients_of("run")[1][f"personal{name}_accuracy"]) == pytest.approx(float(right.double().mean()))
    assert "personal_on_own_images" in personal_of("run")[0]["models"]


# --- BatchNorm ------------------------------------------------------------------------------------------------------


def test_fedbn_keeps_statistics_and_scales() -> None:
    """Conv and head are sent; BatchNorm's scale, shift, mean, variance and count are each client's own."""
    names = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    settings: dict[str, Any] = {"backbone": "helpers.batch_norm_net", "supervision": "base", "private": "backbone.1.*"}
    run = experiment(run_dir="run", statistics="estimated", **settings)
    found = fit(run)
    clients, weights, buffers = last_state("run")
    assert not buffers
    assert sorted(weights) == ["backbone.0.bias", "backbone.0.weight", "head.bias", "head.weight"]
    states = [ClientStates(Path("run/clients")).load(client, number)["private"] for client, number in clients.items()]
    assert all(set(state) == {f"backbone.1.{name}" for name in names} for state in states)
    assert not torch.equal(states[0]["backbone.1.running_mean"], states[1]["backbone.1.running_mean"])
    known = personal_of("run")[0]["models"]
    saved = fit(experiment(run_dir="saved", **settings))
    assert found.rows[-1]["test/acc"] > saved.rows[-1]["test/acc"]  # the initial statistics, mean 0 and variance 1
    assert known["personal"] == personal_of("saved")[0]["models"]["personal"]
    assert main(["test", "--run", "run"]) == 0
    assert personal_of("run")[0]["models"] == known


def test_estimated_statistics_are_those_of_the_images() -> None:
    """Mean and unbiased variance of the convolution's outputs; the mean over batches, of which there is one here."""
    run = experiment(backbone="helpers.batch_norm_net", supervision="base")
    workspace = Workspace(run)
    module = workspace.module(*workspace.initial(1))
    loader = run.data.client_test_loaders(0)["domain"]
    assert len(loader) == 1
    estimate_statistics(module, loader)
    (images, _, _), layer = next(iter(loader)), module.backbone.get_submodule("1")
    maps = module.backbone.get_submodule("0")(images).detach().transpose(0, 1).flatten(1)
    torch.testing.assert_close(layer.running_mean, maps.mean(dim=1))
    torch.testing.assert_close(layer.running_var, maps.var(dim=1))
    assert layer.momentum == 0.1
    with pytest.raises(InputError, match="--statistics to be saved without BatchNorm"):
        fit(experiment(supervision="base", statistics="estimated"))


# --- what cannot be -------------------------------------------------------------------------------------------------


def test_a_pattern_without_a_match_names_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    message = r"'backbone\.\*bn\*' matches none of backbone.0.0.weight, .*, head.weight, head.bias"
    with pytest.raises(InputError, match=message):
        fit(experiment(private=["head.*", "backbone.*bn*"]))
    assert not Path("runs").exists()
    assert main(["fit", "--data.size", "8", "--private", "*bn*"]) == 2
    assert "'*bn*' matches none of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": FedRep(), "epochs": 2}, "--private to be the names of the head with FedRep"),
        ({"algorithm": FedRep(), "private": HEAD}, "--epochs to be above --algorithm.body_epochs, 1"),
        ({"algorithm": Ditto(mu=50.0)}, r"--algorithm.mu to be below 40, 2 \(1 \+ momentum\) / lr"),
        ({"algorithm": ClusterAvg(), "supervision": "graded"}, "--supervision to be base with ClusterAvg"),
        ({"algorithm": PrivateFedAvg(delta=0.1), "private": HEAD}, "--private to be left out with PrivateFedAvg"),
        ({"finetune_epochs": -1}, "--finetune_epochs to be 0 or more"),
    ],
)
def test_refused_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        experiment(**({"supervision": "base"} | settings))


def test_refused_runs() -> None:
    with pytest.raises(InputError, match="layers to have parameters that are sent but all of A are private"):
        fit(experiment(private=HEAD, clustering=Clustering(epochs=1, layers="A")))
    settings = {"backbone": "test_vector.small_net", "epochs": 2, "supervision": "base"}
    with pytest.raises(InputError, match="as FedRep trains parts of the network in turn"):
        fit(experiment(algorithm=FedRep(), private=HEAD, backend=VectorBackend(), **settings))


# --- training and messages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["FedRep", "Ditto"])
def test_same_bits_with_a_trainer(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedRep asks how many epochs a fit has, and Ditto has a second fit; BatchNorm and dropout are in both."""
    private = {"FedRep": "head.*", "Ditto": "backbone.net.1.*"}[algorithm]
    settings: dict[str, Any] = {"backbone": "test_loop.Restless", "supervision": "base", "momentum": 0.9}
    rule = getattr(algorithms, algorithm)()
    assert both_ways(experiment(algorithm=rule, private=private, epochs=2, **settings), monkeypatch)


def test_private_tensors_start_with_the_pretrained_weights(tmp_path: Path) -> None:
    """In a worker too, which is sent all other weights and so builds its network without them."""
    torch.manual_seed(1)
    torch.save(resnet18().state_dict(), tmp_path / "weights.pt")
    weights = {"weights": str(tmp_path / "weights.pt")}
    run = experiment(backbone="resnet18", backbone_args=weights, private="backbone.conv1.*, head.*")
    ours, _ = Workspace(run).initial(1)
    theirs, _ = receive(without_images(run), run.data.images).initial(1)
    assert all(torch.equal(ours[name], theirs[name]) for name in ("backbone.conv1.weight", "head.weight"))
    plain, _ = Workspace(replace(run, backbone_args={})).initial(1)
    assert not torch.equal(ours["backbone.conv1.weight"], plain["backbone.conv1.weight"])


def test_phase_1_sends_nothing_private() -> None:
    """Layers B are the last conv block and the head; with a private head the update is the block's."""
    run = experiment(private=HEAD)
    workspace = Workspace(run)
    weights, buffers = workspace.start(1)
    assert not [name for name in weights if name.startswith("head.")]
    result, state = fit_client(workspace, FitTask(0, DISCOVERY_ROUND, 0, weights, buffers), {})
    block = sum(weights[f"backbone.1.0.{name}"].numel() for name in ("weight", "bias"))
    assert result.upload["update"]["u"].shape == (block,)
    assert not state


def test_configs_that_are_added() -> None:
    for name, pattern in (("fedper", "head.*"), ("lg_fedavg", "backbone.*"), ("fedbn", "backbone.*bn*")):
        run = parse_experiment("fit", ["--config", "digits", "--config", name])
        assert pattern in run.private
        assert run.selection == "last"
    private = Workspace(replace(run, data=digits())).private
    norms = [m for m in Workspace(replace(run, data=digits()))._module.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(private) == 5 * len(norms)  # all of resnet18's
    assert parse_experiment("fit", ["--private", "head.*, backbone.fc*"]).private == ["head.*", "backbone.fc*"]
