"""Small things that several tests need."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from jdfl_lightning import (
    SCAFFOLD,
    Clustering,
    DigitsDomains,
    DomainDataModule,
    Experiment,
    FedAvg,
    LocalBackend,
    LocalUpdate,
    RoundReport,
    RunCallback,
    fit,
)
from jdfl_lightning.backends.local import LocalRunner
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.config import as_dict
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Record, Tensors
from jdfl_lightning.data.partition import Partition
from jdfl_lightning.server.run import discover
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.storage.checkpoint import ClientStates
from jdfl_lightning.storage.folder import SavedRun, read_run
from jdfl_lightning.storage.records import load_record
from jdfl_lightning.storage.trust import sign
from jdfl_lightning.ui.display import Display

if TYPE_CHECKING:
    from hypothesis import settings


def digits(num_clients: int = 4) -> DigitsDomains:
    """Real digits at 8 px, dealt with seed 0: a network trains on all of them in well under a second."""
    data = DigitsDomains(size=8, num_clients=num_clients)
    data.deal(0)
    return data


def experiment(**settings: Any) -> Experiment:
    """A run of a second.

    A client has 359 or 360 images: a whole batch and a smaller one in an epoch, and one epoch in Phase 1. Most of the
    time of a step is overhead, so that smaller batches or more epochs would cost several times as much.
    """
    defaults: dict[str, Any] = {
        "data": digits(),
        "backbone": "helpers.tiny_net",
        "rounds": 2,
        "epochs": 1,
        "batch_size": 192,
        "client_fraction": 1.0,
        "num_domains": 3,
        "clustering": Clustering(epochs=1),
        "backend": LocalBackend(),
    }
    return Experiment(**(defaults | settings))


def until(condition: Callable[[], Any], seconds: float = 300, what: str = "") -> Any:
    """Wait until something holds and return it; how long that may take is for a machine with much else to do."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(what or getattr(condition, "__qualname__", ""))
        time.sleep(0.05)
    return found


def checkered(rows: Sequence[Any], columns: Sequence[Any], every: int = 2) -> list[Any]:
    """All pairs as parameters of a test, for `make check` only so many that each row and each column is there."""
    import pytest  # not for worker processes, which import networks from here

    return [
        pytest.param(one, other, marks=[pytest.mark.slow] * ((row + column) % every != 0))
        for row, one in enumerate(rows)
        for column, other in enumerate(columns)
    ]


def every(number: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which `make check` takes the first and every so many after it."""
    import pytest

    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=[pytest.mark.slow] * (place % number != 0)) for place, row in enumerate(rows)]


def examples(number: int, **others: Any) -> settings:
    """Settings of a test with random examples: in `make test` so many, in `make check` a quarter, and 5 at least."""
    import hypothesis  # not for worker processes either

    share = hypothesis.settings().max_examples / 100
    return hypothesis.settings(max_examples=max(min(number, 5), int(number * share)), **others)


def environment() -> dict[str, str]:
    """Variables of a process that finds these helpers, and the package where this process does."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@functools.cache
def _shelf() -> tempfile.TemporaryDirectory[str]:
    """Where this process keeps what it has trained for `finished` and `discovered`."""
    return tempfile.TemporaryDirectory(prefix="finished-")


def _copied(make: Callable[[Experiment], Path], run_dir: str, settings: dict[str, Any]) -> Path:
    """A copy of the folder that a command leaves, with the signature of the test's own user; it is made once."""
    wanted = experiment(**settings)
    told = make.__name__ + json.dumps(as_dict(wanted), sort_keys=True)
    kept = Path(_shelf().name) / hashlib.sha256(told.encode()).hexdigest()
    if not kept.exists():
        make(replace(wanted, run_dir=str(kept.with_suffix(".new")))).rename(kept)
    shutil.copytree(kept, run_dir)
    config = Path(run_dir) / "config.yaml"
    config.write_bytes(sign(config.read_bytes().partition(b"\n")[2]))
    return Path(run_dir)


def _fitted(run: Experiment) -> Path:
    return fit(run).folder


def finished(run_dir: str, **settings: Any) -> SavedRun:
    """A run as ``fit(experiment(run_dir=..., ...))`` leaves it, for tests of what comes after.

    A process of pytest trains it once and gives each test a copy, with the signature of the test's own user.
    """
    return read_run(_copied(_fitted, run_dir, settings))


def discovered(run_dir: str, **settings: Any) -> Path:
    """The same of ``discover(experiment(run_dir=..., ...))``."""
    return _copied(discover, run_dir, settings)


def targets(table: Tensor) -> Record:
    """What clients are sent by a supervision that is a table."""
    return {"supervision": {"table": table}}


class Watched(LocalRunner):
    """A local runner that remembers all tasks and results, a list for each round."""

    def __init__(self, workspace: Workspace, states: ClientStates) -> None:
        super().__init__(workspace, states)
        self.tasks: list[list[FitTask]] = []
        self.results: list[list[FitResult]] = []

    def fit(self, tasks: Sequence[FitTask]) -> Iterator[FitResult | FitFailure]:
        self.tasks.append(list(tasks))
        self.results.append([])
        for result in super().fit(tasks):
            assert isinstance(result, FitResult), result
            self.results[-1].append(result)
            yield result


@dataclass(frozen=True)
class Told:
    """What a callback is told of a round that was run."""

    state: ServerState
    metrics: Mapping[str, float]


class Reports(RunCallback):
    """Collects what is told of rounds."""

    def __init__(self) -> None:
        self.all: list[Told] = []

    def round_evaluated(self, report: RoundReport) -> None:
        assert report.state is not None
        self.all.append(Told(report.state, report.row))


def contents(folder: str) -> dict[str, Any]:
    """All that a run leaves, but for times and pictures."""
    files = [file for file in Path(folder).rglob("*") if file.is_file() and file.suffix != ".png"]
    found: dict[str, Any] = {str(f.relative_to(folder)): f.read_bytes() for f in files if f.name != "metrics.csv"}
    rows = read_run(Path(folder)).rows
    found["rows"] = [{n: str(v) for n, v in row.items() if not n.startswith("time/")} for row in rows]  # NaN is NaN
    for name in [name for name in found if name.startswith("checkpoints/")]:  # times are in it
        record, about = load_record(Path(folder) / name)
        about["metrics"] = {n: str(v) for n, v in about["metrics"].items() if not n.startswith("time/")}
        found[name] = about, {f"{g}/{n}": t.tolist() for g, ts in record.items() for n, t in ts.items()}
    return found


def same(first: str, second: str) -> bool:
    """Whether two runs left the same, whoever trained the clients and whatever their settings say of that."""
    ours, theirs = contents(first), contents(second)
    for found in (ours, theirs):
        found["config.yaml"] = b""
        for name in [name for name in found if name.startswith("checkpoints/")]:
            found[name][0].pop("settings")
        if not ("evaluation.json" in ours and "evaluation.json" in theirs):  # one has its images at sites
            for name in ("data.json", "evaluation.json", "confusion.csv", "clients.csv"):
                found.pop(name, None)
    return ours == theirs


class Lines(Display):
    """Collects what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


class Mortal(FedAvg):
    """FedAvg whose client 2 kills its process in round 1, as often as a folder has files named life."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def local(self, task: FitTask, state: dict[str, Tensors]) -> LocalUpdate:
        if task.client == 2 and task.round == 1 and (lives := sorted(Path(self.folder).glob("life*"))):
            lives[0].unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local(task, state)


def tiny_net(size: int, stride: int = 2) -> nn.Module:
    """A backbone of two conv blocks that any size fits; with a stride of 1 it takes twice as long and learns sooner."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=stride), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(16 * (-(-size // stride)) ** 2, 12),
        nn.ReLU(),
    )


def batch_norm_net(size: int) -> nn.Module:
    """A backbone with buffers: running statistics and an integer counter."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())


def dropout_net(size: int) -> nn.Module:
    """A backbone that draws at random while it trains."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5))


def frozen_net(size: int) -> nn.Module:
    """A backbone whose convolution is not trained."""
    backbone = tiny_net(size)
    for parameter in backbone.get_submodule("0").parameters():
        parameter.requires_grad_(False)
    return backbone


def picture_net(size: int) -> nn.Module:
    """Not a backbone: gives maps instead of a feature vector."""
    return nn.Conv2d(3, 8, 3)


class ScalarNet(nn.Module):
    """One parameter x, 0 at first, which is the feature of every image."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        return self.x.expand(len(images), 1)


def scalar_net(size: int) -> nn.Module:
    """A backbone with one parameter."""
    return ScalarNet()


class ToyData(DomainDataModule):
    """Grey pictures in one domain, as many for each client as asked; for quadratic losses that do not look at them."""

    domain_names = ("only",)
    class_names = ("a", "b")

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(size=1, num_clients=len(sizes), test_fraction=0.5)
        self.sizes = sizes

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        count = sum(self.sizes) + 2
        labels = torch.arange(count) % 2
        return torch.zeros(count, 1, 1, 3, dtype=torch.uint8), labels, torch.zeros_like(labels)

    def deal(self, seed: int) -> Partition:
        self.images, self.labels, self.domains = self.load()
        *clients, test = torch.arange(len(self.labels)).split([*self.sizes, 2])
        self.partition = Partition(list(clients), [0] * len(clients), [test])
        return self.partition


class Patient(SCAFFOLD):
    """SCAFFOLD whose clients say that they begin and wait for each other, so that something can happen to one.

    Client 1 begins round 2 and waits for a file ``go``; client 0 waits in round 3 for a file ``back``. With ``absent``
    nobody waits, and client 1 fails in rounds 2 and 3: what a run looks like if its workspace is away.
    """

    def __init__(self, folder: str, absent: bool = False) -> None:
        super().__init__()
        self.folder, self.absent = folder, absent

    def local(self, task: FitTask, state: dict[str, Tensors]) -> LocalUpdate:
        if self.absent:
            if task.client == 1 and task.round in (2, 3):
                raise RuntimeError("away")
        elif (task.client, task.round) in ((1, 2), (0, 3)):
            awaited = Path(self.folder) / ("go" if task.client == 1 else "back")
            (Path(self.folder) / f"client{task.client}-begun").touch()
            until(awaited.exists)
        return super().local(task, state)


class Waiting(FedAvg):
    """FedAvg whose clients say in the middle of a fit that they are there, and wait for a file ``go``.

    Args:
        folder: of ``go``, and of a file ``begun`` and the client's number.
        clients: who waits.
        round: when.
    """

    def __init__(self, folder: str, clients: Sequence[int] = (1,), round: int = 2) -> None:
        super().__init__()
        self.folder, self.clients, self.round = folder, clients, round

    def local(self, task: FitTask, state: dict[str, Tensors]) -> LocalUpdate:
        if task.client in self.clients and task.round == self.round:
            return WaitingUpdate(task, state, Path(self.folder))
        return super().local(task, state)


class WaitingUpdate(LocalUpdate):
    """The waiting in a step of the optimizer."""

    def __init__(self, task: FitTask, state: dict[str, Tensors], folder: Path) -> None:
        super().__init__(task, state)
        self.folder = folder

    def correct(self, params: Tensors) -> None:
        (self.folder / f"begun{self.task.client}").touch()
        until((self.folder / "go").exists)
