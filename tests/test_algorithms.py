"""The federated optimizers against numbers worked out by hand, through a real `Trainer.fit`.

The problem: f_i(x) = a_i / 2 (x - b_i)^2, one parameter, K full-batch steps of local SGD.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

from helpers import Reports, ToyData, Watched, checkered, examples, experiment
from jdfl_lightning import (
    Algorithm,
    DigitsDomains,
    Experiment,
    LocalUpdate,
    Part,
    TrainerOptions,
    algorithms,
    fit,
    to_input,
)
from jdfl_lightning.algorithms.fedproc import prototype_contrast
from jdfl_lightning.algorithms.moon import contrast
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.clustering.clusters import PseudoDomains
from jdfl_lightning.config import parse_experiment, shipped_configs
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import FitResult, FitTask, RoundContext
from jdfl_lightning.core.seeding import sample_clients
from jdfl_lightning.core.tensors import Record, Tensors, flatten
from jdfl_lightning.models import build_backbone
from jdfl_lightning.server.events import Events
from jdfl_lightning.server.rounds import Rounds
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.storage.checkpoint import ClientStates
from jdfl_lightning.supervision import Plain

ALL = ["FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON"]
X = "backbone.x"


def quadratic(name: str, a: tuple[float, ...], b: tuple[float, ...], **hyper: Any) -> Algorithm:
    """An algorithm whose clients minimise a_i / 2 (x - b_i)^2 instead of the classification loss."""
    base: type[Algorithm] = getattr(algorithms, name)

    @dataclasses.dataclass(frozen=True)
    class Quadratic(base):  # type: ignore[misc, valid-type]
        def local(self, task: FitTask, state: Record) -> LocalUpdate:
            return self._on_quadratic(super().local(task, state), task.client)

        def second(self, task: FitTask, state: Record) -> LocalUpdate | None:
            update = super().second(task, state)
            return None if update is None else self._on_quadratic(update, task.client)

        def _on_quadratic(self, update: LocalUpdate, client: int) -> LocalUpdate:
            def loss(task_loss: Tensor, features: Tensor, labels: Tensor) -> Tensor:
                x = features.mean()
                return a[client] / 2 * (x - b[client]) ** 2

            update.loss = loss  # type: ignore[method-assign]
            return update

    return Quadratic(**hyper)


def toy(algorithm: Algorithm, sizes: tuple[int, ...] = (4, 4), steps: int = 2, **changes: Any) -> Experiment:
    """A run in double precision: x_0 = 0, lr 0.1, every client one full batch in each of K epochs."""
    data = ToyData(sizes)
    data.deal(0)
    fixed: dict[str, Any] = {
        "backbone": "helpers.scalar_net",
        "batch_size": max(sizes),
        "epochs": steps,
        "lr": 0.1,
        "supervision": "base",
        "client_fraction": 1.0,
    }
    precise = TrainerOptions(precision="64-true", accelerator="cpu")
    return Experiment(data=data, algorithm=algorithm, trainer=precise, **(fixed | changes))


class Played(Reports):
    """A run's rounds, with what every client sent and keeps."""

    def __init__(self, run: Experiment, folder: Path, domains: PseudoDomains | None = None) -> None:
        super().__init__()
        self.states = ClientStates(folder)
        self.kept: list[list[Record | None]] = []
        self.num_clients = run.data.num_clients
        workspace = Workspace(run)
        weights, buffers = workspace.start(1)
        record = run.algorithm.init_server(weights)
        if domains is not None:
            record |= run.algorithm.init_models(weights, buffers, domains.num_domains)
        runner = Watched(workspace, self.states)
        Rounds(run, runner, Events(self)).run(ServerState(0, weights, buffers, record, domains=domains))
        self.tasks, self.results, self.reports = runner.tasks, runner.results, self.all

    def round_aggregated(self, state: ServerState, metrics: dict[str, float]) -> None:
        known = state.clients
        self.kept.append([self.states.load(i, known[i]) if i in known else None for i in range(self.num_clients)])

    def theta(self, number: int) -> float:
        return self.reports[number - 1].state.weights[X].item()

    def locals(self, number: int) -> list[float]:
        return [result.weights[X].item() for result in self.results[number - 1]]

    def server(self, group: str, number: int) -> float:
        return self.reports[number - 1].state.record[group][X].item()

    def client(self, group: str, client: int, number: int = 0) -> float:
        state = self.kept[number - 1][client]
        return 0.0 if state is None else state[group][X].item()


def close(value: object, expected: object) -> None:
    assert value == pytest.approx(expected, abs=1e-6)


A, B = (1.0, 2.0), (1.0, 4.0)


def test_fedavg_numbers(tmp_path: Path) -> None:
    play = Played(toy(quadratic("FedAvg", A, B), rounds=2), tmp_path)
    close(play.locals(1), [0.19, 1.44])
    close(play.theta(1), 0.815)
    close(play.locals(2), [0.85015, 1.9616])
    close(play.theta(2), 1.405875)


def test_fedprox_numbers(tmp_path: Path) -> None:
    play = Played(toy(quadratic("FedProx", A, B, mu=0.5), rounds=2), tmp_path)
    close(play.locals(1), [0.185, 1.4])
    close(play.theta(1), 0.7925)
    close(play.locals(2), [0.8308875, 1.915125])
    close(play.theta(2), 1.37300625)


def test_scaffold_numbers(tmp_path: Path) -> None:
    play = Played(toy(quadratic("SCAFFOLD", A, B), rounds=1), tmp_path / "1")
    close([play.client("c", i) for i in range(2)], [-0.95, -7.2])
    play = Played(toy(quadratic("SCAFFOLD", A, B), rounds=2), tmp_path / "2")
    close(play.locals(1), [0.19, 1.44])
    close((play.theta(1), play.server("c", 1)), (0.815, -4.075))
    close(play.locals(2), [1.4439, 1.3991])
    close((play.theta(2), play.server("c", 2)), (1.4215, -3.0325))
    close([play.client("c", i) for i in range(2)], [-0.0195, -6.0455])


def test_feddyn_numbers(tmp_path: Path) -> None:
    play = Played(toy(quadratic("FedDyn", A, B, alpha=0.5), rounds=2), tmp_path)
    algorithm = algorithms.FedDyn()
    means = [
        algorithm.other_models(report.state.weights, report.state.record)["mean"][X].item() for report in play.reports
    ]
    close(play.locals(1), [0.185, 1.4])
    close((means[0], play.theta(1)), (0.7925, 1.585))
    close(play.locals(2), [1.4596625, 2.30775])
    close((means[1], play.theta(2)), (1.88370625, 2.9749125))


def test_feddc_numbers(tmp_path: Path) -> None:
    play = Played(toy(quadratic("FedDC", A, B, alpha=0.5), rounds=1), tmp_path / "1")
    close([play.client("c", i) for i in range(2)], [-0.925, -7])
    play = Played(toy(quadratic("FedDC", A, B, alpha=0.5), rounds=2), tmp_path / "2")
    algorithm = algorithms.FedDC()
    means = [
        algorithm.other_models(report.state.weights, report.state.record)["mean"][X].item() for report in play.reports
    ]
    close(play.locals(1), [0.185, 1.4])
    close((means[0], play.theta(1), play.server("c", 1)), (0.7925, 1.585, -3.9625))
    close(play.locals(2), [2.0216, 1.7761875])
    close((means[1], play.theta(2), play.server("c", 2)), (1.89889375, 3.0052875, -1.56946875))


# --- unequal n and partial participation


def exact(
    name: str,
    a: list[Fraction],
    b: list[Fraction],
    sizes: list[int],
    chosen: list[list[int]],
    steps: int,
    coefficient: Fraction = Fraction(1, 2),
) -> list[tuple[Fraction, Fraction | None, Fraction | None]]:
    """The algorithms once more, in exact fractions and written as in their tables: (theta, c, dual) after each round.

    With w_i = N n_i / sum(n) and K steps of 1/10 from theta, every step is x <- x - (a_i (x - b_i) + correction) / 10:

    - SCAFFOLD: c - c_i; c_i+ = c_i - c + (theta - theta_i) / (K lr); theta <- sum n_i theta_i / sum n_i over S;
    - FedDyn: a'_i (x - theta + v_i) with a'_i = alpha / w_i; v_i <- v_i + D_i;
    - FedDC: both, with c / w_i instead of c.

    Models are averaged over the participants, variates and duals over all N.
    """
    n = len(a)
    lr, w = Fraction(1, 10), [Fraction(n * size, sum(sizes)) for size in sizes]
    theta, c, dual = Fraction(0), Fraction(0), Fraction(0)
    c_of, dual_of = [Fraction(0)] * n, [Fraction(0)] * n
    history = []
    for participants in chosen:
        local, moved = {}, {}
        for i in participants:
            strength = (
                coefficient / w[i] if name in ("FedDyn", "FedDC") else coefficient if name == "FedProx" else Fraction(0)
            )
            shift = {"SCAFFOLD": c - c_of[i], "FedDC": c / w[i] - c_of[i]}.get(name, Fraction(0))
            x = theta
            for _ in range(steps):
                x -= lr * (a[i] * (x - b[i]) + strength * (x - theta + dual_of[i]) + shift)
            local[i] = x
            if name in ("SCAFFOLD", "FedDC"):
                moved[i] = -(c if name == "SCAFFOLD" else c / w[i]) - (x - theta) / (steps * lr)
        drift = sum((local[i] - theta for i in participants), Fraction(0)) / n
        if name in ("FedDyn", "FedDC"):
            for i in participants:
                dual_of[i] += local[i] - theta
            dual += drift
            theta = sum(local.values(), Fraction(0)) / len(participants) + dual
        else:
            total = sum(sizes[i] for i in participants)
            theta = sum((sizes[i] * local[i] for i in participants), Fraction(0)) / total
        for i, change in moved.items():
            c_of[i] += change
        c += sum((w[i] * change for i, change in moved.items()), Fraction(0)) / n
        history.append((theta, c if moved else None, dual if name in ("FedDyn", "FedDC") else None))
    return history


def test_the_plain_version_has_the_numbers_too() -> None:
    """Equal n and both clients: the table of numbers, so that the plain version can be trusted with other cases."""
    a, b, both = [Fraction(1), Fraction(2)], [Fraction(1), Fraction(4)], [[0, 1], [0, 1]]
    expected = {
        "FedAvg": (Fraction("0.815"), Fraction("1.405875")),
        "FedProx": (Fraction("0.7925"), Fraction("1.37300625")),
        "SCAFFOLD": (Fraction("0.815"), Fraction("1.4215")),
        "FedDyn": (Fraction("1.585"), Fraction("2.9749125")),
        "FedDC": (Fraction("1.585"), Fraction("3.0052875")),
    }
    for name, thetas in expected.items():
        assert tuple(theta for theta, _, _ in exact(name, a, b, [4, 4], both, 2)) == thetas, name


def test_unequal_n_by_hand(tmp_path: Path) -> None:
    """SCAFFOLD, n = (1, 3), so w = (1/2, 3/2); one step of 0.1 from 0 on f = (x - 1)^2 / 2 and (x - 4)^2.

    x_1 = 0.1, x_2 = 0.8; theta = (1 * 0.1 + 3 * 0.8) / 4 = 0.625. K lr = 0.1: c_1 = -1, c_2 = -8;
    c = (1/2) (1/2 * -1 + 3/2 * -8) = -6.25, the weighted mean gradient at 0: (1 * -1 + 3 * -8) / 4.
    FedDyn, alpha 0.5: a' = (1, 1/3), the first step does not feel them: mean 0.45, vbar 0.45, theta 0.9. Second round:
    x_1 = 0.9 - 0.1 (1 * (0.9 - 1) + 1 * 0.1) = 0.9, x_2 = 0.9 - 0.1 (2 * (0.9 - 4) + 0.8 / 3) = 1.493333;
    mean 1.196667, vbar = 0.45 + (0 + 0.593333) / 2 = 0.746667, theta 1.943333.
    """
    play = Played(toy(quadratic("SCAFFOLD", A, B), sizes=(1, 3), steps=1, rounds=1), tmp_path / "s")
    close((play.theta(1), play.server("c", 1)), (0.625, -6.25))
    play = Played(toy(quadratic("FedDyn", A, B, alpha=0.5), sizes=(1, 3), steps=1, rounds=2), tmp_path / "d")
    close((play.theta(1), play.theta(2), play.server("v", 2)), (0.9, 1.9433333, 0.7466667))


def test_partial_participation_by_hand(tmp_path: Path) -> None:
    """SCAFFOLD, N = 2, one client a round, one step of 0.1 from 0; equal n.

    Only client i takes part: theta = x_i (0.1 or 0.8), c_i = -1 or -8, and c = c_i / N = -0.5 or -4: not c_i / |S|.
    """
    run = toy(quadratic("SCAFFOLD", A, B), steps=1, rounds=1, client_fraction=0.5)
    (client,) = sample_clients(2, 1, 0, 1)
    play = Played(run, tmp_path)
    close((play.theta(1), play.server("c", 1)), [(0.1, -0.5), (0.8, -4.0)][client])
    assert play.client("c", 1 - client) == 0


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC"]),
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    fraction=st.sampled_from([0.3, 0.5, 1.0]),
    seed=st.integers(0, 50),
    steps=st.integers(1, 3),
)
def test_against_exact_fractions_and_invariants(
    name: str, sizes: list[int], fraction: float, seed: int, steps: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Random sizes and participation: rounds are the plain version's; c = (1/N) sum w_i c_i, vbar = (1/N) sum v_i."""
    n, rounds = len(sizes), 3
    a, b = [Fraction(1 + i, 2) for i in range(n)], [Fraction(3 * i - 2) for i in range(n)]
    hyper = {"FedProx": {"mu": 0.5}, "FedDyn": {"alpha": 0.5}, "FedDC": {"alpha": 0.5}}.get(name, {})
    algorithm = quadratic(name, tuple(map(float, a)), tuple(map(float, b)), **hyper)
    changes = {"rounds": rounds, "client_fraction": fraction, "seed_everything": seed}
    play = Played(toy(algorithm, tuple(sizes), steps, **changes), tmp_path_factory.mktemp("clients"))
    count = max(1, int(fraction * n + 0.5))
    chosen = [sample_clients(n, count, seed, number) for number in range(1, rounds + 1)]
    for number, (theta, c, dual) in enumerate(exact(name, a, b, sizes, chosen, steps), start=1):
        close(play.theta(number), float(theta))
        if c is not None:
            close(play.server("c", number), float(c))
        if dual is not None:
            close(play.server("v" if name == "FedDyn" else "h", number), float(dual))
    w = [n * size / sum(sizes) for size in sizes]
    for number in range(1, rounds + 1):
        if name in ("SCAFFOLD", "FedDC"):
            close(play.server("c", number), sum(w[i] * play.client("c", i, number) for i in range(n)) / n)
        if name in ("FedDyn", "FedDC"):
            group = "v" if name == "FedDyn" else "h"
            close(play.server(group, number), sum(play.client(group, i, number) for i in range(n)) / n)


@pytest.mark.slow
def test_scaffold_finds_the_weighted_optimum(tmp_path: Path) -> None:
    """The optimum of sum n_i f_i, n = (1, 3): (1 * 1 + 3 * 2 * 4) / (1 + 3 * 2) = 25 / 7; FedAvg stops elsewhere."""
    fast = {"steps": 5, "rounds": 20}
    scaffold = Played(toy(quadratic("SCAFFOLD", A, B), (1, 3), **fast), tmp_path / "s")
    assert scaffold.theta(20) == pytest.approx(25 / 7, abs=1e-6)
    fedavg = Played(toy(quadratic("FedAvg", A, B), (1, 3), **fast), tmp_path / "f")
    assert abs(fedavg.theta(20) - 25 / 7) > 0.05
    assert fedavg.theta(20) == pytest.approx(fedavg.theta(15), abs=1e-4)  # and does not move any more
    feddyn = Played(toy(quadratic("FedDyn", A, B, alpha=1.0), (1, 3), steps=20, rounds=20), tmp_path / "d")
    assert feddyn.theta(20) == pytest.approx(25 / 7, abs=1e-4)


def test_global_lr(tmp_path: Path) -> None:
    """Half a step of the server, one step of 0.1 at the clients.

    Round 1: x = (0.1, 0.8), mean 0.45, theta = 0 + 0.5 (0.45 - 0) = 0.225; c_i = (-1, -8), c = -4.5.
    Round 2: x_1 = 0.225 - 0.1 (0.225 - 1 - 4.5 + 1) = 0.6525, x_2 = 0.225 - 0.1 (2 (0.225 - 4) - 4.5 + 8) = 0.63;
    mean 0.64125, theta = 0.225 + 0.5 (0.64125 - 0.225) = 0.433125.
    """
    play = Played(toy(quadratic("SCAFFOLD", A, B, global_lr=0.5), steps=1, rounds=2), tmp_path)
    close((play.theta(1), play.theta(2)), (0.225, 0.433125))


def test_k_is_the_number_of_steps_and_not_of_epochs(tmp_path: Path) -> None:
    """n = (2, 6) in batches of 2, 2 epochs: K = (2, 6) steps of 0.1 from 0.

    x_1 = 1 - 0.9^2 = 0.19 and c_1 = -0.19 / 0.2 = -0.95; x_2 = 4 (1 - 0.8^6) = 2.951424 and
    c_2 = -2.951424 / 0.6 = -4.91904; w = (1/2, 3/2): c = (1/2) (1/2 * -0.95 + 3/2 * -4.91904) = -3.92678.
    """
    for name in ("SCAFFOLD", "FedDC"):
        algorithm = quadratic(name, A, B)
        if name == "FedDC":
            object.__setattr__(algorithm, "alpha", 0.0)
        play = Played(toy(algorithm, (2, 6), batch_size=2, rounds=1), tmp_path / name)
        close(play.locals(1), [0.19, 2.951424])
        assert [result.num_steps for result in play.results[0]] == [2, 6]
        close([play.client("c", i) for i in range(2)], [-0.95, -4.91904])
        close(play.server("c", 1), -3.92678)


def test_skipped_steps_do_not_count() -> None:
    """A gradient scaler that finds every step overflowing: no step is taken, and that is an error."""
    run = experiment(algorithm=algorithms.SCAFFOLD(), trainer=TrainerOptions(gradient_clip_val=1e9))  # with a Trainer
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    task = FitTask(1, 4, 0, weights, buffers, run.algorithm.init_server(weights))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning.pytorch.plugins.precision.Precision.optimizer_step", _only_closure)
        with pytest.raises(InputError, match=r"client 1 .* round 4 .*no step.*--trainer\.precision"):
            fit_client(workspace, task, run.algorithm.init_client(weights))


def _only_closure(plugin: Any, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
    return closure()


# --- contrastive terms


def test_moon_numbers() -> None:
    z, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    assert contrast(z, other, 3 * z, 0.5).item() == pytest.approx(2.126928, abs=1e-6)
    assert contrast(z, z, other, 0.5).item() == pytest.approx(0.126928, abs=1e-6)


def test_fedproc_numbers() -> None:
    prototypes, z = 5 * torch.eye(2), torch.tensor([[3.0, 0.0]])
    both = torch.tensor([True, True])
    assert prototype_contrast(z, prototypes, both, torch.tensor([0])).item() == pytest.approx(0.313262, abs=1e-6)
    assert prototype_contrast(z, prototypes, both, torch.tensor([1])).item() == pytest.approx(1.313262, abs=1e-6)
    only = torch.tensor([True, False])
    assert prototype_contrast(z, prototypes, only, torch.tensor([0])).item() == 0  # alone in its denominator
    assert prototype_contrast(z, prototypes, only, torch.tensor([1])).item() == 0  # no prototype to go to


def test_fedproc_prototypes_are_means_over_all_samples() -> None:
    """Class 0: (2 * (1, 0) + 1 * (0, 1)) / 3 over 3 samples of two clients; class 1 absent keeps its old prototype."""
    algorithm = algorithms.FedProc()

    def result(client: int, sums: list[list[float]], counts: list[float]) -> FitResult:
        features = {"sums": torch.tensor(sums), "counts": torch.tensor(counts)}
        return FitResult(client, int(sum(counts)), 1, weights={"w": torch.zeros(1)}, upload={"features": features})

    results = [result(0, [[2.0, 0.0], [0.0, 0.0]], [2.0, 0.0]), result(1, [[0.0, 1.0], [0.0, 0.0]], [1.0, 0.0])]
    _, first = algorithm.aggregate({"w": torch.zeros(1)}, {}, iter(results), RoundContext(1, 2, 2))
    torch.testing.assert_close(first["prototypes"]["means"], torch.tensor([[2 / 3, 1 / 3], [0.0, 0.0]]))
    assert first["prototypes"]["seen"].tolist() == [True, False]
    later = [result(0, [[0.0, 0.0], [0.0, 4.0]], [0.0, 4.0])]
    _, second = algorithm.aggregate({"w": torch.zeros(1)}, first, iter(later), RoundContext(2, 2, 1))
    torch.testing.assert_close(second["prototypes"]["means"], torch.tensor([[2 / 3, 1 / 3], [0.0, 1.0]]))
    assert second["prototypes"]["seen"].tolist() == [True, True]
    # one with 2 samples who counts 8 weighs no more than the 2 of another
    boast = [dataclasses.replace(result(0, [[8.0, 0.0], [0.0, 0.0]], [8.0, 0.0]), num_examples=2)]
    boast.append(result(1, [[0.0, 2.0], [0.0, 0.0]], [2.0, 0.0]))
    _, third = algorithm.aggregate({"w": torch.zeros(1)}, {}, iter(boast), RoundContext(1, 2, 2))
    torch.testing.assert_close(third["prototypes"]["means"][0], torch.tensor([0.5, 0.5]))


def test_fedproc_sums_features_of_the_trained_model_in_eval_mode() -> None:
    run = experiment(algorithm=algorithms.FedProc(), backbone="helpers.batch_norm_net")
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    result, state = fit_client(workspace, FitTask(1, 1, 0, weights, buffers, rounds=5), {})
    assert state == {}
    indices = run.data.partition.clients[1]
    backbone = workspace.module(result.weights, result.buffers).backbone.eval()
    images = run.data.images[indices].permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        features = torch.nn.functional.normalize(backbone(images), dim=1).double()
    for label in range(10):
        mask = run.data.labels[indices] == label
        expected = features[mask].sum(0)
        torch.testing.assert_close(result.upload["features"]["sums"][label], expected, atol=1e-4, rtol=1e-4)
        assert result.upload["features"]["counts"][label] == mask.sum()


def test_fedproc_mixes_by_the_round(tmp_path: Path) -> None:
    """a_t = t / T with t counted from 0: in round 3 of 8 the task has a weight of 1/4."""
    prototypes = {"prototypes": {"means": torch.eye(2), "seen": torch.tensor([True, True])}}
    task = FitTask(0, 3, 0, {}, server=prototypes, rounds=8)
    update = algorithms.FedProc().local(task, {})
    update.begin({"w": torch.zeros(1)})
    value = update.loss(torch.tensor(2.0), torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert value.item() == pytest.approx(0.25 * 2 + 0.75 * 0.313262, abs=1e-6)
    first = algorithms.FedProc().local(FitTask(0, 1, 0, {}, rounds=8), {})
    first.begin({"w": torch.zeros(1)})
    assert first.loss(torch.tensor(2.0), torch.ones(1, 2), torch.tensor([0])) == 2


def test_fedproc_prototypes_reach_the_clients(tmp_path: Path) -> None:
    """M = 3: still 10 prototypes; from round 2 on, clients train on something else than FedAvg's."""
    sent: dict[str, list[FitTask]] = {}
    weights: dict[str, list[Tensor]] = {}
    for name in ("FedProc", "FedAvg"):
        run = experiment(algorithm=getattr(algorithms, name)(), rounds=2, client_fraction=0.5)
        workspace, reports = Workspace(run), Reports()
        start, buffers = workspace.initial(3)
        domains = PseudoDomains(dict.fromkeys(range(4), 0), torch.eye(3), "given", {}, {})
        state = ServerState(0, start, buffers, run.algorithm.init_server(start), domains=domains)
        runner = Watched(workspace, ClientStates(tmp_path / name))
        Rounds(run, runner, Events(reports)).run(state)
        sent[name] = [task for tasks in runner.tasks for task in tasks]
        weights[name] = [flatten(report.state.weights) for report in reports.all]
    assert torch.equal(weights["FedProc"][0], weights["FedAvg"][0])
    assert not torch.equal(weights["FedProc"][1], weights["FedAvg"][1])
    assert [task.server for task in sent["FedProc"][:2]] == [{}, {}]
    for task in sent["FedProc"][2:]:
        assert task.server["prototypes"]["means"].shape == (10, 12)
        assert task.server["prototypes"]["seen"].all()


def test_moon_contrasts_with_the_right_networks_in_eval_mode() -> None:
    """Against two networks built apart: the server's, and the one this client left, both with frozen statistics."""
    run = experiment(algorithm=algorithms.MOON(mu=2.0), backbone="helpers.batch_norm_net", batch_size=500, lr=1e-9)
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    _, state = fit_client(workspace, FitTask(0, 1, 0, {n: t + 0.1 for n, t in weights.items()}, buffers), {})
    result, _ = fit_client(workspace, FitTask(0, 2, 0, weights, buffers), state)
    indices = run.data.partition.clients[0]
    images = run.data.images[indices].permute(0, 3, 1, 2).float() / 127.5 - 1

    def network(tensors: Tensors, training: bool) -> torch.nn.Module:
        backbone = build_backbone("helpers.batch_norm_net", 8)
        backbone.load_state_dict(
            {n.removeprefix("backbone."): t for n, t in tensors.items() if n.startswith("backbone")}
        )
        return backbone.train(training)

    sent = weights | buffers
    left = {f"backbone.{n}": t for n, t in state["previous"].items()}
    with torch.no_grad():
        features = network(sent, training=True)(images)
        logits = features @ weights["head.weight"].T + weights["head.bias"]
        task_loss = torch.nn.functional.cross_entropy(logits, run.data.labels[indices])
        term = contrast(features, network(sent, False)(images), network(left, False)(images), 0.5)
    assert result.metrics["train/loss"] == pytest.approx((task_loss + 2 * term).item(), rel=1e-4)


def test_moon_contrasts_features_of_the_same_images() -> None:
    """The frozen networks get the images that the module's augmentation made, here half as bright."""
    run = experiment(algorithm=algorithms.MOON(mu=2.0), model=Part("own_parts.Darker"), batch_size=500, lr=1e-9)
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    before = {
        name: tensor + 0.1 * torch.linspace(-1, 1, tensor.numel()).view_as(tensor) for name, tensor in weights.items()
    }
    _, state = fit_client(workspace, FitTask(0, 1, 0, before, buffers), {})
    alone, _ = fit_client(workspace, FitTask(0, 2, 0, weights, buffers), {})
    result, _ = fit_client(workspace, FitTask(0, 2, 0, weights, buffers), state)
    images = to_input(run.data.images[run.data.partition.clients[0]]) / 2

    def features(tensors: Tensors) -> Tensor:
        backbone = build_backbone("helpers.tiny_net", 8)
        backbone.load_state_dict({n.removeprefix("backbone."): t for n, t in tensors.items() if "head" not in n})
        with torch.no_grad():
            found: Tensor = backbone(images)
        return found

    term = contrast(features(weights), features(weights), features(before), 0.5).item()
    assert result.metrics["train/loss"] - alone.metrics["train/loss"] == pytest.approx(2 * term, rel=1e-4)


def test_a_failed_fit_leaves_no_hook_of_moon(monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(experiment(algorithm=algorithms.MOON()))
    weights, buffers = workspace.initial(1)
    _, state = fit_client(workspace, FitTask(0, 1, 0, weights, buffers), {})
    monkeypatch.setattr(algorithms.moon, "contrast", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit_client(workspace, FitTask(0, 2, 0, weights, buffers), state)
    assert not workspace.module(weights, buffers).backbone._forward_pre_hooks


def test_fedproc_sums_features_of_images_without_augmentation() -> None:
    task = FitTask(0, 1, 0, {}, {})
    sums = []
    invert: list[str | dict[Any, Any]] = [{"class_path": "RandomInvert", "init_args": {"p": 1}}]
    for augment in (None, invert):
        data = DigitsDomains(size=8, num_clients=4, augment=augment)
        data.deal(0)
        run = experiment(algorithm=algorithms.FedProc(), data=data, lr=1e-12)
        workspace = Workspace(run)
        weights, buffers = workspace.initial(1)
        result, _ = fit_client(workspace, dataclasses.replace(task, weights=weights, buffers=buffers), {})
        sums.append(result.upload["features"]["sums"])
    torch.testing.assert_close(sums[0], sums[1], atol=1e-4, rtol=1e-4)


def test_moon_keeps_the_local_network_and_uses_it() -> None:
    run = experiment(algorithm=algorithms.MOON(mu=5.0))
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    first, state = fit_client(workspace, FitTask(0, 1, 0, weights, buffers), {})
    kept = {f"backbone.{name}": tensor for name, tensor in state["previous"].items()}
    assert all(torch.equal(kept[name], first.weights[name]) for name in kept)
    assert set(kept) == {name for name in first.weights if name.startswith("backbone")}
    pushed, _ = fit_client(workspace, FitTask(0, 2, 0, weights, buffers), state)
    unpushed, _ = fit_client(workspace, FitTask(0, 2, 0, weights, buffers), {})
    assert not torch.equal(flatten(pushed.weights), flatten(unpushed.weights))


# --- all of them


def zeroed(name: str) -> Algorithm:
    """An algorithm with its coefficients at zero, whatever its guards say of that."""
    algorithm: Algorithm = getattr(algorithms, name)(weighting="uniform")
    for coefficient in ("mu", "alpha"):
        if hasattr(algorithm, coefficient):
            object.__setattr__(algorithm, coefficient, 0.0)
    return algorithm


@pytest.mark.parametrize("name", ALL)
def test_without_states_and_coefficients_the_first_round_is_fedavgs_to_the_bit(name: str, tmp_path: Path) -> None:
    def play(algorithm: Algorithm) -> tuple[list[Tensors], Tensors]:
        run = experiment(algorithm=algorithm, rounds=1, client_fraction=0.5, supervision="base")
        played = Played(run, tmp_path / type(algorithm).__name__ / str(id(algorithm)))
        return [result.weights for result in played.results[0]], played.reports[0].state.weights

    reference, mean = play(algorithms.FedAvg(weighting="uniform"))
    local, new = play(zeroed(name))
    for ours, theirs in zip(local, reference, strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    if name not in ("FedDyn", "FedDC"):  # their server extrapolates beyond the mean by design
        assert all(torch.equal(new[key], mean[key]) for key in mean)


@pytest.mark.parametrize(("name", "supervision"), checkered(ALL, ("base", "hard", "graded", "random")))
def test_every_algorithm_runs_with_every_supervision(name: str, supervision: str) -> None:
    algorithm = getattr(algorithms, name)()
    run = fit(experiment(algorithm=algorithm, supervision=supervision, run_dir="run", rounds=2, client_fraction=0.5))
    m = 1 if supervision == "base" else 3
    states = ClientStates(Path("run/clients"))
    for client in sample_clients(4, 2, 0, 2):
        state = states.load(client, 2) if list(Path("run").glob("clients/*")) else {}
        shapes = {group: tensors["head.weight"].shape for group, tensors in state.items() if "head.weight" in tensors}
        expected = {"SCAFFOLD": {"c"}, "FedDyn": {"v"}, "FedDC": {"h", "c"}}.get(name, set())
        assert shapes == dict.fromkeys(expected, (m * 10, 12))
    norms = {column for column in run.last if column.startswith("norm/")}
    assert norms == {
        "SCAFFOLD": {"norm/server/c", "norm/client/c"},
        "FedDyn": {"norm/server/v", "norm/client/v"},
        "FedDC": {"norm/server/h", "norm/server/c", "norm/client/h", "norm/client/c"},
        "FedProc": {"norm/server/prototypes"},
        "MOON": {"norm/client/previous"},
    }.get(name, set())
    assert all(run.last[column] > 0 for column in norms)
    assert ("test/acc_of_mean" in run.last) == (name in ("FedDyn", "FedDC"))


def test_weighting_reaches_the_clients() -> None:
    seen: dict[str, list[float]] = {}
    for weighting in ("samples", "uniform"):
        algorithm = quadratic("SCAFFOLD", A, B, weighting=weighting)
        play = Played(toy(algorithm, sizes=(1, 3), rounds=1), Path(weighting))
        seen[weighting] = [result.weight for result in play.results[0]]
        if weighting == "uniform":
            close(play.theta(1), 0.815)  # as with equal n
    assert seen == {"samples": [0.5, 1.5], "uniform": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["SCAFFOLD", "--momentum", "0.9"], "--momentum"),
        (["FedDC", "--momentum", "0.9"], "--momentum"),
        (["FedDyn", "--algorithm.alpha", "0"], "--algorithm.alpha"),
        (["FedDC", "--algorithm.alpha", "-1"], "--algorithm.alpha"),
        (["FedProx", "--algorithm.mu", "-0.1"], "--algorithm.mu"),
        (["MOON", "--algorithm.mu", "-0.1"], "--algorithm.mu"),
        (["MOON", "--algorithm.temperature", "0"], "--algorithm.temperature"),
        (["SCAFFOLD", "--algorithm.global_lr", "0"], "--algorithm.global_lr"),
        (["SCAFFOLD", "--algorithm.weighting", "equal"], "--algorithm.weighting"),
    ],
)
def test_guards_name_the_flag(arguments: list[str], named: str) -> None:
    with pytest.raises(InputError, match=named):
        parse_experiment("fit", ["--algorithm", *arguments])


def test_momentum_is_fine_elsewhere() -> None:
    for name in ("FedAvg", "FedProx", "FedDyn", "FedProc", "MOON"):
        assert parse_experiment("fit", ["--algorithm", name, "--momentum", "0.9"]).momentum == 0.9


def test_chosen_by_name_with_arguments() -> None:
    run = parse_experiment("fit", ["--algorithm", "SCAFFOLD", "--algorithm.global_lr", "0.5"])
    assert run.algorithm == algorithms.SCAFFOLD(global_lr=0.5)
    assert parse_experiment("fit", ["--algorithm", "jdfl_lightning.FedDC"]).algorithm == algorithms.FedDC()


def test_defaults_are_the_papers() -> None:
    """But for FedDC's alpha in PACS A, which that config names; what the user says wins, in any order of configs."""
    for config in ("pacs_a", "pacs_b", "pacs_c", "office_caltech"):
        for chosen in (["--algorithm", "FedDC"], ["--algorithm=jdfl_lightning.FedDC"]):
            assert parse_experiment("fit", ["--config", config, *chosen]).algorithm == algorithms.FedDC(alpha=0.1)
        assert parse_experiment("fit", [f"--config={config}", "--algorithm", "FedDyn"]).algorithm == algorithms.FedDyn()
    advice = "--algorithm FedDC --algorithm.alpha 0.01"
    assert advice in shipped_configs()["pacs_a"].read_text()
    assert parse_experiment("fit", ["--config", "pacs_a", *advice.split()]).algorithm == algorithms.FedDC(alpha=0.01)
    Path("second.yaml").write_text("algorithm:\n  class_path: FedDC\n  init_args:\n    alpha: 0.5\n")
    explicit = ["--config", "pacs_a", "--config", "second.yaml"]
    assert parse_experiment("fit", explicit).algorithm == algorithms.FedDC(alpha=0.5)
    assert parse_experiment("fit", [*explicit, "--algorithm", "FedDC"]).algorithm == algorithms.FedDC(alpha=0.5)


def test_a_diverged_scaffold_is_named() -> None:
    run = experiment(algorithm=algorithms.SCAFFOLD(), lr=1e20)
    with pytest.raises(InputError, match="lower --lr"):
        fit(dataclasses.replace(run, supervision=Plain(), run_dir="run"))


def test_a_fit_without_a_step_is_named() -> None:
    run = experiment(algorithm=algorithms.SCAFFOLD())
    run.data.partition.clients[1] = torch.empty(0, dtype=torch.long)
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    task = FitTask(1, 4, 0, weights, buffers, run.algorithm.init_server(weights), weight=0.0)
    with pytest.raises(InputError, match=r"client 1 .* round 4 .*no image.*--data\.num_clients"):
        fit_client(workspace, task, run.algorithm.init_client(weights))
