"""Parts of a user that do something unusual: they count as they do alone, or are refused in a line that names them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from helpers import experiment
from jdfl_lightning import (
    Experiment,
    InputError,
    LocalBackend,
    LocalUpdate,
    Part,
    RunCallback,
    VectorBackend,
    algorithms,
    fit,
)
from jdfl_lightning.client.fit import Workspace, initial_backbone
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.clustering.criteria import Clusterings, Criterion
from jdfl_lightning.config.groups import Clustering
from jdfl_lightning.joint import JointHead, TargetRule
from jdfl_lightning.storage.weights import load_model
from jdfl_lightning.supervision import Supervision
from test_vector import Notes, agree, setting, weights_of

SGD = torch.optim.SGD
SCHEDULERS = torch.optim.lr_scheduler


def last(run: Experiment) -> dict[str, Tensor]:
    model = load_model(fit(run).folder, "last")
    return {**model.weights, **model.buffers}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- target rules with VectorBackend


class Reversed(TargetRule):
    """Takes the rows of a table, and turns them round."""

    def rows(self, domains: Tensor, generator: torch.Generator | None = None, labels: Tensor | None = None) -> Tensor:
        return super().rows(domains, generator, labels).flip(-1)


class Learning(TargetRule):
    """Has a parameter, which the optimizer of a fit changes."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        self.shift = nn.Parameter(torch.zeros(table.shape[-1]))

    def forward(
        self,
        domains: Tensor,
        generator: torch.Generator | None = None,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        return (super().forward(domains, generator).log() + self.shift).softmax(dim=-1)


@dataclass(frozen=True)
class Uneven(Supervision):
    """Rows that differ, for a rule that is named."""

    kind: str = "Reversed"

    def table(self, centroids: Tensor) -> Tensor:
        return (torch.eye(len(centroids)) + 0.5 * torch.arange(len(centroids))).softmax(dim=1)

    def rule(self, sent: dict[str, Tensor], domain: int) -> TargetRule:
        kind: type[TargetRule] = {"Reversed": Reversed, "Learning": Learning}[self.kind]
        return kind(sent["table"])


def test_rows_of_ones_own_in_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    agree(setting(supervision=Uneven()), monkeypatch)


def test_a_rule_with_parameters_is_not_stacked() -> None:
    run = setting(supervision=Uneven("Learning"), callbacks=[Notes()])
    for backend, folder in ((LocalBackend(), "local"), (VectorBackend(), "vector")):
        fit(replace(run, backend=backend, run_dir=folder))
    assert equal(weights_of("local"), weights_of("vector"))
    assert Path("notes").read_text().endswith("trained one by one: its target rule has parameters of its own\n")


# --- networks


class Counter(nn.Module):
    """Counts its steps in a buffer: in place, or by another tensor."""

    def __init__(self, size: int, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(3 * size * size, 4), in_place
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layer(images.flatten(1))
        if self.training and self.in_place:
            self.steps += 1
        elif self.training:
            self.steps = 0.9 * self.steps + features.detach().mean()
        return features + self.steps


def counting(size: int) -> nn.Module:
    return Counter(size, in_place=True)


def replacing(size: int) -> nn.Module:
    return Counter(size, in_place=False)


@pytest.mark.parametrize("name", ["counting", "replacing"])
def test_a_network_that_changes_its_buffers_cannot_be_stacked(name: str) -> None:
    run = setting(backbone=f"test_wrong_parts.{name}", backend=VectorBackend())
    with pytest.raises(InputError, match="Expected a network whose copies can be stacked with VectorBackend"):
        fit(run)
    assert last(replace(run, backend=LocalBackend()))["backbone.steps"] != 0


class HandMade(nn.BatchNorm1d):
    """BatchNorm that replaces its statistics instead of changing them."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * input.detach().mean(dim=0)
        return (input - self.running_mean) / (self.running_var + self.eps).sqrt()


def hand_made(size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 12), HandMade(12))


def test_statistics_that_a_subclass_of_batch_norm_replaces() -> None:
    """They are what the client has after its fit, and the next client does not begin with them."""
    workspace = Workspace(experiment(backbone="test_wrong_parts.hand_made"))
    weights, buffers = workspace.start(1)
    for _ in range(2):
        module = workspace.module(weights, buffers).train()
        assert not module.backbone.get_buffer("2.running_mean").any()
        module(torch.randn(4, 3, 8, 8))
        found = module.backbone.get_buffer("2.running_mean")
        assert found.any()
        assert torch.equal(module.statistics()["backbone.2.running_mean"], found)


class Masked(nn.Module):
    """Has a mask with infinite values, as attention has, and a table in double precision."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * size * size, 4)
        self.mask: Tensor
        self.table: Tensor
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf, -torch.inf]))
        self.register_buffer("table", torch.full((4,), 1e-17, dtype=torch.float64) + 1)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layer(images.flatten(1))
        share = (features + self.mask).softmax(dim=1)
        return features * (share.double() @ self.table.diag()).float()


def masked(size: int) -> nn.Module:
    return Masked(size)


def test_buffers_that_are_infinite_or_of_double_precision() -> None:
    found = last(experiment(backbone="test_wrong_parts.masked", supervision="base"))
    assert found["backbone.mask"].tolist() == [0, 0, -torch.inf, -torch.inf]
    assert found["backbone.table"].dtype is torch.float64


class Spare(nn.Module):
    """Has a layer that it never uses."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.used, self.unused = (nn.Linear(3 * size * size, 4) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.used(images.flatten(1))
        return found


def spare(size: int) -> nn.Module:
    return Spare(size)


@pytest.mark.parametrize("algorithm", ["FedAvg", "FedProx", "SCAFFOLD"])
def test_a_layer_that_is_never_used(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stacked as the others are; weight decay and corrections change it alike."""
    rule = getattr(algorithms, algorithm)()
    agree(setting(backbone="test_wrong_parts.spare", algorithm=rule, supervision="base", weight_decay=0.1), monkeypatch)


class Highest(nn.Module):
    """Keeps the largest feature so far, and holds what cannot be copied."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(3 * size * size, 4), threading.Lock()
        self.peak: Tensor
        self.register_buffer("peak", torch.full((), -torch.inf))

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layer(images.flatten(1))
        if self.training:
            self.peak = torch.maximum(self.peak, features.detach().max())
        return features


def highest(size: int) -> nn.Module:
    return Highest(size)


def test_a_buffer_that_is_infinite_at_first_only() -> None:
    run = experiment(backbone="test_wrong_parts.highest", supervision="base")
    assert last(run)["backbone.peak"].isfinite()
    with pytest.raises(InputError, match="whose copies can be stacked"):
        fit(replace(run, backend=VectorBackend()))


class Locked(nn.Sequential):
    """Holds what cannot be copied."""

    def __init__(self, size: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * size * size, 4))
        self.lock = threading.Lock()


def locked(size: int) -> nn.Module:
    return Locked(size)


def test_a_network_that_cannot_be_copied_is_stacked() -> None:
    assert len(fit(setting(backbone="test_wrong_parts.locked", supervision="base", backend=VectorBackend())).rows) == 2


def lazy(size: int) -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(6))


def test_the_first_weights_of_lazy_layers_depend_on_the_seed_alone() -> None:
    run = experiment(backbone="test_wrong_parts.lazy")
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(initial_backbone(run).state_dict())
    assert equal(*found)


# --- modules


class Sharp(JointHead):
    def forward(self, input: Tensor) -> Tensor:
        return 10 * linear(normalize(input), normalize(self.weight), self.bias)


class OwnHead(JointModule):
    def __init__(this, **rest: Any) -> None:  # noqa: N805 - the first argument may have any name
        super().__init__(**rest)
        this.head = Sharp(this.head.in_features, this.head.num_classes, this.head.num_domains)


class HalfChanged(JointModule):
    def forward(self, images: Tensor) -> Tensor:
        return 2 * super().forward(images)


class Named(JointModule):
    """Logs a number by a name that is given."""

    def __init__(self, name: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.name = name

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        self.log(self.name, 7.0, on_step=False, on_epoch=True, batch_size=1)
        return super().training_step(batch, batch_idx)


class OwnSteps(JointModule):
    """An optimizer of its own, at a fixed rate."""

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class NeedsTrainer(JointModule):
    """What its optimizer is depends on the Trainer."""

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1 / self.trainer.estimated_stepping_batches)


class Wrapped(JointModule):
    """The optimizer of the run, with one more option."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.param_groups[0]["maximize"] = False
        return optimizer


class TwoSteps(JointModule):
    """An optimizer for the backbone, and one for the head."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(**rest)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [SGD(part.parameters(), lr=0.1) for part in (self.backbone, self.head)]

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss


class Skipping(JointModule):
    """Skips every second batch."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx % 2 else None


def module(kind: type, **arguments: Any) -> Part:
    return Part(f"test_wrong_parts.{kind.__name__}", **arguments)


REFUSED_MODULES: list[tuple[dict[str, Any], str]] = [
    ({"model": module(OwnHead)}, "Expected --model to leave the JointHead as it is, .* but OwnHead has a Sharp"),
    ({"model": module(HalfChanged)}, "override training_step with forward but HalfChanged overrides forward alone"),
    *(
        ({"model": module(Named, name=name)}, "log numbers by printable names")
        for name in ("test/acc", "round", "a\nb")
    ),
    *(
        ({"model": module(OwnSteps), setting: value}, f"--{setting} to be left out, as OwnSteps.configure_optimizers")
        for setting, value in {
            "head_lr": 0.5,
            "optimizer": Part(torch.optim.AdamW),
            "lr_scheduler": Part(SCHEDULERS.StepLR, step_size=1),
            "round_scheduler": Part(SCHEDULERS.ExponentialLR, gamma=0.5),
        }.items()
    ),
    ({"model": module(TwoSteps), "algorithm": algorithms.FedProx()}, "Expected one optimizer, as ProximalUpdate"),
    ({"optimizer": Part(torch.optim.LBFGS)}, "--optimizer to be one that takes a step with one gradient"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED_MODULES)
def test_modules_that_would_not_do_what_is_asked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(experiment(supervision="base", **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"model": module(Wrapped), "head_lr": 0.5, "round_scheduler": Part(SCHEDULERS.ExponentialLR, gamma=0.5)},
        {"model": module(TwoSteps)},
        {"model": module(NeedsTrainer)},
        {"model": module(Named, name="train/seven")},
        {"model": module(Named, name="norm/grad")},
        {"model": module(Skipping), "batch_size": 96},
    ],
)
def test_modules_that_do(settings: dict[str, Any]) -> None:
    run = fit(experiment(supervision="base", rounds=1, **settings))
    assert run.metrics["clients"].tolist() == [4]
    assert run.metrics.get("train/seven", run.metrics["clients"] + 3).tolist() == [7.0]


# --- the rate over the rounds


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        (Part(SCHEDULERS.CosineAnnealingLR, T_max=1, eta_min=0.2), [0.2, 0.2]),
        (Part(SCHEDULERS.CosineAnnealingLR, T_max=1, eta_min=0.1), [0.2, 0.1]),
        (Part(SCHEDULERS.StepLR, step_size=1, gamma=0.5), [0.2, 0.1]),
        (Part(SCHEDULERS.OneCycleLR, max_lr=0.8, total_steps=5, pct_start=0.4, cycle_momentum=False), [0.032, 0.8]),
    ],
)
def test_a_schedule_over_the_rounds_gives_rates(scheduler: Part, rates: list[float]) -> None:
    """OneCycleLR begins with a 25th of its highest rate, which it reaches after 0.4 * 5 - 1 steps."""
    workspace = Workspace(experiment(lr=0.2, round_scheduler=scheduler))
    assert [0.2 * workspace.lr_factor(round) for round in (1, 2)] == pytest.approx(rates)


def test_a_function_that_is_defined_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where a cell is run again: each run uses the function of its own time."""
    here = sys.modules[__name__]
    factors = []
    for value in (1.0, 0.25):
        monkeypatch.setattr(here, "decay", lambda round, value=value: value, raising=False)
        here.__dict__["decay"].__qualname__, here.__dict__["decay"].__module__ = "decay", __name__
        part = Part(SCHEDULERS.LambdaLR, lr_lambda=f"{__name__}.decay")
        factors.append(Workspace(experiment(round_scheduler=part)).lr_factor(2))
    assert factors == [1.0, 0.25]


# --- algorithms


class Replacing(LocalUpdate):
    """Gives each parameter another gradient, instead of changing the one that it has."""

    def correct(self, params: dict[str, Tensor]) -> None:
        for param in params.values():
            assert param.grad is not None
            param.grad = 2 * param.grad


class Doubled(algorithms.FedAvg):
    def local(self, task: Any, state: Any) -> LocalUpdate:
        return Replacing(task, state)


def test_gradients_that_are_replaced_are_not_lost_in_a_stack() -> None:
    run = setting(algorithm=Doubled(), supervision="base", callbacks=[Notes()])
    for backend, folder in ((LocalBackend(), "local"), (VectorBackend(), "vector")):
        fit(replace(run, backend=backend, run_dir=folder))
    assert equal(weights_of("local"), weights_of("vector"))
    assert "its algorithm replaces gradients, which it has to change in place" in Path("notes").read_text()


class Odd(algorithms.FedAvg):
    """Returns what a test says."""

    returned: ClassVar[dict[str, Any]] = {}

    def aggregate(self, weights: Any, server: Any, results: Any, context: Any) -> Any:
        mean, record = super().aggregate(weights, server, results, context)
        change = self.returned.get("aggregate")
        return (mean, record) if change is None else change(mean)

    def sample(self, server: Any, context: Any) -> Any:
        return self.returned.get("sample", super().sample(server, context))

    def init_server(self, weights: Any) -> Any:
        return self.returned.get("init_server", {})

    def metrics(self, server: Any, context: Any) -> Any:
        return {"mine": self.returned.get("metrics", torch.tensor(0.5))}


def without_bias(mean: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in mean.items() if name != "head.bias"}


ODD: list[tuple[str, Any, str]] = [
    ("aggregate", lambda mean: None, "Odd.aggregate to return the weights, named tensors, and a record.*got None"),
    ("aggregate", lambda mean: mean, "Odd.aggregate to return the weights, named tensors, and a record"),
    ("aggregate", lambda mean: (mean, {"c": torch.zeros(1)}), "and a record, groups of named tensors, but got"),
    ("aggregate", lambda mean: (without_bias(mean), {}), "like those of round 0 but the names differ: head.bias"),
    (
        "aggregate",
        lambda mean: ({name: tensor[:1] for name, tensor in mean.items()}, {}),
        "like those of round 0 but .* has the shape",
    ),
    (
        "aggregate",
        lambda mean: ({name: tensor.double() for name, tensor in mean.items()}, {}),
        "is of torch.float64 and not of torch.float32",
    ),
    (
        "aggregate",
        lambda mean: ({name: tensor / 0 for name, tensor in mean.items()}, {}),
        "like those of round 0 but they are not finite: lower --lr",
    ),
    ("sample", [], r"Odd.sample to return ids of clients, 0 to 3, each once, but got \[\]"),
    ("sample", [0, 99], "Odd.sample to return ids of clients, 0 to 3"),
    ("sample", [1, 1], "each once"),
    ("sample", ["a"], "each once"),
    ("sample", None, "each once, but got None"),
    ("metrics", None, "Odd.metrics to return numbers by name but got {'mine': None}"),
    ("init_server", {"v": torch.zeros(1)}, "Odd.init_server to return groups of named tensors"),
]


@pytest.mark.parametrize(("method", "returned", "message"), ODD)
def test_what_an_algorithm_returns_is_checked(
    method: str, returned: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Odd.returned, method, returned)
    with pytest.raises(InputError, match=message):
        fit(experiment(algorithm=Odd(), supervision="base"))


def test_clients_in_another_order_and_numbers_as_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Odd.returned, "sample", torch.tensor([2, 0]))
    run = fit(experiment(algorithm=Odd(), supervision="base"))
    assert (run.metrics["mine"].tolist(), run.metrics["clients"].tolist()) == ([0.5, 0.5], [2, 2])


# --- supervision and criterion


@dataclass(frozen=True)
class Tabled(Supervision):
    """Gives a table that a test names."""

    kind: str = "list"

    def table(self, centroids: Tensor) -> Any:
        eye = torch.eye(len(centroids))
        return {"list": eye.tolist(), "double": 2 * eye, "large": torch.eye(5), "nan": eye * torch.nan}[self.kind]


@pytest.mark.parametrize("kind", ["list", "double", "large", "nan"])
def test_a_table_that_is_none_is_the_supervisions_fault(kind: str) -> None:
    with pytest.raises(InputError, match=r"Expected (the targets of )?Tabled .*3 pseudo-domains"):
        fit(experiment(supervision=Tabled(kind)))


@dataclass(frozen=True)
class Bare(Criterion):
    """Returns what a test says."""

    found: ClassVar[Any] = None

    def choose(self, tried: Clusterings) -> Any:
        return self.found if self.found is not None else 1 / 0


@pytest.mark.parametrize("found", [None, 3, (2.0, ""), (True, "")])
def test_a_criterion_that_returns_no_number(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bare, "found", found)
    with pytest.raises(InputError, match="Expected the criterion Bare to"):
        fit(experiment(num_domains=None, clustering=Clustering(epochs=1, criterion=Bare()), supervision="hard"))


class Loud(algorithms.FedAvg):
    def local(self, task: Any, state: Any) -> LocalUpdate:
        raise RuntimeError("one thing\nand another")


def test_an_error_of_two_lines_is_shown_whole() -> None:
    with pytest.raises(InputError, match="all 4 failed alike: RuntimeError: one thing and another"):
        fit(experiment(algorithm=Loud(), supervision="base"))


class Forgetful(RunCallback):
    """Does not keep its argument under its name."""

    def __init__(self, patience: int = 3) -> None:
        self.left = patience


def test_a_callback_that_a_resumed_run_could_not_make_again() -> None:
    with pytest.raises(InputError, match="the argument patience to be kept as an attribute of Forgetful"):
        experiment(callbacks=[Forgetful(7)])
