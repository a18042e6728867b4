"""Bad clients do not enter a round; robust means."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import Lines, Reports, checkered, examples, experiment, finished
from jdfl_lightning import SCAFFOLD, FedAvg, FedProc, RobustFedAvg, TrainerOptions, algorithms, fit
from jdfl_lightning.algorithms import Algorithm, LocalUpdate
from jdfl_lightning.backends.local import LocalRunner
from jdfl_lightning.backends.worker import encode
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask, RoundContext
from jdfl_lightning.core.seeding import sample_clients
from jdfl_lightning.core.tensors import Record, Tensors, flatten, norm
from jdfl_lightning.federation.server import SitesBackend
from jdfl_lightning.server import screening
from jdfl_lightning.server.events import Events
from jdfl_lightning.server.rounds import Rounds
from jdfl_lightning.server.screening import Form, screened, why_not, without_outliers
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.storage.checkpoint import ClientStates
from jdfl_lightning.storage.weights import load_model
from jdfl_lightning.ui.display import PlainDisplay

NAN = float("nan")


class Refused(Reports):
    """Remembers who was refused, and every round's report."""

    def __init__(self) -> None:
        super().__init__()
        self.reports = self.all
        self.refusals: list[tuple[int, int, str]] = []

    def client_refused(self, round: int, client: int, reason: str) -> None:
        self.refusals.append((round, client, reason))


def play(tamper: Callable[[FitResult], FitResult | FitFailure], folder: str = "clients", **changes: Any) -> Refused:
    """Run rounds in which every answer passes through other hands."""

    class Tampering(LocalRunner):
        def fit(self, tasks: Any) -> Any:
            for result in super().fit(tasks):
                yield tamper(result) if isinstance(result, FitResult) else result

    run = experiment(supervision="base", **changes)
    workspace, journal = Workspace(run), Refused()
    weights, buffers = workspace.initial(1)
    state = ServerState(0, weights, buffers, run.algorithm.init_server(weights))
    Rounds(run, Tampering(workspace, ClientStates(Path(folder))), Events(journal)).run(state)
    return journal


def spoil(result: FitResult, change: Callable[[Tensors], Tensors], client: int = 1) -> FitResult:
    return replace(result, weights=change(result.weights)) if result.client == client else result


def upload(result: FitResult, change: Callable[[Tensors], Tensors], group: str = "c_moved") -> FitResult:
    return replace(result, upload={group: change(result.upload["c_moved"])}) if result.client == 1 else result


def scaled(weights: Tensors, factor: float) -> Tensors:
    return {name: tensor * factor for name, tensor in weights.items()}


BAD: dict[str, tuple[Callable[[FitResult], FitResult | FitFailure], str]] = {
    "nan": (lambda r: spoil(r, lambda w: scaled(w, NAN)), "not finite"),
    "infinite": (lambda r: spoil(r, lambda w: {**w, "head.bias": w["head.bias"] / 0}), "not finite"),
    "a missing name": (lambda r: spoil(r, lambda w: {n: t for n, t in w.items() if n != "head.bias"}), "head.bias"),
    "a name that is no name": (lambda r: spoil(r, lambda w: {**w, "\x1b[2J": torch.zeros(1)}), r"names .*: \[2J$"),
    "a foreign name": (lambda r: spoil(r, lambda w: {**w, "virus": torch.zeros(1)}), "virus"),
    "another shape": (lambda r: spoil(r, lambda w: {**w, "head.bias": torch.zeros(3)}), r"\(3,\) .* not \(10,\)"),
    "another type": (lambda r: spoil(r, lambda w: {n: t.long() for n, t in w.items()}), "int64"),
    "half the precision": (
        lambda r: spoil(r, lambda w: {n: t.half() for n, t in w.items()}),
        "float16 and not .*float32",
    ),
    "complex numbers": (lambda r: spoil(r, lambda w: {n: t.to(torch.complex64) for n, t in w.items()}), "complex64"),
    "no examples": (lambda r: replace(r, num_examples=0) if r.client == 1 else r, "counts for nothing"),
    "a nan weight": (lambda r: replace(r, weight=NAN) if r.client == 1 else r, "counts for nothing"),
    "a nan upload": (lambda r: upload(r, lambda c: scaled(c, NAN)), "not finite"),
    "no upload": (lambda r: replace(r, upload={}) if r.client == 1 else r, "other uploads than were declared"),
    "another upload": (lambda r: upload(r, lambda c: {}, group="c"), "other uploads than were declared: upload 'c'"),
    "a complex upload": (lambda r: upload(r, lambda c: {n: t.to(torch.complex64) for n, t in c.items()}), "complex64"),
    "an upload of integers": (lambda r: upload(r, lambda c: {n: t.long() for n, t in c.items()}), "int64"),
    "an upload of another shape": (lambda r: upload(r, lambda c: {n: t[None] for n, t in c.items()}), r"\(1, "),
    "an upload of other names": (lambda r: upload(r, lambda c: {f"{n}x": t for n, t in c.items()}), "other names"),
    "no answer": (lambda r: FitFailure(1, "the power is out") if r.client == 1 else r, "the power is out"),
}


@pytest.fixture(scope="module")
def absent(tmp_path_factory: pytest.TempPathFactory) -> Refused:
    """Two rounds in which client 1 does not answer."""
    folder = str(tmp_path_factory.mktemp("absent"))
    return play(lambda r: FitFailure(1, "") if r.client == 1 else r, folder, algorithm=SCAFFOLD(), rounds=2)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_does_not_enter(kind: str, absent: Refused) -> None:
    """It is named, the round is that of the others, and the client's state stays what it was."""
    tamper, reason = BAD[kind]
    journal = play(tamper, algorithm=SCAFFOLD(), rounds=2)
    assert [(round, client) for round, client, _ in journal.refusals] == [(1, 1), (2, 1)]
    assert re.search(reason, journal.refusals[0][2])
    assert [report.metrics["refused"] for report in journal.reports] == [1, 1]
    assert journal.reports[-1].state.clients == {0: 2, 2: 2, 3: 2}
    for ours, theirs in zip(journal.reports, absent.reports, strict=True):
        assert torch.equal(flatten(ours.state.weights), flatten(theirs.state.weights))
        assert torch.equal(flatten(ours.state.record["c"]), flatten(theirs.state.record["c"]))


def test_an_absurd_length_is_refused() -> None:
    big: Callable[[FitResult], FitResult] = lambda r: spoil(r, lambda w: scaled(w, 50.0))  # noqa: E731
    journal = play(big, max_update_norm=5.0, rounds=1)
    assert [client for _, client, _ in journal.refusals] == [1]
    assert "beyond 5 medians" in journal.refusals[0][2]
    assert not play(big, folder="other", rounds=1).refusals


def test_an_absurd_upload_is_refused() -> None:
    """Its weights are as long as others'; the variate that it uploads is not."""
    big: Callable[[FitResult], FitResult] = lambda r: upload(r, lambda c: scaled(c, 1e30))  # noqa: E731
    journal = play(big, max_update_norm=5.0, rounds=1, algorithm=SCAFFOLD())
    assert [client for _, client, _ in journal.refusals] == [1]
    assert re.search(r"length of its upload 'c_moved' is .*e\+\d\d, beyond 5 medians", journal.refusals[0][2])
    assert not play(lambda r: r, folder="other", rounds=1, max_update_norm=5.0, algorithm=SCAFFOLD()).refusals


def test_the_first_client_does_not_say_what_an_upload_is() -> None:
    lie: Callable[[FitResult], FitResult] = lambda r: replace(r, upload={"x": {}}) if r.client == 0 else r  # noqa: E731
    journal = play(lie, algorithm=SCAFFOLD(), rounds=1)
    assert [client for _, client, _ in journal.refusals] == [0]


def test_fedproc_refuses_sums_that_no_images_have() -> None:
    def boast(result: FitResult, **changes: float) -> FitResult:
        features = {name: tensor * changes.get(name, 1.0) for name, tensor in result.upload["features"].items()}
        return replace(result, upload={"features": features}) if result.client == 0 else result

    for number, lie in enumerate(({"sums": 1e9}, {"counts": -1.0}, {"counts": 0.0})):
        journal = play(lambda r, lie=lie: boast(r, **lie), folder=f"{number}", algorithm=FedProc(), rounds=1)  # type: ignore[misc]
        assert [(client, "sums of features" in reason) for _, client, reason in journal.refusals] == [(0, True)]
    assert not play(boast, folder="honest", algorithm=FedProc(), rounds=2).refusals


@pytest.mark.parametrize(
    ("name", "precision"),
    checkered(("SCAFFOLD", "FedDC", "FedProc", "FedAvg"), ("64-true", "bf16-true", "16-true", "bf16-mixed")),
)
def test_what_is_declared_is_what_clients_send(name: str, precision: str) -> None:
    """In every round, for clients that come again and such that come later, whatever types there are by then."""
    algorithm = getattr(algorithms, name)()
    options = TrainerOptions(precision=precision)  # type: ignore[arg-type]
    net = "helpers.batch_norm_net"
    journal = play(lambda r: r, algorithm=algorithm, trainer=options, backbone=net, rounds=4, client_fraction=0.5)
    assert [report.metrics["refused"] for report in journal.reports] == [0] * 4


@dataclass(frozen=True)
class Undeclared(SCAFFOLD):
    """SCAFFOLD as it would be without a declaration."""

    def upload_form(self, weights: Tensors, server: Record, num_classes: int) -> Record:
        return FedAvg.upload_form(self, weights, server, num_classes)


def test_an_upload_that_nobody_declared_is_an_error() -> None:
    """It is the algorithm's mistake and told at the first answer; in a federation it may be a workspace's lie."""
    with pytest.raises(InputError, match=r"Expected Undeclared.upload_form to declare .* client 0 uploads 'c_moved'"):
        play(lambda r: r, algorithm=Undeclared())
    lie: Callable[[FitResult], FitResult] = lambda r: replace(r, upload={"x": {}}) if r.client == 0 else r  # noqa: E731
    journal = play(lie, folder="sites", rounds=1, backend=SitesBackend())
    assert [client for _, client, _ in journal.refusals] == [0]


@dataclass(frozen=True)
class Puzzled(SCAFFOLD):
    """SCAFFOLD that cannot say of an upload of ones what is wrong with it."""

    def reason_unusable(self, upload: Record) -> str | None:
        if float(upload["c_moved"]["head.bias"].sum()) == 10:
            raise ZeroDivisionError("who divides by this?")
        return None


def test_an_upload_at_which_the_algorithm_raises_is_refused() -> None:
    odd: Callable[[FitResult], FitResult] = lambda r: upload(r, lambda c: {n: t * 0 + 1 for n, t in c.items()})  # noqa: E731
    journal = play(odd, algorithm=Puzzled(), rounds=1)
    reason = "Puzzled.reason_unusable raised ZeroDivisionError('who divides by this?')"
    assert journal.refusals == [(1, 1, reason)]


@dataclass(frozen=True)
class Mistaken(FedAvg):
    """FedAvg with a mistake in its server half."""

    def aggregate(self, *args: Any) -> Any:
        return super().aggregate(*args)[2]  # type: ignore[misc]


def test_a_mistake_in_aggregate_is_shown_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"Mistaken could not aggregate round 1: IndexError: tuple index") as caught:
        fit(experiment(supervision="base", algorithm=Mistaken(), run_dir="run"), PlainDisplay())
    assert isinstance(caught.value.__cause__, IndexError)
    said = capsys.readouterr().out
    assert said.count("return super().aggregate(*args)[2]") == 1
    assert said.count("Traceback") == 1


def test_an_error_of_the_backend_is_not_the_algorithms() -> None:
    def fail(result: FitResult) -> FitResult:
        if result.client == 2:
            raise ConnectionError("the cluster is gone")
        return result

    with pytest.raises(ConnectionError, match="the cluster is gone"):
        play(fail, rounds=1)


class Meddling(LocalUpdate):
    """Client 1 changes, after its fit, what it was not asked to train."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.task.client == 1:
            for name, tensor in (*pl_module.named_parameters(), *pl_module.named_buffers()):
                if name.endswith("num_batches_tracked"):
                    tensor.data += -1000 if self.task.round == 1 else 2**40
                elif isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
                    tensor.data += 1


@dataclass(frozen=True)
class Meddled(FedAvg):
    """FedAvg with such a client."""

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        return Meddling(task, state)


@pytest.mark.parametrize(
    ("backbone", "reason"),
    [("frozen_net", r"its backbone.0.0.\w+ in buffers is not what it was sent"), ("batch_norm_net", "smaller than")],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_what_is_not_trained_cannot_be_changed(backbone: str, reason: str, precision: Any) -> None:
    """Frozen parameters stay, and batches are counted upwards and no faster than anybody can."""
    net, trainer = f"helpers.{backbone}", TrainerOptions(precision=precision)
    said = Lines()
    run = experiment(supervision="base", algorithm=Meddled(), backbone=net, trainer=trainer, run_dir="run")
    fit(run, said)
    refusals = [line for line in said.said if "does not count" in line]
    assert [line.partition(" does")[0] for line in refusals] == ["round 1: client 1", "round 2: client 1"]
    assert all(re.search(reason, line) for line in refusals)
    model, before = load_model(Path("run"), "last"), Workspace(run).initial(1)[1]
    if backbone == "frozen_net":
        for name, tensor in model.buffers.items():
            assert torch.equal(tensor, before[name].to(tensor.dtype))
    else:
        batches = math.ceil(run.data.client_sizes[0] / run.batch_size)
        assert model.buffers["backbone.1.num_batches_tracked"] == 2 * batches


@given(lengths=st.lists(st.floats(0, 1e6), min_size=0, max_size=9), multiple=st.floats(1, 10))
def test_outliers(lengths: list[float], multiple: float) -> None:
    """Kept in order: exactly those within the multiple of the median; never fewer than half."""
    zero = {"w": torch.zeros(1, dtype=torch.float64)}
    results = [FitResult(i, 1, 1, weights={"w": torch.tensor([x], dtype=torch.float64)}) for i, x in enumerate(lengths)]
    refused: list[int] = []
    kept = [r.client for r in without_outliers(iter(results), zero, multiple, lambda client, _: refused.append(client))]
    assert sorted(kept + refused) == list(range(len(lengths)))
    assert kept == sorted(kept)
    assert 2 * len(kept) >= len(lengths)
    if kept and refused:
        assert max(lengths[i] for i in kept) <= min(lengths[i] for i in refused)


def test_answers_wait_without_what_they_are_views_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of a stack are its rows: each is kept with its own numbers, not with all."""
    rows, sizes = torch.rand(50, 1000), list[int]()

    def counted(result: FitResult) -> bytes:
        content = encode(result)
        sizes.append(len(content))
        return content

    results = [FitResult(i, 1, 1, weights={"w": row}) for i, row in enumerate(rows)]
    monkeypatch.setattr(screening, "encode", counted)
    kept = list(without_outliers(iter(results), {"w": torch.zeros(1000)}, 3.0, lambda *refused: None))
    assert all(torch.equal(result.weights["w"], row) for result, row in zip(kept, rows, strict=True))
    assert len(sizes) == 50
    assert max(sizes) < 6000


def test_a_group_of_which_most_sent_nothing_is_measured_by_the_others() -> None:
    """Lengths 0, 0, 0, 1, 2, 9: no multiple of 0 is a limit; that of the median of 1, 2 and 9 is."""
    zero = {"w": torch.zeros(1)}
    uploads = [{"n": {"x": torch.tensor(x)}} for x in (0, 0, 0, 1, 2, 9)]
    results = [FitResult(i, 1, 1, weights=zero, upload=each) for i, each in enumerate(uploads)]
    refused: dict[int, str] = {}
    kept = [result.client for result in without_outliers(iter(results), zero, 3.0, refused.__setitem__)]
    assert kept == [0, 1, 2, 3, 4]
    assert refused == {5: "the length of its upload 'n' is 9, beyond 3 medians (6)"}


ALGORITHMS = [getattr(algorithms, name)() for name in algorithms.__all__ if name not in ("Algorithm", "LocalUpdate")]
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
SENT = FitTask(
    0,
    1,
    0,
    {"body": torch.zeros(2), "head.weight": torch.zeros(6, 3), "head.bias": torch.zeros(6)},
    {"mean": torch.zeros(2), "steps": torch.tensor(0)},
)


def forms(algorithm: Algorithm) -> tuple[FitTask, Form]:
    """A task of two classes and three pseudo-domains, and what has to be answered."""
    task = replace(SENT, server=algorithm.broadcast(algorithm.init_server(SENT.weights)))
    return task, Form.of(algorithm, task, num_classes=2)


def filled(tensors: Tensors, value: float) -> Tensors:
    return {name: torch.full(tensor.shape, value, dtype=tensor.dtype) for name, tensor in tensors.items()}


def honest(form: Form, client: int, value: float) -> FitResult:
    upload = {group: filled(tensors, value) for group, tensors in form.upload.items()}
    if "features" in upload:
        upload["features"]["sums"] *= 0.5  # three entries of a half: shorter than 1
    return FitResult(client, 5, 1, 1.0, filled(form.weights, value), filled(form.buffers, value), upload)


@examples(60)
@given(st.data())
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_malformed_answers_are_refused_and_nothing_is_raised(algorithm: Algorithm, data: st.DataObject) -> None:
    """One change to an honest answer, anywhere: it is refused, for a reason in one line, and the rest is aggregated."""
    task, form = forms(algorithm)
    bad = honest(form, 0, 1.0)
    groups = {"weights": bad.weights, "buffers": bad.buffers, **bad.upload}
    group = data.draw(st.sampled_from(sorted(groups)))
    name = data.draw(st.sampled_from(sorted(groups[group])))
    tensor = groups[group][name]
    kind = data.draw(st.sampled_from(["drop", "add", "rename", "type", "shape", "value", "drop group", "add group"]))
    text = data.draw(st.text(max_size=400).filter(lambda text: text not in groups[group] and text not in groups))
    if kind == "drop":
        del groups[group][name]
    elif kind == "add":
        groups[group][text] = tensor
    elif kind == "rename":
        groups[group][text] = groups[group].pop(name)
    elif kind == "type":
        groups[group][name] = tensor.to(data.draw(st.sampled_from([t for t in TYPES if t != tensor.dtype])))
    elif kind == "shape":
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3).filter(lambda s: tuple(s) != tuple(tensor.shape)))
        groups[group][name] = torch.ones(shape, dtype=tensor.dtype)
    elif kind == "value":
        floats = [(g, n) for g, tensors in groups.items() for n, t in tensors.items() if t.is_floating_point()]
        group, name = data.draw(st.sampled_from(sorted(floats)))
        groups[group][name].view(-1)[-1] = data.draw(st.sampled_from([NAN, math.inf, -math.inf]))
    elif kind == "drop group" and bad.upload:
        bad.upload.pop(data.draw(st.sampled_from(sorted(bad.upload))))
    else:
        bad.upload[text] = {"x": torch.ones(1)}
    refused: list[str] = []
    answers: list[FitResult | FitFailure] = [bad, honest(form, 1, 1.0), FitFailure(2, "asleep"), honest(form, 3, 0.5)]
    kept = list(screened(iter(answers), form, algorithm, lambda _, reason: refused.append(reason), trusted=False))
    assert [result.client for result in kept] == [1, 3]
    assert len(refused) == 2
    assert refused[0].isprintable()
    assert 0 < len(refused[0]) < 600
    weights, record = algorithm.aggregate(
        task.weights, algorithm.init_server(task.weights), iter(kept), RoundContext(1, 4, 4)
    )
    assert set(weights) == set(task.weights)
    assert all(math.isfinite(norm(tensors)) for tensors in (weights, *record.values()))


@examples(80)
@given(st.data())
def test_fuzzed_answers(data: st.DataObject) -> None:
    """Whatever a client sends: it enters, being finite and of the right form, or is refused; nothing is raised."""
    sent = {"a": torch.zeros(2), "b": torch.zeros(1, 3)}
    form = Form(sent, {}, {})
    numbers = st.floats(width=32)
    shapes = st.sampled_from([(2,), (1, 3), (), (0,), (3, 1)])
    tensors = st.builds(lambda shape, x: torch.full(shape, x), shapes, numbers)
    weights = data.draw(st.dictionaries(st.sampled_from(["a", "b", "c", ""]), tensors))
    result = FitResult(0, data.draw(st.integers(-2, 5)), 1, data.draw(st.floats()), weights)
    refused: list[str] = []
    kept = list(screened(iter([result]), form, FedAvg(), lambda _, reason: refused.append(reason)))
    right = set(weights) == {"a", "b"} and all(weights[name].shape == sent[name].shape for name in weights)
    fine = right and all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    fine = fine and result.num_examples > 0 and math.isfinite(result.weight) and result.weight > 0
    assert (len(kept), len(refused)) == ((1, 0) if fine else (0, 1))
    assert why_not(FitResult(0, 1, 1, weights=dict(sent)), form) is None


def test_too_few_answers_make_a_round_void() -> None:
    """3 of 4 refused in the first attempt: the round is repeated with others drawn, in other batches."""
    seen: list[tuple[int, int]] = []

    def tamper(result: FitResult) -> FitResult | FitFailure:
        seen.append((len(seen) // 2, result.client))
        return FitFailure(result.client, "asleep") if len(seen) <= 2 else result

    journal = play(tamper, rounds=1, client_fraction=0.5, min_clients=2)
    first, second = sample_clients(4, 2, 0, 1), sample_clients(4, 2, 0, 1, attempt=1)
    assert [client for _, client in seen] == first + second
    (report,) = journal.reports
    assert (report.metrics["clients"], report.metrics["refused"]) == (2, 0)
    again = play(lambda r: r, folder="other", rounds=1, client_fraction=0.5, min_clients=2)
    assert not torch.equal(flatten(report.state.weights), flatten(again.reports[0].state.weights))
    with pytest.raises(InputError, match=r"at least 2 of 2 clients .* 3 attempts were void. Client \d: asleep"):
        play(lambda r: FitFailure(r.client, "asleep"), rounds=1, client_fraction=0.5, min_clients=2)


@dataclass(frozen=True)
class Unlucky(FedAvg):
    """FedAvg whose clients raise while there is a file named after them."""

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        file = Path(f"client{task.client}")
        if file.exists():
            left = int(file.read_text()) - 1
            file.write_text(str(left)) if left else file.unlink()
            raise RuntimeError("bad luck")
        return super().local(task, state)


def test_a_client_that_raises_is_tried_again_and_then_absent() -> None:
    Path("client2").write_text("1")
    once = fit(experiment(algorithm=Unlucky(), supervision="base", run_dir="once", rounds=1))
    plain = finished("plain", supervision="base", rounds=1)
    assert (once.last["refused"], once.last["test/acc"]) == (0, plain.last["test/acc"])
    Path("client2").write_text("2")
    twice = fit(experiment(algorithm=Unlucky(), supervision="base", run_dir="twice", rounds=1))
    assert (twice.last["clients"], twice.last["refused"]) == (3, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_update_norm": 0.5}, "--max_update_norm"),
        ({"min_clients": 0}, "--min_clients"),
        ({"min_clients": 5}, "between 1 and the 4 clients of a round"),
    ],
)
def test_bad_limits(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        experiment(**change)


# --- robust means


FIVE = RoundContext(number=1, num_clients=5, asked=5)


def answers(rows: list[list[float]]) -> list[FitResult]:
    return [FitResult(i, 1 + i, 1, weights={"w": torch.tensor(row)}) for i, row in enumerate(rows)]


def test_robust_means_by_hand() -> None:
    """Coordinates of five clients; the number of samples does not count."""
    rows = [[1.0, 9.0], [2.0, 8.0], [3.0, -1e9], [4.0, 6.0], [1e9, 5.0]]
    zero = {"w": torch.zeros(2)}
    median = RobustFedAvg().aggregate(zero, {}, answers(rows), FIVE)[0]["w"]
    assert median.tolist() == [3.0, 6.0]
    assert RobustFedAvg().aggregate(zero, {}, answers(rows[:4]), FIVE)[0]["w"].tolist() == [2.5, 7.0]
    assert RobustFedAvg(rule="trimmed_mean").aggregate(zero, {}, answers(rows), FIVE)[0]["w"][0] == 3  # one at least
    trimmed = RobustFedAvg(rule="trimmed_mean", trim=0.2).aggregate(zero, {}, answers(rows), FIVE)[0]["w"]
    torch.testing.assert_close(trimmed, torch.tensor([3.0, 19 / 3]))
    mean = RobustFedAvg(rule="trimmed_mean", trim=0.0).aggregate(zero, {}, answers(rows[:2]), FIVE)[0]["w"]
    assert mean.tolist() == [1.5, 8.5]
    with pytest.raises(InputError, match=r"--algorithm\.trim"):
        RobustFedAvg(trim=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_robust_means_are_those_of_torch_to_the_bit(count: int, dtype: torch.dtype) -> None:
    """The middle one or two, or all but a tenth at either end, of what torch has sorted; many are equal."""
    values = torch.randn(count, 3, 50, generator=torch.Generator().manual_seed(count)).mul(4).to(dtype)
    values[:, 0] = values[:, 0].round()
    results = [FitResult(i, 1, 1, weights={"w": value}) for i, value in enumerate(values)]
    ordered = values.sort(dim=0).values.double()
    cuts = {"median": (count - 1) // 2, "trimmed_mean": {1: 0, 2: 0, 7: 1, 40: 4}[count]}
    for rule, cut in cuts.items():
        found = RobustFedAvg(rule=rule).aggregate({"w": values[0]}, {}, results, FIVE)[0]["w"]  # type: ignore[arg-type]
        expected = ordered[cut : count - cut].mean(dim=0).to(dtype)
        assert found.dtype == dtype
        assert torch.equal(found, expected)


@given(
    honest=st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=9),
    bad=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=2),
)
def test_a_minority_cannot_move_the_median_out_of_the_honest_range(honest: list[float], bad: list[float]) -> None:
    median = (
        RobustFedAvg().aggregate({"w": torch.zeros(1)}, {}, answers([[x] for x in honest + bad]), FIVE)[0]["w"].item()
    )
    assert min(honest) <= median <= max(honest)


# --- nothing piles up


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
def test_files_are_closed_after_fits() -> None:
    run = experiment(algorithm=SCAFFOLD(), supervision="base", rounds=1)
    fit(replace(run, run_dir="first"))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - as many as there are
    for name in ("second", "third"):
        fit(replace(run, run_dir=name, rounds=3))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
