"""The loop without a Trainer: the same bits as Lightning's Trainer, and used only where that holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from helpers import every, experiment, same
from jdfl_lightning import Experiment, FedAvg, JointModule, LocalUpdate, Part, TrainerOptions, algorithms, fit
from jdfl_lightning.client import fit as client_fit
from jdfl_lightning.client.evaluation import count
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.client.loop import _takes_plain_steps, needs_no_trainer
from jdfl_lightning.client.trainer import silent_trainer
from jdfl_lightning.core.messages import FitTask
from jdfl_lightning.data import DigitsDomains

ALGORITHMS = ["FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON", "RobustFedAvg"]


class Restless(nn.Module):
    """A network with everything that a mode or a random number changes: BatchNorm and dropout."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.net(images)
        return features


class Counting(nn.Module):
    """A network that puts a new tensor in the place of its buffer: the number of batches that it was trained on."""

    batches: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.batches = self.batches + 1
        features: Tensor = self.net(images)
        return features


class Own(JointModule):
    """A module of the user's."""


class Looking(LocalUpdate):
    """An algorithm of the user's that looks at the Trainer."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        assert trainer.max_epochs == 1


class Doubled(LocalUpdate):
    """An algorithm of the user's with no hook of its own."""

    def correct(self, params: dict[str, Tensor]) -> None:
        for param in params.values():
            assert param.grad is not None
            param.grad.mul_(2)


def both_ways(run: Experiment, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Train by the loop and by Lightning's Trainer; return whether all that they left is the same."""
    trainers = []

    def watched(*args: Any) -> pl.Trainer:
        trainers.append(silent_trainer(*args))
        return trainers[-1]

    monkeypatch.setattr(client_fit, "silent_trainer", watched)
    fit(replace(run, run_dir="loop"))
    assert not trainers
    with monkeypatch.context() as patch:
        patch.setattr(client_fit, "needs_no_trainer", lambda *args: False)
        fit(replace(run, run_dir="trainer"))
    assert trainers
    return same("loop", "trainer")


@pytest.mark.parametrize("algorithm", every(2, ALGORITHMS))
def test_same_bits_as_the_trainer(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients a round of four, so that states of earlier rounds count; Phase 1 too."""
    run = experiment(algorithm=getattr(algorithms, algorithm)(), supervision="random", rounds=3, client_fraction=0.5)
    assert both_ways(run, monkeypatch)


def test_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout and augmentation draw from torch's global generator, in the same order."""
    data = DigitsDomains(size=8, num_clients=4, augment=["RandomHorizontalFlip"])
    run = experiment(
        data=data, backbone="test_loop.Restless", supervision="graded", lr=None, optimizer=Part(torch.optim.Adam)
    )
    assert both_ways(run, monkeypatch)


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.01, "head_lr": 0.3, "algorithm": algorithms.SCAFFOLD()},
        {"weight_decay": 0.01, "momentum": 0.9, "algorithm": algorithms.FedProx()},
        {"private": ["head.*"], "algorithm": algorithms.FedRep(), "epochs": 2, "weight_decay": 0.1},
    ],
)
def test_same_steps_as_torch(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Decay, a rate of the head's own, momentum, and parameters without a gradient; with ordinary labels."""
    assert both_ways(experiment(supervision="base", rounds=2, **settings), monkeypatch)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (torch.optim.SGD, {}, True),
        (torch.optim.SGD, {"weight_decay": 0.1}, True),
        (torch.optim.SGD, {"momentum": 0.9}, False),
        (torch.optim.SGD, {"maximize": True}, False),
        (torch.optim.SGD, {"foreach": True}, False),
        (torch.optim.SGD, {"fused": True}, False),
        (torch.optim.SGD, {"lr": torch.tensor(0.1)}, False),
        (torch.optim.Adam, {}, False),
        (type("Own", (torch.optim.SGD,), {}), {}, False),
    ],
)
def test_which_steps_it_takes_itself(kind: Any, settings: dict[str, Any], expected: bool) -> None:
    assert _takes_plain_steps(kind([nn.Parameter(torch.zeros(1))], **{"lr": 0.1, **settings})) is expected


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_hooks_of_all_optimizers_are_called(register: Any) -> None:
    called: list[int] = []
    handle = register(lambda *details: called.append(1))
    try:
        fit(experiment(supervision="base", rounds=1))
    finally:
        handle.remove()
    assert called


class Halved(JointModule):
    """A module of the user's with a loss of its own."""

    def task_loss(self, logits: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
        return super().task_loss(logits, weights, labels) / 2


def test_a_loss_of_ones_own_is_used() -> None:
    """Also with ordinary labels, which have a shorter way."""
    backbone, batch = nn.Flatten(), (torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 2, 1]))
    losses = []
    for kind in (JointModule, Halved):
        torch.manual_seed(0)
        module = kind(backbone, in_features=12, num_classes=3)
        module.loss_term = update_of().loss
        losses.append(module.training_step(batch, 0))
    assert torch.equal(losses[1], losses[0] / 2)
    logits = module(batch[0])
    torch.testing.assert_close(losses[0], torch.nn.functional.cross_entropy(logits, batch[1]))


def update_of(kind: type[LocalUpdate] = LocalUpdate) -> LocalUpdate:
    return kind(FitTask(0, 1, 0, {}), {})


@pytest.mark.parametrize(
    ("settings", "kind", "expected"),
    [
        ({}, LocalUpdate, True),
        ({}, Doubled, True),
        ({}, Looking, False),
        ({"model": Part(Own)}, LocalUpdate, False),
        ({"trainer": TrainerOptions(gradient_clip_val=1.0)}, LocalUpdate, False),
        ({"trainer": TrainerOptions(precision="64-true")}, LocalUpdate, False),
        ({"trainer": TrainerOptions(callbacks=[Part(pl.Callback)])}, LocalUpdate, False),
        ({"trainer": TrainerOptions(max_steps=3)}, LocalUpdate, False),
        ({"trainer": TrainerOptions(accelerator="cpu")}, LocalUpdate, True),
        ({"lr_scheduler": Part(torch.optim.lr_scheduler.StepLR, step_size=1)}, LocalUpdate, False),
    ],
)
def test_where_it_is_used(settings: dict[str, Any], kind: type[LocalUpdate], expected: bool) -> None:
    run = experiment(**settings)
    module = Workspace(run).module(*Workspace(run).initial(1))
    module.loss_term = update_of(kind).loss  # as in a run
    assert needs_no_trainer(module, update_of(kind), run.trainer) is expected
    module.loss_term = None  # it logs its loss by itself
    assert not needs_no_trainer(module, update_of(kind), run.trainer)


def test_hooks_of_the_user_get_a_trainer() -> None:
    class Rule(FedAvg):
        def local(self, task: FitTask, state: dict[str, dict[str, Tensor]]) -> LocalUpdate:
            return Looking(task, state)

    workspace = Workspace(experiment(algorithm=Rule(), supervision="base", batch_size=96))
    weights, buffers = workspace.initial(1)
    result, _ = fit_client(workspace, FitTask(0, 1, 0, weights, buffers), {})
    assert result.num_steps == 4
    assert torch.isfinite(result.weights["head.weight"]).all()


def test_a_buffer_that_is_replaced_is_sent_and_set() -> None:
    """Each client begins with the buffer that it is sent, and answers with its own."""
    workspace = Workspace(experiment(backbone="test_loop.Counting", supervision="base", batch_size=96))
    weights, _ = workspace.initial(1)
    for client, sent in ((0, 0.0), (1, 10.0), (0, 3.0)):
        buffers = {"backbone.batches": torch.tensor(sent)}
        result, _ = fit_client(workspace, FitTask(client, 1, 0, weights, buffers), {})
        assert result.buffers["backbone.batches"] == sent + result.num_steps
        assert result.num_steps == 4


@pytest.mark.parametrize("part", ["test", "val", "unseen"])
def test_evaluation_counts_as_the_trainer_does(part: str) -> None:
    """With BatchNorm, dropout and several domains; `detect_anomaly` changes nothing but makes it a Trainer's test."""
    data = DigitsDomains(size=8, num_clients=3, val_fraction=0.2, unseen="chalk")
    data.deal(0)
    found = []
    for watched in (False, True):
        run = experiment(data=data, backbone="test_loop.Restless", trainer=TrainerOptions(detect_anomaly=watched))
        workspace = Workspace(run)
        found.append(count(workspace, *workspace.initial(2), part))
        found.append(count(workspace, *workspace.initial(2), part))
    assert found[0] == found[1] == found[2] == found[3]
    assert sum(seen for _, seen in found[0].values()) == len(getattr(data, f"{part}_dataloader")().indices)
    assert sum(right for right, _ in found[0].values()) > 0
