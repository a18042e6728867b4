"""Supervisions and regularizers: the controls' identities, and parts of one's own in every backend."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import contents, experiment, finished, same
from jdfl_lightning import JointHead, PoolBackend, SoftTargetKLLoss, fit
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.client.trainer import TrainerOptions
from jdfl_lightning.config import as_dict
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import FitTask
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import RandomTargets, TargetRule
from jdfl_lightning.regularizers import Agreement, Step
from jdfl_lightning.regularizers.agreement import disagreement
from jdfl_lightning.storage.checkpoint import Checkpoints
from jdfl_lightning.storage.folder import read_run
from jdfl_lightning.storage.weights import load_model
from jdfl_lightning.supervision import Graded, Random, RoundInfo, Uniform, short_names
from own_parts import Counting, Halves, Short


def gradient(logits: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    SoftTargetKLLoss()(leaf, weights, labels).backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("phi", [0.0, 0.3, 0.7, 1.0])
def test_random_targets_have_the_mean_gradient_of_uniform_ones(phi: float) -> None:
    """All M draws have the same probability, so their mean is exact."""
    m, c = 4, 3
    logits, labels = torch.randn(5, m * c, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    table = RandomTargets(m, phi).table.double()
    drawn = torch.stack([gradient(logits, table[[d] * 5], labels) for d in range(m)]).mean(dim=0)
    even = Uniform().table(torch.zeros(m, 7)).double()
    torch.testing.assert_close(drawn, gradient(logits, even[[0] * 5], labels), atol=1e-8, rtol=0)


def test_uniform_targets_on_a_tiled_head_are_the_baseline_with_a_slower_head() -> None:
    """Every copy of the head gets 1/M of the baseline's gradient, the features all of it: the same path, to 1e-12.

    With M = 4, so that 1/M is exact in single precision, in which a table is sent; 60 steps in double precision.
    """
    double = TrainerOptions(precision="64-true")
    common: dict[str, Any] = {"epochs": 6, "trainer": double, "lr": 0.1, "batch_size": 32}
    tiled = experiment(supervision="uniform", head_init="tile", num_domains=4, **common)
    plain = experiment(supervision="base", head_lr=0.25, **common)
    table = {"supervision": Uniform().broadcast({}, RoundInfo(1, 1, torch.zeros(4, 2)))}
    ends: list[Tensors] = []
    for run, m, sent in ((tiled, 4, table), (plain, 1, {})):
        workspace = Workspace(run)
        weights, buffers = workspace.initial(m)
        assert torch.equal(weights["head.weight"], workspace.initial(1)[0]["head.weight"].repeat(m, 1))
        result, _ = fit_client(workspace, FitTask(1, 1, 0, weights, buffers, domain=2, learned=sent), {})
        assert result.num_steps >= 50
        ends.append(result.weights)
    joint, base = ends
    assert joint["head.weight"].dtype == torch.float64
    assert not torch.equal(base["head.weight"], workspace.initial(1)[0]["head.weight"].double())
    for name, value in base.items():
        copies = value.repeat(4, *[1] * (value.ndim - 1)) if name.startswith("head.") else value
        torch.testing.assert_close(joint[name], copies, atol=1e-12, rtol=0)


def test_a_fresh_head_is_not_tiled() -> None:
    weights, _ = Workspace(experiment(head_init="fresh")).initial(3)
    first, second, _ = weights["head.weight"].chunk(3)
    assert not torch.equal(first, second)


def test_head_lr_is_a_factor_on_the_heads_rate_alone() -> None:
    """One full-batch step: the head moves a quarter as far, the rest as far as before."""
    moves = []
    for factor in (1.0, 0.25):
        run = experiment(supervision="base", head_lr=factor, batch_size=5000)
        workspace = Workspace(run)
        weights, buffers = workspace.initial(1)
        result, _ = fit_client(workspace, FitTask(0, 1, 0, weights, buffers), {})
        moves.append({name: result.weights[name] - weights[name] for name in weights})
    one, other = moves
    for name, moved in one.items():
        factor = 0.25 if name.startswith("head.") else 1.0
        torch.testing.assert_close(other[name], factor * moved, atol=1e-7, rtol=1e-4)


def test_short_names_stand_for_classes() -> None:
    assert [type(experiment(supervision=name).supervision) for name in short_names()] == list(short_names().values())
    with pytest.raises(InputError, match=r"'random', 'uniform', 'em', 'online' but got 'Graded'. Did you"):
        experiment(supervision="Graded")


OWN = {"class_path": "own_parts.Counting", "init_args": {"num_classes": 10}}


def settings(**changes: Any) -> dict[str, Any]:
    run = as_dict(experiment(rounds=3, client_fraction=0.5))
    keep = ("data", "backbone", "rounds", "epochs", "batch_size", "client_fraction", "num_domains", "clustering")
    shorts = [{"class_path": "own_parts.Short", "init_args": {"weight": 0.01}}]
    return {name: run[name] for name in keep} | {"supervision": OWN, "regularizers": shorts} | changes


@pytest.fixture
def local_run() -> dict[str, Any]:
    finished("local", rounds=3, client_fraction=0.5, supervision=Counting(10), regularizers=[Short(0.01)])
    return contents("local")


@pytest.mark.slow
@pytest.mark.usefixtures("local_run")
def test_own_parts_in_a_pool() -> None:
    run = experiment(rounds=3, client_fraction=0.5, supervision=Counting(10), regularizers=[Short(0.01)])
    fit(replace(run, backend=PoolBackend(workers=2), run_dir="pool"))
    assert same("pool", "local")


@pytest.mark.slow
@pytest.mark.usefixtures("local_run")
@pytest.mark.filterwarnings("ignore:Waiting for room on the Ray cluster")  # a busy machine starts actors slowly
def test_own_parts_on_ray() -> None:
    import ray

    from jdfl_lightning import RayBackend

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        run = experiment(rounds=3, client_fraction=0.5, supervision=Counting(10), regularizers=[Short(0.01)])
        fit(replace(run, backend=RayBackend(actors=1), run_dir="ray"))
    finally:
        ray.shutdown()
    assert same("ray", "local")


def test_own_parts_on_flower(local_run: dict[str, Any]) -> None:
    from flower_grid import run_on_grid

    Path("mine.yaml").write_text(yaml.safe_dump(settings()))
    run_on_grid("mine.yaml", {"run_dir": "flower"}, sites=2)
    ours, theirs = (load_model(Path(name), "last").weights for name in ("flower", "local"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [row["seen"] for row in contents("flower")["rows"]] == [row["seen"] for row in local_run["rows"]]


@pytest.mark.usefixtures("local_run")
def test_what_is_learned_is_resumed_to_the_bit() -> None:
    """The record is in the checkpoint; a run that is stopped after round 1 and resumed ends like the others."""
    run = experiment(rounds=1, client_fraction=0.5, supervision=Counting(10), regularizers=[Short(0.01)])
    fit(replace(run, run_dir="cut"))
    record, _ = Checkpoints(Path("cut"), 1).load(Path("cut/checkpoints/1.safetensors"), True)
    assert float(record["learned.supervision"]["seen"].sum()) == float(record["learned.regularizer0"]["count"]) > 0
    fit(replace(run, rounds=3, resume="cut"))
    assert same("cut", "local")


def test_what_clients_send_is_counted_and_learned_from() -> None:
    run = read_run(finished("run", rounds=2, supervision=Counting(10)).folder)
    images = sum(len(indices) for indices in experiment().data.partition.clients)
    assert [row["seen"] for row in run.rows] == [images, 2 * images]
    plain = finished("plain", rounds=2, supervision="hard")
    assert run.rows[0]["bytes/up"] - plain.rows[0]["bytes/up"] == 4 * 10 * 4  # four clients, ten classes


def test_an_undeclared_sum_is_refused() -> None:
    class Silent(Counting):
        def upload_form(self, sent: Tensors, num_classes: int) -> Tensors:
            return {}

    with pytest.raises(InputError, match="other uploads than were declared: sums of the supervision"):
        fit(experiment(supervision=Silent(10), run_dir="run"))


def test_own_rule_by_its_import_path() -> None:
    from jdfl_lightning.config import parse_experiment

    given = ["--supervision", "own_parts.Halves", "--supervision.own", "0.75"]
    assert parse_experiment("fit", given).supervision == Halves(0.75)
    table = Halves(0.75).table(torch.zeros(3, 1))
    torch.testing.assert_close(table, torch.tensor([[0.75, 0.25, 0], [0, 0.75, 0.25], [0.25, 0, 0.75]]))


class Tempered(Graded):
    """Graded targets by a rule with a parameter of its own, which is no part of the network."""

    def rule(self, sent: Tensors, domain: int) -> TargetRule:
        rule = super().rule(sent, domain)
        rule.temperature = nn.Parameter(torch.ones(()))
        return rule


@pytest.mark.parametrize("trainer", [TrainerOptions(), TrainerOptions(gradient_clip_val=1e9)], ids=["loop", "Trainer"])
def test_parameters_of_a_rule_are_not_the_networks(trainer: TrainerOptions) -> None:
    finished("plain", rounds=2, num_domains=2, supervision="graded", trainer=trainer)
    own = fit(experiment(rounds=2, num_domains=2, supervision=Tempered(), trainer=trainer, run_dir="own"))
    expected, found = (load_model(Path(folder), "last").weights for folder in ("plain", own.folder))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_old_options_are_still_read() -> None:
    from jdfl_lightning.config import parse_experiment
    from jdfl_lightning.core.errors import Note

    Path("old.yaml").write_text("supervision: graded\nalpha: 0.6\ntau: 0.2\nphi: 1.0\n")
    with pytest.warns(Note, match=r"alpha, tau, phi: now options of the supervision.*has no phi\."):
        assert parse_experiment("fit", ["--config", "old.yaml"]).supervision == Graded(0.6, 0.2)
    with pytest.warns(Note, match="phi: now"):
        assert parse_experiment("fit", ["--phi=0.5"]).supervision == Random(0.5)
    with pytest.warns(Note), pytest.raises(InputError, match=r"--supervision\.phi"):
        parse_experiment("fit", ["--phi"])  # without a value


# regularizers


@given(seed=st.integers(0, 10_000), m=st.integers(1, 5), c=st.integers(1, 5))
def test_disagreement_is_a_jensen_shannon_divergence(seed: int, m: int, c: int) -> None:
    """Against the definition written out; between 0 and log min(M, C); 0 for a tiled head."""
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(3, m * c, generator=generator, dtype=torch.float64)
    found = disagreement(logits, c)
    p = logits.view(3, m, c).softmax(dim=2)
    mean = p.mean(dim=1, keepdim=True)
    expected = (p * (p.log() - mean.log())).sum(dim=2).mean(dim=1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
    assert bool((found <= math.log(min(m, c)) + 1e-12).all())
    tiled = logits[:, :c].repeat(1, m)
    torch.testing.assert_close(disagreement(tiled, c), torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)


def test_gradient_of_disagreement() -> None:
    logits = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: disagreement(x, 3), logits)
    single = torch.randn(2, 3, requires_grad=True)
    disagreement(single, 3).sum().backward()
    assert single.grad is not None
    assert not single.grad.any()


def test_a_regularizer_of_weight_0_changes_no_bit() -> None:
    finished("without")
    finished("with", regularizers=[Agreement(0.0)])
    weights = [contents(name)["last.safetensors"] for name in ("without", "with")]
    assert weights[0] == weights[1]
    finished("more", regularizers=[Agreement(1.0)])
    assert contents("more")["last.safetensors"] != weights[0]


def test_a_term_in_a_plain_project() -> None:
    head = JointHead(4, num_classes=3, num_domains=2)
    head.requires_grad_(False)
    features = torch.randn(5, 4)
    term = Agreement(0.5).term({})
    step = Step(head, head(features), features, torch.tensor([0, 1, 2, 0, 1]), torch.full((5, 2), 0.5))
    assert float(term(step)) == pytest.approx(0.5 * float(disagreement(head(features), 3).mean()))
    assert not list(nn.Module.parameters(term))
    with pytest.raises(InputError, match="0 or more"):
        Agreement(-1.0)
