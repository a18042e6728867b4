"""Targets that learn: the limits in which they are an existing mode, their gradients, and runs with them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import checkered, contents, every, experiment, finished, same
from jdfl_lightning import EM, Agreement, Balance, Online, PoolBackend, Prototype, SoftTargetKLLoss, fit
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import UNKNOWN
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import GradedTargets, cosine_similarities, transfer_weights
from jdfl_lightning.report.details import draw_targets
from jdfl_lightning.storage.checkpoint import Checkpoints, read_learned
from jdfl_lightning.supervision import ClientSums, EMTargets, Graded, RoundInfo, Supervision
from jdfl_lightning.supervision.em import responsibilities
from jdfl_lightning.supervision.online import OnlineTargets

CENTROIDS = torch.tensor([[1.0, 0.0, 0.2], [0.0, 1.0, 0.1], [0.6, 0.6, 0.0]])


def batch(m: int, c: int, seed: int = 0, count: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in double precision, labels and domains."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, m * c, generator=generator, dtype=torch.float64)
    return (
        logits,
        torch.randint(c, (count,), generator=generator),
        torch.randint(m, (count,), generator=generator),
    )


def weights_of(*names: str) -> list[bytes]:
    return [contents(name)["last.safetensors"] for name in names]


# responsibilities


@given(seed=st.integers(0, 10_000), m=st.integers(1, 5), c=st.integers(1, 4), beta=st.floats(0, 5))
def test_responsibilities_written_out(seed: int, m: int, c: int, beta: float) -> None:
    logits, labels, domains = batch(m, c, seed)
    table = torch.rand(m, m, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.01
    table /= table.sum(dim=1, keepdim=True)
    found = responsibilities(table[domains], logits, labels, beta)
    for row, logit, label, domain in zip(found, logits, labels.tolist(), domains.tolist(), strict=True):
        mass = [float(table[domain, k]) * math.exp(beta * float(logit[k * c + label])) for k in range(m)]
        assert row.tolist() == pytest.approx([one / sum(mass) for one in mass], rel=1e-9)


@given(seed=st.integers(0, 10_000), m=st.integers(1, 5), beta=st.floats(0, 1e300), lam=st.floats(0, 1))
def test_a_prior_on_one_domain_is_hard_for_any_beta(seed: int, m: int, beta: float, lam: float) -> None:
    logits, labels, domains = batch(m, 3, seed)
    found = EMTargets(torch.eye(m), lam, beta)(domains, logits=logits, labels=labels)
    assert torch.equal(found, torch.eye(m, dtype=found.dtype)[domains])


@given(seed=st.integers(0, 10_000), m=st.integers(1, 6), lam=st.floats(0, 1), beta=st.floats(0, 9))
def test_without_lam_or_beta_targets_are_the_table_to_the_bit(seed: int, m: int, lam: float, beta: float) -> None:
    logits, labels, domains = batch(m, 3, seed)
    table = GradedTargets(torch.randn(m, 8, generator=torch.Generator().manual_seed(seed))).table
    for rule in (EMTargets(table, 0.0, beta), EMTargets(table, lam, 0.0)):
        assert torch.equal(rule(domains, logits=logits.float(), labels=labels), table[domains])


def loss_gradient(rule: EMTargets, logits: Tensor, labels: Tensor, domains: Tensor) -> Tensor:
    """The gradient of the summed loss, whose targets are constant."""
    leaf = logits.clone().requires_grad_()
    SoftTargetKLLoss("sum")(leaf, rule(domains, logits=leaf, labels=labels), labels).backward()
    assert leaf.grad is not None
    return leaf.grad


def differences(value: Any, logits: Tensor, step: float = 1e-5) -> Tensor:
    """The gradient of a function by central differences."""
    found = torch.zeros_like(logits)
    for place in range(logits.numel()):
        moved = torch.zeros_like(logits).view(-1)
        moved[place] = step
        moved = moved.view_as(logits)
        found.view(-1)[place] = (value(logits + moved) - value(logits - moved)) / (2 * step)
    return found


@pytest.mark.parametrize("m", [2, 4])
def test_the_gradient_is_that_of_the_marginal_likelihood(m: int) -> None:
    """lam = beta = 1: -log sum_m pi_m p(m, c|x), by finite differences in double precision."""
    c = 3
    logits, labels, domains = batch(m, c)
    table = torch.softmax(torch.randn(m, m, generator=torch.Generator().manual_seed(1), dtype=torch.float64), dim=1)
    rule = EMTargets(table, lam=1.0, beta=1.0).double()
    rule.table.copy_(table)  # not rounded to single precision

    def likelihood(x: Tensor) -> Tensor:
        p = x.softmax(dim=1).view(-1, m, c)
        own = p[torch.arange(len(x)), :, labels]
        return -(table[domains] * own).sum(dim=1).log().sum()

    found = loss_gradient(rule, logits, labels, domains)
    torch.testing.assert_close(found, differences(likelihood, logits), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("m", [2, 4])
def test_the_gradient_of_a_large_beta_is_that_of_the_best_domain(m: int) -> None:
    """Uniform pi, lam = 1, beta -> infinity: -max_m log p(m, c|x)."""
    c = 3
    logits, labels, domains = batch(m, c)
    rule = EMTargets(torch.full((m, m), 1 / m), lam=1.0, beta=1e6).double()

    def best(x: Tensor) -> Tensor:
        p = x.log_softmax(dim=1).view(-1, m, c)
        return -p[torch.arange(len(x)), :, labels].amax(dim=1).sum()

    found = loss_gradient(rule, logits, labels, domains)
    torch.testing.assert_close(found, differences(best, logits), atol=1e-8, rtol=1e-6)


def test_half_precision_logits() -> None:
    """Targets of bf16 logits are those of the same logits in single precision."""
    logits, labels, domains = batch(3, 4)
    half = logits.bfloat16()
    for rule in (EMTargets(Graded().table(CENTROIDS)), OnlineTargets(torch.full((4, 3, 3), 1 / 3))):
        found = rule(domains, logits=half, labels=labels)
        assert found.dtype == torch.float32
        assert torch.equal(found, rule(domains, logits=half.float(), labels=labels))
        torch.testing.assert_close(found.sum(dim=1), torch.ones(len(labels)))


def test_a_drawn_domain_follows_the_target() -> None:
    """The shares of 20,000 draws, within five standard deviations; the draws are a function of the generator."""
    logits, labels, domains = batch(3, 2, count=1)
    args: dict[str, Any] = {"logits": logits.repeat(20_000, 1), "labels": labels.repeat(20_000)}
    table = Graded().table(CENTROIDS)
    target = EMTargets(table)(domains, logits=logits, labels=labels)[0]
    rule = EMTargets(table, one=True)
    found = rule(domains.repeat(20_000), torch.Generator().manual_seed(3), **args)
    assert found.unique().tolist() == [0, 1]
    assert bool((found.sum(dim=1) == 1).all())
    assert bool(((found.mean(dim=0) - target).abs() < 5 * (target * (1 - target) / 20_000).sqrt()).all())
    assert torch.equal(found, rule(domains.repeat(20_000), torch.Generator().manual_seed(3), **args))


def test_what_targets_need() -> None:
    for rule in (EMTargets(torch.eye(2)), OnlineTargets(torch.eye(2).repeat(3, 1, 1))):
        with pytest.raises(ValueError, match="Expected arguments `logits` and `labels`"):
            rule(torch.tensor([0]))


def test_an_unknown_pseudo_domain_has_an_even_prior() -> None:
    logits, labels, domains = batch(3, 2)
    sent = EM(lam=1.0, warmup=0.0).broadcast({}, RoundInfo(1, 5, CENTROIDS))
    found = EM(lam=1.0).rule(sent, UNKNOWN)(domains, logits=logits, labels=labels)
    own = logits.view(-1, 3, 2)[torch.arange(len(labels)), :, labels]
    torch.testing.assert_close(found, own.softmax(dim=1))
    online = Online()
    sent = online.broadcast(online.init(CENTROIDS, 2), RoundInfo(1, 5, CENTROIDS))
    found = online.rule(sent, UNKNOWN)(domains, logits=logits, labels=labels)
    assert torch.equal(found, torch.full((len(labels), 3), 1 / 3))


# the server's side


def test_the_table_of_em_by_hand() -> None:
    """M = 2, T0 even, kappa = 10. Pseudo-domain 0 has 30 images with the mean r (0.9, 0.1) and 10 with (0.5, 0.5).

    pi_00 = (10 * 0.5 + 30 * 0.9 + 10 * 0.5) / (10 + 40) = 37 / 50. No client of 1 took part: T0. The unknown one counts
    for nothing.
    """
    em = EM(extends="uniform", kappa=10.0)
    record = em.init(torch.zeros(2, 3), 4)
    answers = [
        ClientSums(0, 30, {"mass": torch.tensor([54.0, 6.0]).double(), "count": torch.tensor([60.0]).double()}),
        ClientSums(UNKNOWN, 99, {"mass": torch.tensor([0.0, 9.0]).double(), "count": torch.tensor([9.0]).double()}),
        ClientSums(0, 10, {"mass": torch.tensor([5.0, 5.0]).double(), "count": torch.tensor([10.0]).double()}),
    ]
    record = em.update(record, answers)
    torch.testing.assert_close(record["table"], torch.tensor([[0.74, 0.26], [0.5, 0.5]]).double())
    metrics = em.metrics(record)
    entropies = [-sum(p * math.log(p) for p in row) for row in ((0.74, 0.26), (0.5, 0.5))]
    assert metrics["targets/entropy"] == pytest.approx(sum(entropies) / 2)
    assert metrics["targets/entropy_lowest"] == pytest.approx(entropies[0])
    assert metrics["targets/moved"] == pytest.approx((0.24 + 0) / 2)
    sent = em.broadcast(record, RoundInfo(2, 5, torch.zeros(2, 3)))
    torch.testing.assert_close(sent["table"], torch.tensor([[0.74, 0.26], [0.5, 0.5]]))


def test_the_rising_share_of_responsibilities() -> None:
    """lam_t = lam min(1, (t - 1) / (w T)), by hand for T = 10."""
    em = EM(lam=0.8, warmup=0.5)
    shares = [float(em.broadcast({}, RoundInfo(t, 10, CENTROIDS))["lam"]) for t in range(1, 11)]
    assert shares == pytest.approx([0, 0.16, 0.32, 0.48, 0.64, 0.8, 0.8, 0.8, 0.8, 0.8])
    assert float(EM(lam=0.8, warmup=0.0).broadcast({}, RoundInfo(1, 10, CENTROIDS))["lam"]) == 0.8


def test_sums_of_online_written_out() -> None:
    """p(m, y|x) of the samples whose largest logit is of their class, summed by class."""
    m, c = 3, 4
    logits, labels, domains = batch(m, c, count=40)
    labels[:20] = (logits[:20].argmax(dim=1)) % c  # else few are right
    online = Online()
    rule = online.rule(online.broadcast(online.init(CENTROIDS, c), RoundInfo(1, 5, CENTROIDS)), 1)
    for part in (slice(0, 15), slice(15, 40)):
        rule(domains[part], logits=logits[part], labels=labels[part])
    sums, counts = torch.zeros(c, m).double(), torch.zeros(c).double()
    for logit, label in zip(logits, labels.tolist(), strict=True):
        if int(logit.argmax()) % c == label:
            p = logit.softmax(dim=0)
            sums[label] += torch.stack([p[k * c + label] for k in range(m)])
            counts[label] += 1
    sent = online.collect(rule)
    torch.testing.assert_close(sent["sums"], sums / 40)
    torch.testing.assert_close(sent["counts"], counts / 40)
    assert online.reason_unusable(sent) is None
    form = online.upload_form({"table": torch.empty(c, m, m, device="meta")}, c)
    assert {n: (t.shape, t.dtype) for n, t in form.items()} == {n: (t.shape, t.dtype) for n, t in sent.items()}


def shares(*rows: tuple[float, ...]) -> Tensors:
    sums = torch.tensor(rows, dtype=torch.float64)
    return {"sums": sums, "counts": torch.full((len(rows),), 1 / len(rows), dtype=torch.float64)}


def test_the_weights_of_online_by_hand() -> None:
    """M = 3, C = 2, rho = 0.25, two clients of pseudo-domain 0 with 100 and 300 images.

    Class 0: 100 (., 0.1, 0.3) + 300 (., 0.1, 0.1) = (40, 60), normalised (0.4, 0.6); w moves a quarter of the way. The
    own entry is left out. Class 1 has no such sample, nor have the other pseudo-domains: unchanged.
    """
    online = Online(rho=0.25)
    start = online.init(CENTROIDS, 2)
    w = transfer_weights(cosine_similarities(CENTROIDS), 0.1)
    assert torch.equal(start["table"], torch.stack([w, w]))
    answers = [
        ClientSums(0, 100, shares((0.1, 0.1, 0.3), (0.0, 0.0, 0.0))),
        ClientSums(0, 300, shares((0.3, 0.1, 0.1), (0.0, 0.0, 0.0))),
        ClientSums(UNKNOWN, 300, shares((0.0, 0.5, 0.0), (0.0, 0.5, 0.0))),
    ]
    table = online.update(start, answers)["table"]
    expected = torch.stack([w, w])
    expected[0, 0] = torch.tensor([0.0, 0.75 * w[0, 1] + 0.1, 0.75 * w[0, 2] + 0.15])
    torch.testing.assert_close(table, expected)
    sent = online.broadcast({"table": table, "start": w}, RoundInfo(2, 5, CENTROIDS))["table"]
    torch.testing.assert_close(sent[0, 0], torch.tensor([0.55, *(0.45 * expected[0, 0, 1:]).tolist()]))


@given(seed=st.integers(0, 10_000), m=st.integers(2, 5), rho=st.floats(0.01, 1), rounds=st.integers(1, 6))
def test_rows_of_online_sum_to_1_and_have_nothing_of_their_own(seed: int, m: int, rho: float, rounds: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    online = Online(rho=rho)
    record = online.init(torch.randn(m, 4, generator=generator), 3)
    for _ in range(rounds):
        found = torch.rand(3, m, generator=generator, dtype=torch.float64)
        found[int(torch.randint(3, (), generator=generator))] = 0
        domain = int(torch.randint(m, (), generator=generator))
        record = online.update(record, [ClientSums(domain, 9, {"sums": found / 99, "counts": found[:, 0]})])
    torch.testing.assert_close(record["table"].sum(dim=2), torch.ones(3, m).double(), atol=1e-12, rtol=0)
    assert not record["table"].diagonal(dim1=1, dim2=2).any()
    if m == 2:  # there is only one other
        assert torch.equal(record["table"], online.init(torch.eye(2), 3)["table"])


# runs

LIMITS: list[tuple[Supervision, Any]] = [
    (EM(lam=0.0, kappa=5.0, alpha=0.6), Graded(0.6)),
    (EM(lam=0.0, extends="uniform"), "uniform"),
    (EM(beta=0.0, lam=1.0, warmup=0.0), "graded"),
    (EM(beta=0.0, extends="uniform"), "uniform"),
    (EM(alpha=1.0, beta=3.0, warmup=0.0, kappa=9.0), "hard"),
    (Online(rho=0.0, alpha=0.6), Graded(0.6)),
    (Online(alpha=1.0), "hard"),
]


@pytest.mark.parametrize(("learned", "fixed"), every(2, LIMITS), ids=[str(number) for number in range(len(LIMITS))])
def test_limits_of_runs_to_the_bit(learned: Supervision, fixed: Any) -> None:
    finished("learned", supervision=learned)
    finished("fixed", supervision=fixed)
    one, other = weights_of("learned", "fixed")
    assert one == other


@pytest.mark.parametrize("learned", [EM(kappa=50.0, warmup=0.0), Online()])
def test_they_differ_from_graded_elsewhere(learned: Supervision) -> None:
    finished("learned", supervision=learned)
    finished("graded", supervision="graded")
    one, other = weights_of("learned", "graded")
    assert one != other


@pytest.mark.parametrize("learned", [EM(kappa=50.0), Online()])
def test_the_first_round_is_graded(learned: Supervision) -> None:
    """lam_1 = 0, and the weights of online begin as graded's: through the code that learns."""
    finished("learned", supervision=learned, rounds=1)
    finished("graded", supervision="graded", rounds=1)
    one, other = weights_of("learned", "graded")
    assert one == other


@pytest.mark.parametrize("learned", [EM(kappa=50.0, warmup=0.0), Online()])
def test_one_pseudo_domain_is_the_baseline(learned: Supervision) -> None:
    parts = [Balance(0.5), Prototype(0.5), Agreement(0.5)]
    finished("learned", supervision=learned, num_domains=1, regularizers=parts)
    finished("base", supervision="base")
    one, other = weights_of("learned", "base")
    assert one == other


def test_two_pseudo_domains_and_a_newcomer_without_one() -> None:
    """A run with M = 2 in which some clients get their pseudo-domain only when they first train."""
    from jdfl_lightning import Clustering

    clustering = Clustering(epochs=1, fraction=0.5, newcomers="update")
    for learned in (EM(kappa=50.0, warmup=0.0), Online()):
        run = finished("run" + learned.name, supervision=learned, num_domains=2, clustering=clustering)
        assert run.rows[-1]["joined"] == 2
        assert math.isfinite(run.rows[-1]["train/loss"])


def test_what_crosses_is_counted() -> None:
    """Four clients, M = 3, C = 10, doubles up and singles down; em also sends lam_t."""
    plain = finished("graded", supervision="graded", rounds=1).rows[0]
    em = finished("em", supervision=EM(kappa=50.0), rounds=1).rows[0]
    assert em["bytes/up"] - plain["bytes/up"] == 4 * 8 * (3 + 1)
    assert em["bytes/down"] - plain["bytes/down"] == 4 * 8
    fixed = finished("fixed", supervision=EM(), rounds=1).rows[0]
    assert fixed["bytes/up"] == plain["bytes/up"]
    assert "targets/entropy" not in fixed
    online = finished("online", supervision="online", rounds=1).rows[0]
    assert online["bytes/up"] - plain["bytes/up"] == 4 * 8 * (10 * 3 + 10)
    assert online["bytes/down"] - plain["bytes/down"] == 4 * 4 * (10 - 1) * 9
    for row in (em, online):
        assert 0 <= row["targets/entropy_lowest"] <= row["targets/entropy"] <= math.log(3)
        assert 0 < row["targets/moved"] <= 1


@pytest.mark.parametrize(
    ("learned", "precision"),
    checkered((EM(kappa=50.0, warmup=0.0), Online()), ("bf16-mixed", "bf16-true", "64-true")),
)
def test_other_precisions(learned: Supervision, precision: Any) -> None:
    from jdfl_lightning.client.trainer import TrainerOptions

    parts = [Balance(0.1), Prototype(0.1)]
    run = finished("run", supervision=learned, regularizers=parts, trainer=TrainerOptions(precision=precision))
    assert run.rows[-1]["refused"] == 0
    assert math.isfinite(run.rows[-1]["train/loss"])


def test_a_schedule_cannot_be_extended() -> None:
    finished("risen", supervision=EM(), rounds=2)
    with pytest.raises(
        InputError, match="Expected --rounds to be 2 as in risen but got 3: its rounds follow a schedule"
    ):
        fit(experiment(supervision=EM(), rounds=3, resume="risen"))
    assert [EM(warmup=0.0).has_schedule, EM(lam=0.0).has_schedule, Online().has_schedule] == [False] * 3


LEARNING: list[dict[str, Any]] = [
    {"supervision": EM(kappa=200.0, warmup=0.0, draw=True), "regularizers": [Balance(0.05), Prototype(0.1)]},
    {"supervision": Online(), "regularizers": [Prototype(0.1), Agreement(0.01), Balance(0.1)]},
]


@pytest.mark.slow
@pytest.mark.parametrize("parts", LEARNING, ids=["em", "online"])
def test_a_pool_a_resumed_run_and_one_process_agree_to_the_bit(parts: dict[str, Any]) -> None:
    run = experiment(rounds=3, client_fraction=0.5, **parts)
    finished("local", rounds=3, client_fraction=0.5, **parts)
    fit(replace(run, backend=PoolBackend(workers=2), run_dir="pool"))
    assert same("pool", "local")
    fit(replace(run, rounds=1, run_dir="cut"))
    record, _ = Checkpoints(Path("cut"), 1).load(Path("cut/checkpoints/1.safetensors"), True)
    assert not torch.equal(*torch.broadcast_tensors(*(record["learned.supervision"][n] for n in ("table", "start"))))
    assert (Path("cut") / "targets.png").exists()
    fit(replace(run, resume="cut"))
    assert same("cut", "local")


@pytest.mark.parametrize("parts", LEARNING, ids=["em", "online"])
def test_flower_agrees_to_the_bit(parts: dict[str, Any]) -> None:
    from flower_grid import run_on_grid, write_config

    run = experiment(rounds=2, client_fraction=0.75, **parts)
    finished("local", rounds=2, client_fraction=0.75, **parts)
    run_on_grid(write_config(run), {"run_dir": "flower"}, sites=2)
    ours, theirs = contents("local"), contents("flower")
    assert ours["rows"] == theirs["rows"]
    assert ours["checkpoints/2.safetensors"][1] == theirs["checkpoints/2.safetensors"][1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Waiting for room on the Ray cluster")  # a busy machine starts actors slowly
def test_ray_agrees_to_the_bit() -> None:
    import ray

    from jdfl_lightning import RayBackend

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        for number, parts in enumerate(LEARNING):
            finished(f"local{number}", rounds=2, client_fraction=0.5, **parts)
            run = experiment(rounds=2, client_fraction=0.5, **parts)
            fit(replace(run, backend=RayBackend(actors=1), run_dir=f"ray{number}"))
            assert same(f"ray{number}", f"local{number}")
    finally:
        ray.shutdown()


# the figure


@pytest.mark.parametrize("learned", [EM(kappa=50.0, warmup=0.0), Online()])
def test_the_figure_shows_what_is_in_the_folder(learned: Supervision) -> None:
    """Both tables, the mean over classes of online's, and the numbers of metrics.csv."""
    run = finished("run", supervision=learned, rounds=3)
    record = read_learned(Path("run"), "supervision")
    figure = draw_targets(record, run.rows)
    assert figure is not None
    first, last, change, *_ = figure.axes
    start = record["start"]
    torch.testing.assert_close(torch.as_tensor(first.images[0].get_array()), start)
    table = record["table"] if record["table"].ndim == 2 else record["table"].mean(dim=0)
    torch.testing.assert_close(torch.as_tensor(last.images[0].get_array()), table)
    assert last.get_title(loc="left").startswith("weights after round 3")
    assert list(np.asarray(change.lines[0].get_ydata())) == [row["targets/entropy"] for row in run.rows]
    assert Path("run/targets.png").exists()


@pytest.mark.parametrize("fixed", ["graded", "em"])
def test_no_figure_of_a_fixed_table(fixed: str) -> None:
    run = finished("run", supervision=fixed)
    assert draw_targets(read_learned(Path("run"), "supervision"), run.rows) is None
    assert not Path("run/targets.png").exists()


# what is refused


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (EM, {"beta": -1.0}, "beta to be 0 or more"),
        (EM, {"lam": 1.1}, "lam to be between 0 and 1"),
        (EM, {"warmup": -0.1}, "warmup to be between 0 and 1"),
        (EM, {"kappa": 0.0}, "kappa to be positive"),
        (EM, {"extends": "hard"}, "extends to be one of 'graded', 'uniform'"),
        (Online, {"rho": 2.0}, "rho to be between 0 and 1"),
        (Online, {"alpha": 0.0}, "alpha to be above 0"),
    ],
)
def test_bad_settings(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"Expected --supervision.{message}"):
        kind(**settings)


def test_an_infinite_kappa_is_none() -> None:
    assert EM(kappa=math.inf) == EM()


@pytest.mark.parametrize("changes", [{"supervision": "em"}, {"supervision": "online"}])
def test_a_private_run_refuses_them(changes: dict[str, Any]) -> None:
    from jdfl_lightning import PrivateFedAvg

    with pytest.raises(InputError, match="--supervision to be base with PrivateFedAvg"):
        experiment(algorithm=PrivateFedAvg(), **changes)


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("part", "sums"),
    [
        (EM(), {"mass": double(5, 6), "count": double(10)}),
        (EM(), {"mass": double(-1, 11), "count": double(10)}),
        (EM(), {"mass": double(0, 0), "count": double(0)}),
        (Online(), {"sums": double(0.6, 0.6).view(1, 2), "counts": double(1)}),
        (Online(), {"sums": double(-0.1, 0.6).view(1, 2), "counts": double(1)}),
        (Online(), {"sums": double(0.6, 0.6).view(1, 2), "counts": double(2)}),
    ],
)
def test_impossible_sums_are_refused(part: Supervision, sums: Tensors) -> None:
    assert "not those of as many samples as it counts" in str(part.reason_unusable(sums))


class Greedy(EM):
    """Sends twice the responsibilities that there were."""

    def collect(self, rule: Any) -> Tensors:
        return {name: 2 * sums if name == "mass" else sums for name, sums in super().collect(rule).items()}


def test_answers_with_impossible_sums_do_not_count() -> None:
    with pytest.raises(InputError, match=r"attempts were void\. Client 0: its sums of responsibilities are not those"):
        fit(experiment(supervision=Greedy(kappa=50.0), run_dir="run"))
