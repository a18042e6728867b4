"""The package's part of `peers.py`: `fit` as users call it, and the job that everybody does."""

from __future__ import annotations

import tempfile
from typing import ClassVar

import torch
from peer_job import BATCH, CLASSES, Job, Prepared, Rounds
from torch import Tensor

from jdfl_lightning import DomainDataModule, Experiment, LocalBackend, PoolBackend, RunCallback, VectorBackend, fit
from jdfl_lightning.backends import Backend
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.client.trainer import TrainerOptions
from jdfl_lightning.core.seeding import torch_generator
from jdfl_lightning.core.system import reuse_memory
from jdfl_lightning.server.state import ServerState

BACKENDS: dict[str, Backend] = {"local": LocalBackend(), "pool": PoolBackend(), "vector": VectorBackend()}


class Noise(DomainDataModule):
    """Noise in two domains, brighter from class to class; no pixel is like its neighbours, so that no maximum is a tie.

    Args:
        size: height and width.
        num_clients: clients, half of them in each domain.
        images: training images of each client.
    """

    domain_names = ("first", "second")
    class_names = tuple("abcdefg")

    def __init__(self, size: int, num_clients: int, images: int) -> None:
        super().__init__(size, num_clients, test_fraction=1 / 9)
        self.count = num_clients * images * 9 // 8

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the images."""
        places = torch.arange(self.count)
        labels = places % CLASSES
        noise = torch.randint(0, 128, (self.count, self.size, self.size, 3), generator=torch.Generator().manual_seed(0))
        pixels = (noise + 16 * labels.reshape(-1, 1, 1, 1)).to(torch.uint8)
        return pixels, labels, places * 2 // self.count


def experiment(job: Job, backend: Backend, run_dir: str | None = None) -> Experiment:
    """Return the settings of a job; the last round is evaluated, after its end was noted."""
    return Experiment(
        data=Noise(job.size, job.clients, job.images),
        backbone="PaperCNN" if job.backbone.endswith("PaperCNN") else job.backbone,
        supervision="base",
        rounds=job.rounds,
        client_fraction=1.0,
        epochs=1,
        batch_size=BATCH,
        lr=job.lr,
        evaluate_every=job.rounds,
        backend=backend,
        trainer=TrainerOptions(precision="bf16-mixed" if job.bf16 else "32-true"),
        callbacks=[Clock()],
        figures=False,
        run_dir=run_dir,
    )


def prepare(job: Job) -> Prepared:
    """Make the images, the order of every client's images in every round, and the first weights."""
    settings = experiment(job, LocalBackend())
    data = settings.data
    data.deal(settings.seed_everything)
    sizes = set(map(len, data.partition.clients))
    assert sizes == {job.images}, f"clients have {sizes} images"
    orders = [
        [
            indices[torch.randperm(len(indices), generator=torch_generator(0, "shuffle", round, client))]
            for client, indices in enumerate(data.partition.clients)
        ]
        for round in range(1, job.rounds + 1)
    ]
    return Prepared(job, data.images, data.labels, orders, Workspace(settings).initial(1)[0])


class Clock(RunCallback):
    """Takes down when each round is over, its checkpoint included."""

    rounds: ClassVar[Rounds]
    """Of the class, as a run uses a copy of a callback."""

    def round_aggregated(self, state: ServerState, metrics: dict[str, float]) -> None:
        """A round is over."""
        self.rounds.note(lambda: state.weights)


def run(job: Prepared, backend: str) -> Rounds:
    """Do the job."""
    reuse_memory()  # as the command line does
    Clock.rounds = Rounds(job.job.rounds)
    with tempfile.TemporaryDirectory() as folder:
        fit(experiment(job.job, BACKENDS[backend], f"{folder}/run"), progress=False)
    return Clock.rounds
