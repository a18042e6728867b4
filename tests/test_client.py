"""A client's fit, FedAvg, client states and rounds, against plain loops and numbers worked out by hand."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import Reports, digits, every, experiment, targets
from jdfl_lightning import MOON, Algorithm, Experiment, FedAvg, LocalUpdate, TrainerOptions, fit
from jdfl_lightning.backends import LocalBackend
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.client.trainer import check_trainer
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import FitResult, FitTask, RoundContext
from jdfl_lightning.core.seeding import derive_seed, isolated_randomness, sample_clients, torch_generator
from jdfl_lightning.core.tensors import Record, RunningSum, Tensors, flatten
from jdfl_lightning.joint import RandomTargets, dense_targets
from jdfl_lightning.models import build_backbone
from jdfl_lightning.server.events import Events
from jdfl_lightning.server.rounds import Rounds
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.storage.checkpoint import ClientStates
from jdfl_lightning.storage.records import load_record, save_record


def task_for(run: Experiment, client: int = 1, number: int = 3, m: int = 3) -> FitTask:
    weights, buffers = Workspace(run).initial(m)
    table = RandomTargets(m, phi=0.8).table
    return FitTask(client, number, run.seed_everything, weights, buffers, domain=2, learned=targets(table))


def test_fit_client_is_plain_sgd_on_soft_targets() -> None:
    """The same mathematics written out: shuffled batches, a drawn domain for each sample, KL to the dense target."""
    run = experiment(epochs=2, batch_size=32, lr=0.1, momentum=0.9, weight_decay=0.01)
    task = task_for(run)
    result, _ = fit_client(Workspace(run), task, {})

    data, indices = run.data, run.data.partition.clients[1]
    net = build_backbone("helpers.tiny_net", 8)
    net.load_state_dict({n.removeprefix("backbone."): t for n, t in task.weights.items() if n.startswith("backbone")})
    head = torch.nn.Linear(12, 30)
    head.load_state_dict({n.removeprefix("head."): t for n, t in task.weights.items() if n.startswith("head")})
    parameters = [*net.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    shuffle, draws = torch_generator(0, "shuffle", 3, 1), torch_generator(0, "targets", 3, 1)
    losses = []
    for _ in range(2):
        order = indices[torch.randperm(len(indices), generator=shuffle)]
        for batch in order.split(32):
            images = data.images[batch].permute(0, 3, 1, 2).float() / 127.5 - 1
            weights = torch.full((len(batch), 3), 0.1)
            weights[torch.arange(len(batch)), torch.randint(3, (len(batch),), generator=draws)] = 0.8
            target = dense_targets(weights, data.labels[batch], 10)
            log_p = head(net(images)).log_softmax(1)
            loss = torch.nn.functional.kl_div(log_p, target, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += [loss.item()] * len(batch)
    expected = dict(zip(result.weights, parameters, strict=True))
    for name, tensor in result.weights.items():
        torch.testing.assert_close(tensor, expected[name].detach(), atol=1e-5, rtol=1e-4)
    assert (result.num_examples, result.num_steps) == (len(indices), 2 * -(-len(indices) // 32))
    assert result.metrics["train/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_a_fit_depends_on_seed_round_and_client_alone() -> None:
    """Not on what was fitted before, on global generators, or on the process's workspace."""
    run = experiment()
    workspace = Workspace(run)
    first, _ = fit_client(workspace, task_for(run), {})
    torch.manual_seed(99)
    fit_client(workspace, task_for(run, client=0), {})
    state = torch.get_rng_state()
    again, _ = fit_client(workspace, task_for(run), {})
    assert torch.equal(torch.get_rng_state(), state)
    fresh, _ = fit_client(Workspace(run), task_for(run), {})
    for other in (again, fresh):
        assert all(torch.equal(first.weights[name], other.weights[name]) for name in first.weights)
    for changed in (task_for(run, number=4), task_for(run, client=2), task_for(experiment(seed_everything=1))):
        different, _ = fit_client(workspace, changed, {})
        assert not torch.equal(flatten(first.weights), flatten(different.weights))


def test_theta_0_is_shared_and_the_head_fresh() -> None:
    workspace = Workspace(experiment())
    small, _ = workspace.initial(1)
    large, _ = workspace.initial(3)
    again, _ = Workspace(experiment(supervision="graded")).initial(3)
    assert large["head.weight"].shape == (30, 12)
    assert all(torch.equal(large[name], again[name]) for name in large)
    assert all(torch.equal(small[name], large[name]) for name in small if name.startswith("backbone"))


def test_a_run_that_diverges_says_so() -> None:
    with pytest.raises(InputError, match=r"round 1 but 3 attempts were void. Client \d: .* not finite: lower --lr"):
        fit(experiment(lr=1e30, supervision="base", run_dir="run"))
    with pytest.raises(InputError, match=r"none has one\. Client 0: its update is not finite: lower --lr"):
        fit(experiment(lr=1e30, run_dir="run"))
    assert not Path("run").exists()


def test_inner_trainers_are_silent(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    run = experiment()
    level = logging.getLogger("lightning.pytorch").level
    fit_client(Workspace(run), task_for(run), {})
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert not recwarn.list
    assert logging.getLogger("lightning.pytorch").level == level
    assert not list(Path.cwd().iterdir())  # no lightning_logs, no checkpoints


def test_options_reach_the_trainer() -> None:
    """Clipped at 1e-6, the weights hardly move; bf16 gives other numbers than float32."""
    clipped = experiment(trainer=TrainerOptions(gradient_clip_val=1e-6, accelerator="cpu"))
    task = task_for(clipped)
    result, _ = fit_client(Workspace(clipped), task, {})
    assert (flatten(result.weights) - flatten(task.weights)).norm() < 1e-4
    mixed = experiment(trainer=TrainerOptions(precision="bf16-mixed", accelerator="cpu"))
    half, _ = fit_client(Workspace(mixed), task, {})
    full, _ = fit_client(Workspace(experiment()), task, {})
    difference = (flatten(half.weights) - flatten(full.weights)).norm()
    assert 0 < difference < 0.1 * (flatten(full.weights) - flatten(task.weights)).norm()


LAYOUTS: list[tuple[bool, bool]] = []
"""Whether a network's images, and its convolution's weights, are in channels_last, in the order of its batches."""


class Spy(torch.nn.Module):
    """A network that notes the layout of its inputs and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rest = torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = [tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (images, self.conv.weight)]
        plain = [tensor.is_contiguous() for tensor in (images, self.conv.weight)]
        assert [not one for one in plain] == found  # with 3 channels a tensor has one layout, not both
        if len(images) > 2:  # else the run asks how many features it has
            LAYOUTS.append((found[0], found[1]))
        features: torch.Tensor = self.rest(self.conv(images))
        return features


def spy_net(size: int) -> torch.nn.Module:
    return Spy()


@pytest.mark.parametrize(
    ("precision", "channels_last"), [("32-true", True), ("bf16-mixed", False), ("64-true", True), ("bf16-true", True)]
)
@pytest.mark.parametrize("algorithm", every(2, [FedAvg(), MOON()]))
def test_the_layout_follows_from_the_precision(precision: Any, channels_last: bool, algorithm: Algorithm) -> None:
    """In training and evaluation, in the client's own networks too, and after a run was resumed."""
    LAYOUTS.clear()
    options = TrainerOptions(precision=precision, accelerator="cpu")
    changes = {"backbone": "test_client.spy_net", "algorithm": algorithm, "supervision": "base", "trainer": options}
    fit(experiment(run_dir="run", rounds=1, **changes))
    assert set(LAYOUTS) == {(channels_last, channels_last)}
    LAYOUTS.clear()
    fit(experiment(resume="run", rounds=2, **changes))
    assert set(LAYOUTS) == {(channels_last, channels_last)}


def test_a_matrix_unit_that_ends_the_process_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on virtual machines that announce one: the first try ends in a signal, the second does without it."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    tries: list[str | None] = []

    def dies(works: bool) -> Callable[[], bool]:
        def computes() -> bool:
            tries.append(os.environ.get("ONEDNN_MAX_CPU_ISA"))
            return works and tries[-1] is not None

        return computes

    half = TrainerOptions(precision="bf16-mixed", accelerator="cpu")
    monkeypatch.setattr("jdfl_lightning.client.trainer._computes", dies(works=True))
    check_trainer(half)
    assert tries == [None, "AVX512_CORE_FP16"]
    monkeypatch.setattr("jdfl_lightning.client.trainer._computes", dies(works=False))
    with pytest.raises(InputError, match=r"bf16-mixed ends the process: set the variable ONEDNN_MAX_CPU_ISA"):
        check_trainer(half)
    check_trainer(TrainerOptions(accelerator="cpu"))  # not asked


# --- aggregation


def result(client: int, n: int, value: float, **buffers: torch.Tensor) -> FitResult:
    return FitResult(client, n, 1, weights={"w": torch.tensor([value])}, buffers=buffers)


def weighted_mean(items: Iterable[tuple[float, Tensors]]) -> Tensors:
    total = RunningSum()
    for weight, tensors in items:
        total.add(tensors, weight)
    return total.mean()


def test_fedavg_by_hand() -> None:
    """(1 * 10 + 2 * 20 + 5 * 30) / 8 = 25; uniform: (10 + 20 + 30) / 3 = 20."""
    results = [result(0, 1, 10.0), result(1, 2, 20.0), result(4, 5, 30.0)]
    old = {"w": torch.tensor([7.0])}
    assert FedAvg().aggregate(old, {}, iter(results), RoundContext(1, 6, 3))[0]["w"].tolist() == [25.0]
    assert FedAvg(weighting="uniform").aggregate(old, {}, iter(results), RoundContext(1, 6, 3))[0]["w"].tolist() == [
        20.0
    ]


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(-(2**20), 2**20)), min_size=1, max_size=8))
def test_weighted_mean_is_the_exact_one_rounded(items: list[tuple[int, int]]) -> None:
    """Against fractions: weights are counts, values have 21 bits, so that the double-precision sum is exact."""
    mean = weighted_mean([(n, {"w": torch.tensor(v / 64)}) for n, v in items])["w"]
    exact = sum(Fraction(n * v, 64) for n, v in items) / sum(n for n, _ in items)
    assert mean.item() == torch.tensor(float(exact)).item()


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=9), st.floats(-1e6, 1e6, width=32))
def test_mean_of_equal_models_is_that_model(counts: list[int], value: float) -> None:
    assert weighted_mean([(n, {"w": torch.tensor(value)}) for n in counts])["w"].item() == value


def test_integer_buffers_are_copied_and_nothing_is_shared() -> None:
    first = {"mean": torch.tensor([1.0]), "steps": torch.tensor(3)}
    mean = weighted_mean([(1, first), (1, {"mean": torch.tensor([2.0]), "steps": torch.tensor(9)})])
    assert (mean["mean"].tolist(), mean["steps"].item(), mean["steps"].dtype) == ([1.5], 3, torch.long)
    mean["steps"] += 1
    assert first["steps"] == 3


# --- rounds


@dataclass(frozen=True)
class Counting(Algorithm):
    """Counts at every client how often it took part, and at the server how often anybody did."""

    def init_server(self, weights: Tensors) -> Record:
        return {"seen": {"n": torch.zeros(1)}}

    def init_client(self, weights: Tensors) -> Record:
        return {"own": {"n": torch.zeros(1)}}

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        return CountingUpdate(task, state)

    def upload_form(self, weights: Tensors, server: Record, num_classes: int) -> Record:
        return {"own": server["seen"]}

    def aggregate(
        self, weights: Tensors, server: Record, results: Iterable[FitResult], context: RoundContext
    ) -> tuple[Tensors, Record]:
        uploads = [result.upload["own"]["n"] for result in results]
        return weights, {"seen": {"n": server["seen"]["n"] + len(uploads)}, "last": {"n": torch.cat(uploads)}}


class CountingUpdate(LocalUpdate):
    def correct(self, params: Tensors) -> None:
        for parameter in params.values():
            assert parameter.grad is not None
            parameter.grad.zero_()

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        assert torch.equal(flatten(weights), flatten(self.task.weights))  # the correction took the gradient away
        count = self.state["own"]["n"] + 1
        return {"own": {"n": count}}, {"own": {"n": count}}


def play(run: Experiment) -> list[ServerState]:
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    state = ServerState(0, weights, buffers, run.algorithm.init_server(weights))
    reports = Reports()
    with LocalBackend().open(run, ClientStates(Path("clients"))) as runner:
        Rounds(run, runner, Events(reports)).run(state)
    return [report.state for report in reports.all]


def test_states_live_in_one_file_a_client() -> None:
    run = experiment(algorithm=Counting(), client_fraction=0.5, rounds=4)
    states = play(run)
    assert states[-1].record["seen"]["n"].item() == 8
    participants = [sample_clients(4, 2, 0, number) for number in range(1, 5)]
    store = ClientStates(Path("clients"))
    for client in range(4):
        times = sum(client in chosen for chosen in participants)
        since = states[-1].clients.get(client, 0)
        assert since == max((number for number, chosen in enumerate(participants, 1) if client in chosen), default=0)
        assert times == (store.load(client, since)["own"]["n"].item() if since else 0)
    latest = [sum(client in chosen for chosen in participants) for client in participants[-1]]
    assert states[-1].record["last"]["n"].tolist() == latest


def test_a_state_may_share_tensors_and_belongs_to_its_client(tmp_path: Path) -> None:
    store, tensor = ClientStates(tmp_path / "clients"), torch.arange(3.0)
    store.save(1, 4, {"a": {"x": tensor}, "b": {"x": tensor, "y": tensor[1:]}})
    kept = store.load(1, 4)
    assert (kept["b"]["x"].tolist(), kept["b"]["y"].tolist()) == ([0, 1, 2], [1, 2])
    with pytest.raises(InputError, match="no file"):
        store.load(1, 3)
    (tmp_path / "clients" / "1-4.safetensors").rename(tmp_path / "clients" / "2-4.safetensors")
    with pytest.raises(InputError, match=r"the state of client 2 but .* is of {'client': 1"):
        store.load(2, 4)
    assert store.kept() == [(2, 4)]
    store.remove([(2, 4)])
    assert store.kept() == []


class Forgetting(Counting):
    """An algorithm whose clients clear their state every second time."""

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        return ForgettingUpdate(task, state)


class ForgettingUpdate(CountingUpdate):
    def report(self, weights: Tensors) -> tuple[Record, Record]:
        upload, state = super().report(weights)
        return upload, {} if self.state["own"]["n"] == 1 else state


def test_a_state_can_be_cleared() -> None:
    states = play(experiment(algorithm=Forgetting(), rounds=5))
    assert [set(state.clients.values()) for state in states] == [{1}, set(), {3}, set(), {5}]


def test_fits_leave_no_memory_behind() -> None:
    """What an algorithm held in a fit is gone with it, and does not wait for the garbage collector."""
    gone: list[weakref.ref[torch.Tensor]] = []

    class Holding(LocalUpdate):
        def begin(self, params: Tensors) -> None:
            self.large = torch.zeros(10)
            gone.append(weakref.ref(self.large))

    @dataclass(frozen=True)
    class Holder(FedAvg):
        def local(self, task: FitTask, state: Record) -> LocalUpdate:
            return Holding(task, state)

    run = experiment(algorithm=Holder())
    gc.disable()
    try:
        fit_client(Workspace(run), task_for(run), {})
        assert [reference() for reference in gone] == [None]
    finally:
        gc.enable()


def test_fedavg_leaves_no_states() -> None:
    play(experiment(rounds=1))
    assert not Path("clients").exists()


def test_batch_norm_statistics_are_averaged() -> None:
    run = experiment(backbone="helpers.batch_norm_net", rounds=1)
    (state,) = play(run)
    assert set(state.buffers) == {f"backbone.1.{n}" for n in ("running_mean", "running_var", "num_batches_tracked")}
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    fits = [fit_client(workspace, FitTask(client, 1, 0, weights, buffers), {})[0] for client in range(4)]
    total = sum(fit.num_examples for fit in fits)
    expected = sum(fit.num_examples / total * fit.buffers["backbone.1.running_mean"].double() for fit in fits)
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(state.buffers["backbone.1.running_mean"].double(), expected, atol=1e-7, rtol=1e-6)
    assert state.buffers["backbone.1.num_batches_tracked"] == fits[0].buffers["backbone.1.num_batches_tracked"]


@given(n=st.integers(1, 60), fraction=st.floats(0.01, 1), seed=st.integers(0, 99), number=st.integers(1, 500))
def test_sampling(n: int, fraction: float, seed: int, number: int) -> None:
    count = max(1, round(fraction * n))
    chosen = sample_clients(n, count, seed, number)
    assert len(chosen) == count
    assert chosen == sorted(set(chosen))
    assert all(0 <= client < n for client in chosen)
    assert chosen == sample_clients(n, count, seed, number)


def test_sampling_reaches_everybody() -> None:
    """Each of 10 clients in half of 200 rounds: 100 times, with a standard deviation of 7."""
    counts = torch.zeros(10)
    for number in range(1, 201):
        counts[sample_clients(10, 5, 0, number)] += 1
    assert ((counts - 100).abs() < 42).all()


# --- randomness and records


def test_seeds_differ_by_every_key() -> None:
    seeds = {derive_seed(s, p, r, c) for s in range(4) for p in ("a", "b") for r in range(12) for c in range(12)}
    assert len(seeds) == 4 * 2 * 12 * 12
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_isolated_randomness() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with isolated_randomness(0, "x"):
        torch.rand(7)
    assert torch.equal(torch.rand(1), expected)


def test_records_survive_and_damage_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    record = {"c": {"a.b": torch.randn(3), "n": torch.tensor(4)}, "h": {"a.b": torch.zeros(2, 2)}}
    save_record(file, record, {"about": "it"})
    back, metadata = load_record(file)
    assert metadata == {"about": "it"}
    assert {g: set(t) for g, t in back.items()} == {g: set(t) for g, t in record.items()}
    assert all(torch.equal(back[g][n], record[g][n]) for g in record for n in record[g])
    assert [path.name for path in tmp_path.glob("*x.safetensors*")] == ["x.safetensors"]
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(InputError, match=r"x\.safetensors cannot be read"):
        load_record(file)
    with pytest.raises(InputError, match="no file"):
        load_record(tmp_path / "y.safetensors")


def test_bytes_are_counted() -> None:
    table = torch.eye(2)
    task = FitTask(
        0,
        1,
        0,
        {"w": torch.zeros(3)},
        {"b": torch.zeros(2, dtype=torch.long)},
        {"c": {"w": table}},
        learned=targets(table),
    )
    assert task.num_bytes == 12 + 16 + 16 + 16
    assert FitResult(0, 1, 1, weights={"w": torch.zeros(3)}, upload={"c": {"w": table}}).num_bytes == 12 + 16
    assert digits().num_clients == 4
