"""VectorBackend: clients trained together reach the weights of clients trained one by one, to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from helpers import checkered, every, experiment, same
from jdfl_lightning import (
    EM,
    Agreement,
    Balance,
    Clustering,
    DigitsDomains,
    Experiment,
    InputError,
    LocalBackend,
    LocalUpdate,
    Online,
    Part,
    Prototype,
    RunCallback,
    TrainerOptions,
    VectorBackend,
    algorithms,
    fit,
)
from jdfl_lightning.backends.local import LocalRunner
from jdfl_lightning.client import stack
from jdfl_lightning.client.fit import Workspace, begin_fit, end_fit, fit_client
from jdfl_lightning.client.stack import fit_stack
from jdfl_lightning.client.together import stacked_update
from jdfl_lightning.core.messages import FitResult, FitTask
from jdfl_lightning.core.tensors import Record, stack_rows
from jdfl_lightning.storage.records import load_record
from jdfl_lightning.ui.display import PlainDisplay

ALGORITHMS = ["FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON", "RobustFedAvg"]


def small_net(size: int) -> nn.Module:
    """A network of two layers without BatchNorm and dropout."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 12), nn.Tanh(), nn.Linear(12, 8))


def thrifty_net(size: int) -> nn.Module:
    """A network that uses an activation twice, and has a chain within a chain."""
    act = nn.Tanh()
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 12), act, nn.Sequential(nn.Linear(12, 8), act))


def normed(size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 4), nn.BatchNorm1d(4))


def dropping(size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * size * size, 4), nn.Dropout())


def setting(**settings: Any) -> Experiment:
    return experiment(**({"backbone": "test_vector.small_net", "lr": 0.1, "batch_size": 96} | settings))


@pytest.fixture
def _together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is trained one by one after all is an error."""

    def alone(runner: LocalRunner, tasks: Sequence[FitTask]) -> Any:
        raise AssertionError(f"{len(tasks)} clients are trained one by one")

    monkeypatch.setattr(LocalRunner, "fit", alone)


def weights_of(folder: str) -> dict[str, Tensor]:
    record, _ = load_record(max(Path(folder, "checkpoints").iterdir(), key=lambda file: int(file.stem)))
    return {f"{group}/{name}": tensor for group, tensors in record.items() for name, tensor in tensors.items()}


def agree(run: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(replace(run, run_dir="local", backend=LocalBackend()))
    with monkeypatch.context() as patch:
        patch.setattr(LocalRunner, "fit", lambda *args: pytest.fail("trained one by one"))
        fit(replace(run, run_dir="vector", backend=VectorBackend(group=3)))
    ours, theirs = weights_of("vector"), weights_of("local")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("algorithm", "supervision"), checkered(ALGORITHMS, ("base", "random")))
def test_same_weights_as_one_by_one(algorithm: str, supervision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phase 1, states of earlier rounds and the server's record too; 7 clients in groups of 3, 3 and 1."""
    data = DigitsDomains(size=8, num_clients=7)
    rule = getattr(algorithms, algorithm)()
    agree(setting(data=data, algorithm=rule, supervision=supervision, rounds=3, epochs=2), monkeypatch)


@pytest.mark.parametrize(
    "settings",
    every(
        3,
        [
            {"supervision": "graded", "momentum": 0.9, "weight_decay": 0.01},
            {
                "supervision": "hard",
                "head_lr": 0.25,
                "round_scheduler": Part(torch.optim.lr_scheduler.StepLR, step_size=1),
            },
            {"supervision": "uniform", "regularizers": [Agreement(weight=0.5)]},
            {"supervision": "graded", "data": DigitsDomains(size=8, num_clients=7, label_skew=0.3), "batch_size": 32},
            {"supervision": EM(kappa=50.0, warmup=0.0), "regularizers": [Balance(0.1)]},
            {"supervision": EM(warmup=0.0, draw=True), "algorithm": algorithms.FedProc()},
            {"supervision": EM(warmup=0.0, kappa=50.0), "algorithm": algorithms.FedDyn(), "head_lr": 2.0},
            {"supervision": Online(), "regularizers": [Prototype(0.1)]},
            {"supervision": Online(), "data": DigitsDomains(size=8, num_clients=7, label_skew=0.3), "batch_size": 32},
            {"supervision": "graded", "clustering": Clustering(epochs=1, labels="rotations")},
            {"supervision": "graded", "backbone": "test_vector.thrifty_net"},
            {"supervision": "graded", "backbone": "own_parts.doubled"},
        ],
    ),
)
def test_same_weights_with_other_settings(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    agree(setting(epochs=2, **settings), monkeypatch)


class Shrinking(algorithms.FedAvg):
    """Its clients change their gradients in a way of their own: by half, and by less from step to step."""

    def local(self, task: FitTask, state: Any) -> Any:
        return ShrinkingUpdate(task, state) if task.client else LocalUpdate(task, state)


class ShrinkingUpdate(LocalUpdate):
    def correct(self, params: dict[str, Tensor]) -> None:
        for param in params.values():
            assert param.grad is not None
            param.grad.mul_(0.5 + 0.1 * self.num_steps)


def test_a_correction_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called for each client, with the number of its steps; the first client of the group has none."""
    agree(setting(algorithm=Shrinking(), supervision="graded", epochs=2), monkeypatch)


@pytest.mark.parametrize(("hidden", "algorithm"), checkered((None, 6), ("FedDC", "MOON")))
def test_same_weights_on_features(hidden: int | None, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = {"backbone": "PaperCNN", "backbone_args": {"freeze": True, **({"hidden": hidden} if hidden else {})}}
    rule = getattr(algorithms, algorithm)()
    agree(setting(**network, algorithm=rule, supervision="random", rounds=3), monkeypatch)


def test_clients_with_different_numbers_of_steps() -> None:
    """Clients of 1 to 3 batches, the last of any size: each against a fit of its own, losses and steps too."""
    run = setting(data=DigitsDomains(size=8, num_clients=7, label_skew=0.3), supervision="base", epochs=3)
    run.data.deal(0)
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    tasks = [FitTask(client, 1, 0, weights, buffers) for client in range(7)]
    alone = [fit_client(workspace, task, {})[0] for task in tasks]
    assert len({result.num_steps for result in alone}) > 1
    fits = [begin_fit(workspace, task, {}) for task in tasks]
    for trained, member, result in zip(fit_stack(workspace, fits), fits, alone, strict=True):
        torch.testing.assert_close(trained, result.weights, rtol=1e-5, atol=1e-6)
        assert member.update.num_steps == result.num_steps
        assert member.update.mean_loss == pytest.approx(result.metrics["train/loss"], rel=1e-5)


@pytest.mark.parametrize("algorithm", ["FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC"])
def test_one_update_for_all_clients(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the bits that each client's own gives: weights, uploads, states and their norms, after 1 to 3 steps."""
    rule = getattr(algorithms, algorithm)()
    data = DigitsDomains(size=8, num_clients=7, label_skew=0.3)
    run = setting(data=data, algorithm=rule, supervision="base", epochs=3, head_lr=0.3)
    run.data.deal(0)
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    noise = torch.Generator().manual_seed(0)

    def noisy(record: Record) -> Record:
        return {
            group: {name: torch.randn(tensor.shape, generator=noise) for name, tensor in named.items()}
            for group, named in record.items()
        }

    server = rule.broadcast(noisy(rule.init_server(weights)))
    tasks = [FitTask(client, 1, 0, weights, buffers, server, weight=0.5 + client / 3) for client in range(7)]
    states = [noisy(rule.init_client(weights)) for _ in tasks]

    def answers() -> list[tuple[FitResult, Record]]:
        fits = [begin_fit(workspace, task, state) for task, state in zip(tasks, states, strict=True)]
        trained = fit_stack(workspace, fits)
        assert all((own.report is None) is own_updates for own in fits)
        return [end_fit(workspace, own, found, own.buffers, {}) for own, found in zip(fits, trained, strict=True)]

    own_updates = False
    together = answers()
    own_updates = True
    monkeypatch.setattr(stack, "stacked_update", lambda updates: None)
    assert len({result.num_steps for result, _ in together}) > 1
    for (ours, state), (theirs, expected) in zip(together, answers(), strict=True):
        torch.testing.assert_close(
            {"": ours.weights, **ours.upload}, {"": theirs.weights, **theirs.upload}, rtol=0, atol=0
        )
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
        assert ours.metrics == theirs.metrics
        assert (ours.num_steps, ours.keeps_state) == (theirs.num_steps, bool(states[0]))


def test_only_a_class_that_says_so_has_one_update_for_all() -> None:
    """A subclass may do anything in `begin` and `report`, and clients with other states are not alike."""

    class Own(LocalUpdate):
        pass

    task, state = FitTask(0, 1, 0, {}), {"c": {"w": torch.zeros(2)}}
    assert stacked_update([LocalUpdate(task, state), LocalUpdate(task, state)]) is not None
    assert stacked_update([Own(task, state), Own(task, state)]) is None
    assert stacked_update([LocalUpdate(task, state), Own(task, state)]) is None
    assert stacked_update([LocalUpdate(task, state), LocalUpdate(task, {})]) is None


def test_one_update_for_all_needs_one_model_and_no_step_of_its_own() -> None:
    """It begins with the first client's task, and each client's own update has not begun."""

    class Stacking(LocalUpdate):
        stacks: ClassVar[bool] = True

    class Correcting(Stacking):
        stacks: ClassVar[bool] = True

        def correct(self, params: dict[str, Tensor]) -> None:
            pass

    class Adding(Stacking):
        stacks: ClassVar[bool] = True

        def loss(self, task_loss: Tensor, features: Tensor, labels: Tensor) -> Tensor:
            return task_loss

    task = FitTask(0, 1, 0, {"w": torch.zeros(2)})
    assert stacked_update([Stacking(task, {}), Stacking(replace(task, client=1), {})]) is not None
    assert stacked_update([Stacking(task, {}), Stacking(replace(task, weights={"w": torch.ones(2)}), {})]) is None
    assert stacked_update([Stacking(task, {}), Stacking(replace(task, server={"c": {}}), {})]) is None
    assert stacked_update([Correcting(task, {}), Correcting(task, {})]) is None
    assert stacked_update([Adding(task, {}), Adding(task, {})]) is None


def test_one_update_has_each_clients_weight_and_state() -> None:
    """Whatever the order of the names, which a file may change."""
    task = FitTask(0, 1, 0, {"w": torch.zeros(2)})
    one = LocalUpdate(task, {"c": {"w": torch.zeros(2), "b": torch.ones(1)}})
    other = LocalUpdate(task, {"c": {"b": torch.full((1,), 3.0), "w": torch.full((2,), 2.0)}})
    other.weight = 0.25
    together = stacked_update([one, other])
    assert together is not None
    assert torch.equal(together.state["c"]["w"], torch.tensor([[0.0, 0.0], [2.0, 2.0]]))
    assert torch.equal(together.state["c"]["b"], torch.tensor([[1.0], [3.0]]))
    assert torch.as_tensor(together.weight).tolist() == [1.0, 0.25]


def test_rows_are_stacked_without_a_copy() -> None:
    """Only if they are the rows of one tensor in their order; a stack is the same either way."""
    rows = torch.arange(24.0).view(4, 2, 3)
    several: list[tuple[list[Tensor], bool]] = [
        (list(rows), True),
        (list(rows[1:3]), True),
        ([rows[0], rows[2]], False),
        (list(rows.flip(0)), True),
        (list(rows)[::-1], False),
        ([row.clone() for row in rows], False),
        ([*rows[2:], rows[3]], False),
        ([row.T for row in rows], False),
        (list(rows[:, 0, 0]), False),
        (list(torch.arange(3)), True),
        (list(torch.empty(3, 0)), False),
    ]
    for tensors, without in several:
        found = stack_rows(tensors)
        assert torch.equal(found, torch.stack(tensors))
        assert (found.data_ptr() == tensors[0].data_ptr()) is without or not found.numel()


@pytest.mark.usefixtures("_together")
def test_repeats_and_resumes_to_the_bit() -> None:
    run = setting(algorithm=algorithms.SCAFFOLD(), supervision="random", backend=VectorBackend(), rounds=4)
    fit(replace(run, run_dir="whole"))
    fit(replace(run, run_dir="again"))
    assert same("whole", "again")
    fit(replace(run, run_dir="parts", rounds=2))
    fit(replace(run, run_dir=None, resume="parts"))
    assert same("whole", "parts")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"optimizer": Part(torch.optim.Adam)}, "--optimizer is not SGD"),
        ({"lr_scheduler": Part(torch.optim.lr_scheduler.StepLR, step_size=1)}, "--lr_scheduler changes the rate"),
        ({"trainer": TrainerOptions(gradient_clip_val=1.0)}, "an option of --trainer is set"),
        ({"data": DigitsDomains(size=8, num_clients=4, augment=["RandomHorizontalFlip"])}, "--data.augment draws"),
        ({"backbone": "test_vector.normed"}, "copies can be stacked"),
        ({"backbone": "test_vector.dropping"}, "copies can be stacked"),
    ],
)
def test_what_cannot_be_stacked_is_refused(
    settings: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is said of the images: the error is not below a page of other things."""
    lr = {"lr": None} if "optimizer" in settings else {}
    with pytest.raises(InputError, match=reason) as error:
        fit(setting(**lr, **settings, backend=VectorBackend(), run_dir="run"), PlainDisplay())
    assert "\n" not in str(error.value)
    assert capsys.readouterr().out == "run folder: run\n"
    assert not Path("run").exists()


class Failing(algorithms.FedAvg):
    """The second client fails."""

    def local(self, task: FitTask, state: Any) -> Any:
        if task.client == 1 and task.round == 1:
            raise RuntimeError("no power")
        return super().local(task, state)


class Notes(RunCallback):
    """Keeps the notes of a run in a file."""

    def client_noted(self, round: int, client: int, note: str) -> None:
        with Path("notes").open("a") as out:
            out.write(f"{round} {client} {note}\n")


def test_a_client_that_fails_is_left_out() -> None:
    """Its group is trained one by one, and the run says so once."""
    changes = {"algorithm": Failing(), "supervision": "base", "backend": VectorBackend(group=2)}
    run = fit(setting(rounds=2, callbacks=[Notes()], run_dir="run", **changes))
    assert (run.metrics["refused"].tolist(), run.metrics["clients"].tolist()) == ([1, 0], [3, 4])
    assert Path("notes").read_text() == (
        "1 0 its group, and others that cannot be trained together, are trained one by one: RuntimeError: no power\n"
    )


class Watched(algorithms.FedAvg):
    """Its clients have a hook that only a Trainer calls."""

    def local(self, task: FitTask, state: Any) -> Any:
        return Watching(task, state)


class Watching(LocalUpdate):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Do nothing."""


def test_an_algorithm_that_cannot_be_stacked_says_so_once() -> None:
    run = setting(algorithm=Watched(), supervision="base", rounds=2, backend=VectorBackend(), callbacks=[Notes()])
    fit(replace(run, run_dir="vector"))
    assert Path("notes").read_text().splitlines() == [
        "1 0 its group, and others that cannot be trained together, are trained one by one: its algorithm acts between "
        "the steps of a fit"
    ]
