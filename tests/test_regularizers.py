"""Balance and prototype: values, gradients, limits, the server's side, runs, and use in a plain Lightning project."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers import contents, experiment, finished
from jdfl_lightning import Agreement, Balance, JointHead, JointModule, PrivateFedAvg, Prototype, TargetRule, algorithms
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import UNKNOWN, FitResult, RoundContext
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.regularizers import Regularizer, Step
from jdfl_lightning.regularizers.balance import BalanceTerm
from jdfl_lightning.regularizers.prototype import PrototypeTerm, prototype_distance
from jdfl_lightning.supervision import ClientSums, RoundInfo


def step(m: int, c: int, seed: int = 0, dtype: torch.dtype = torch.float64, count: int = 6) -> Step:
    generator = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(count, m * c, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    features = torch.randn(count, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(c, (count,), generator=generator)
    return Step(JointHead(5, c, m), logits, features, labels, torch.full((count, m), 1 / m))


def info() -> RoundInfo:
    return RoundInfo(1, 5, torch.zeros(2, 3))


# balance


@given(seed=st.integers(0, 10_000), m=st.integers(1, 5), c=st.integers(1, 4))
def test_balance_written_out(seed: int, m: int, c: int) -> None:
    """M times the mean over the batch of sum_m u_{y,m} softmax_m l_{m,y}; 1 where the use is even."""
    given_step = step(m, c, seed)
    use = torch.rand(c, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.01
    use = use / use.sum(dim=1, keepdim=True)
    expected = 0.0
    for logits, label in zip(given_step.logits.detach(), given_step.labels.tolist(), strict=True):
        shares = torch.stack([logits[k * c + label] for k in range(m)]).softmax(dim=0)
        expected += m * float((use[label] * shares).sum()) / len(given_step.labels)
    term = BalanceTerm(1.0, use)
    assert float(term(given_step).detach()) == pytest.approx(expected, rel=1e-6)
    even = BalanceTerm(1.0, torch.full((c, m), 1 / m))
    assert float(even(given_step).detach()) == pytest.approx(1, abs=1e-6)
    (gradient,) = torch.autograd.grad(even(given_step), given_step.logits)
    assert float(gradient.abs().max()) < 1e-8
    assert float(term.collect()["sums"].sum()) == pytest.approx(1)


def test_gradient_of_balance() -> None:
    """Against finite differences; it falls on the outputs that are used most."""
    labels = torch.tensor([0, 1])
    term = BalanceTerm(1.0, torch.tensor([[0.75, 0.25], [0.5, 0.5]])).double()
    logits = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)

    def value(x: Tensor) -> Tensor:
        found: Tensor = term(Step(JointHead(5, 2, 2), x, torch.zeros(2, 5), labels, torch.zeros(2, 2)))
        return found

    assert torch.autograd.gradcheck(value, logits)
    (gradient,) = torch.autograd.grad(value(logits), logits)
    assert float(gradient[0, 0]) > 0 > float(gradient[0, 2])
    assert not gradient[:, [1, 3]][0].any()  # not of the first sample's class


def test_the_use_by_hand() -> None:
    """rate = 0.25; 100 images of class 0 with shares (0.8, 0.2) and 300 with (0.4, 0.6): (0.5, 0.5).

    Class 1: 100 images, (1, 0): 0.75 * 0.5 + 0.25 * 1 = 0.625. Class 2 is never seen.
    """
    balance = Balance(rate=0.25)
    record = balance.init(2, 3, 7)
    first = torch.tensor([[0.4, 0.1], [0.5, 0.0], [0.0, 0.0]]).double()  # 200 images, half of each class
    second = torch.tensor([[0.4, 0.6], [0.0, 0.0], [0.0, 0.0]]).double()
    answers = [ClientSums(0, 200, {"sums": first}), ClientSums(UNKNOWN, 300, {"sums": second})]
    use = balance.update(record, answers)["use"]
    torch.testing.assert_close(use, torch.tensor([[0.5, 0.5], [0.625, 0.375], [0.5, 0.5]]).double())
    assert torch.equal(balance.update({"use": use}, [])["use"], use)


# prototype


def test_prototype_written_out() -> None:
    """The squared distance of (3, 4) / 5 to (1, 0) is 0.16 + 0.64; class 1 was never seen and does not count."""
    features = torch.tensor([[3.0, 4.0], [1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    means, seen = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double(), torch.tensor([True, False])
    value = prototype_distance(features, means, seen, torch.tensor([0, 1]))
    assert float(value.detach()) == pytest.approx(0.8)
    (gradient,) = torch.autograd.grad(value, features)
    assert gradient[0].any()
    assert not gradient[1].any()
    assert float(prototype_distance(features, means, torch.tensor([False, False]), torch.tensor([0, 1]))) == 0
    assert torch.autograd.gradcheck(lambda x: prototype_distance(x, means, seen, torch.tensor([0, 1])), features)


def test_prototypes_by_hand() -> None:
    """The plain mean over pseudo-domains, whatever their sizes; what is absent stays.

    Class 0: pseudo-domain 0 has 10 samples with the mean (0.8, 0), 1 has one with (0, 0.6): (0.4, 0.3). Class 1 is in
    pseudo-domain 1 alone. Class 2 is never seen. In the next round pseudo-domain 0 has (0.2, 0) for class 0.
    """
    prototype = Prototype()
    record = prototype.init(2, 3, 2)
    assert not prototype.broadcast(record, info())["seen"].any()
    none = [0.0, 0.0]
    first = {"sums": torch.tensor([[8.0, 0.0], none, none]).double(), "counts": torch.tensor([10.0, 0, 0]).double()}
    second = {"sums": torch.tensor([[0, 0.6], [0, 1.0], none]).double(), "counts": torch.tensor([1.0, 2, 0]).double()}
    third = {"sums": torch.tensor([[9.0, 9.0]] * 3).double(), "counts": torch.tensor([99.0] * 3).double()}
    answers = [ClientSums(0, 10, first), ClientSums(1, 3, second), ClientSums(UNKNOWN, 297, third)]
    record = prototype.update(record, answers)
    sent = prototype.broadcast(record, info())
    torch.testing.assert_close(sent["means"], torch.tensor([[0.4, 0.3], [0.0, 0.5], none]))
    assert sent["seen"].tolist() == [True, True, False]
    later = {"sums": torch.tensor([[2.0, 0.0], none, none]).double(), "counts": torch.tensor([10.0, 0, 0]).double()}
    sent = prototype.broadcast(prototype.update(record, [ClientSums(0, 5, later)]), info())  # it has only 5 images
    torch.testing.assert_close(sent["means"], torch.tensor([[0.1, 0.3], [0.0, 0.5], none]))


@given(seed=st.integers(0, 10_000), m=st.integers(2, 4), each=st.integers(1, 5))
def test_with_equal_counts_they_are_the_prototypes_of_fedproc(seed: int, m: int, each: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sums = torch.nn.functional.normalize(torch.randn(m, 3, 4, generator=generator).double(), dim=2) * each
    uploads = [{"sums": one, "counts": torch.full((3,), float(each)).double()} for one in sums]
    results = [
        FitResult(client, 3 * each, 1, weights={"w": torch.zeros(1)}, upload={"features": upload})
        for client, upload in enumerate(uploads)
    ]
    context = RoundContext(1, m, m)
    _, server = algorithms.FedProc().aggregate({"w": torch.zeros(1)}, {}, iter(results), context)
    prototype = Prototype()
    answers = [ClientSums(domain, 3 * each, upload) for domain, upload in enumerate(uploads)]
    sent = prototype.broadcast(prototype.update(prototype.init(m, 3, 4), answers), info())
    torch.testing.assert_close(sent["means"], server["prototypes"]["means"].float())


# all of them


@pytest.mark.parametrize("part", [Balance(), Prototype(), Agreement()])
def test_a_single_pseudo_domain_has_no_gradient(part: Regularizer) -> None:
    given_step = step(1, 4)
    sent = part.broadcast(part.init(1, 4, 5), info())
    value = part.term(sent)(given_step)
    for leaf in (given_step.logits, given_step.features):
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value, leaf, retain_graph=True, allow_unused=True)
            assert gradient is None or not gradient.any()


@pytest.mark.parametrize("part", [Balance(), Prototype(), Agreement()])
def test_half_precision(part: Regularizer) -> None:
    """The value of bf16 tensors is that of the same numbers in single precision."""
    half = step(3, 4, dtype=torch.bfloat16)
    full = Step(half.head, half.logits.float(), half.features.float(), half.labels, half.weights)
    record = part.init(3, 4, 5)
    if "seen" in record:
        record = {"means": torch.randn(3, 4, 5), "seen": torch.ones(3, 4, dtype=torch.bool)}
    sent = part.broadcast(record, info())
    found = part.term(sent)(half)
    assert found.dtype == torch.float32
    assert float(found.detach()) == pytest.approx(float(part.term(sent)(full).detach()), rel=1e-6)


def test_weight_0_changes_no_bit() -> None:
    finished("without", supervision="graded")
    finished("with", supervision="graded", regularizers=[Balance(0.0), Prototype(0.0), Agreement(0.0)])
    assert contents("without")["last.safetensors"] == contents("with")["last.safetensors"]


def test_another_weight_changes_bits() -> None:
    """From the second round on: before the first there are no prototypes, and an even use is constant."""
    for rounds in (1, 2):
        finished(f"without{rounds}", supervision="graded", rounds=rounds)
        finished(f"prototype{rounds}", supervision="graded", rounds=rounds, regularizers=[Prototype(1.0)])
    finished("balance2", supervision="graded", regularizers=[Balance(1.0)])
    one, none, two, prototype, balance = (
        contents(name)["last.safetensors"] for name in ("without1", "prototype1", "without2", "prototype2", "balance2")
    )
    assert one == none
    assert two not in (prototype, balance)


@pytest.mark.parametrize("name", ["FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON", "RobustFedAvg"])
def test_they_work_with_every_algorithm(name: str) -> None:
    rule = getattr(algorithms, name)()
    supervision = "online" if name in ("SCAFFOLD", "FedProc") else "em"
    parts = [Balance(0.1), Prototype(0.1), Agreement(0.1)]
    run = finished("run", algorithm=rule, supervision=supervision, regularizers=parts, client_fraction=0.75)
    assert [row["refused"] for row in run.rows] == [0, 0]


def test_what_crosses_is_counted() -> None:
    """Balance: C x M doubles both ways. Prototype: C x F doubles and C counts up; C x F singles and C flags down."""
    plain = finished("plain", supervision="graded", rounds=1).rows[0]
    row = finished("both", supervision="graded", rounds=1, regularizers=[Balance(), Prototype()]).rows[0]
    features = 12
    assert row["bytes/up"] - plain["bytes/up"] == 4 * 8 * (10 * 3 + 10 * features + 10)
    assert row["bytes/down"] - plain["bytes/down"] == 4 * (8 * 10 * 3 + 4 * 10 * features + 10)


def test_a_private_run_refuses_those_that_send() -> None:
    common: dict[str, Any] = {"algorithm": PrivateFedAvg(), "supervision": "base"}
    assert experiment(regularizers=[Agreement()], **common).regularizers == [Agreement()]
    for part in (Balance(), Prototype()):
        with pytest.raises(InputError, match=rf"--regularizers to be .* but got \['{type(part).__name__}'\]"):
            experiment(regularizers=[Agreement(), part], **common)


@pytest.mark.parametrize(
    ("part", "sums"),
    [
        (Balance(), {"sums": torch.tensor([[0.5, 0.6]])}),
        (Balance(), {"sums": torch.tensor([[-0.5, 1.5]])}),
        (Prototype(), {"sums": torch.tensor([[3.0, 4.0]]), "counts": torch.tensor([4.0])}),
        (Prototype(), {"sums": torch.tensor([[0.0, 0.0]]), "counts": torch.tensor([-1.0])}),
    ],
)
def test_impossible_sums_are_refused(part: Regularizer, sums: Tensors) -> None:
    assert part.reason_unusable(sums) is not None


def test_bad_settings() -> None:
    with pytest.raises(InputError, match=r"Expected --regularizers\.rate to be above 0 and at most 1"):
        Balance(rate=0.0)


def test_in_a_plain_project() -> None:
    """A Trainer of one's own: terms are modules, and what they collect gives the terms of the next fit."""
    m, c, f = 2, 3, 4
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(30, 3, 2, 2, generator=generator), torch.arange(30) % c
    loader = DataLoader(TensorDataset(images, labels, torch.arange(30) % m), batch_size=10)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(12, f))
    parts: list[Regularizer] = [Balance(0.1), Prototype(0.1), Agreement(0.1)]
    records = [part.init(m, c, f) for part in parts]
    for _ in range(2):
        terms = [part.term(part.broadcast(record, info())) for part, record in zip(parts, records, strict=True)]
        module = JointModule(backbone, f, c, TargetRule(torch.eye(m)), regularizers=terms)
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        pl.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **options).fit(module, loader, loader)
        sums = [term.collect() for term in terms]
        records = [
            part.update(record, [ClientSums(0, 30, one)]) if one else record
            for part, record, one in zip(parts, records, sums, strict=True)
        ]
        assert not [name for name in module.state_dict() if name.startswith("regularizers")]
    features = torch.nn.functional.normalize(backbone(images).detach(), dim=1)
    expected = torch.stack([features[labels == label].mean(dim=0) for label in range(c)])
    torch.testing.assert_close(records[1]["means"][0].float(), expected)
    assert records[1]["seen"].tolist() == [[True] * c, [False] * c]
    assert isinstance(terms[1], PrototypeTerm)
