"""PoolBackend: clients in parallel, in worker processes of this machine."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any, Literal

import torch

from jdfl_lightning.backends.base import Backend, Runner
from jdfl_lightning.backends.dispatch import Dispatcher, GoneError, Job, Worker
from jdfl_lightning.backends.local import LocalBackend, limited_threads
from jdfl_lightning.backends.worker import WorkerSetup, encode, start_worker, without_images
from jdfl_lightning.core.errors import InputError, notify, require, require_types
from jdfl_lightning.data.cache import ImageFile, image_file
from jdfl_lightning.storage.checkpoint import ClientStates

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


@dataclass(frozen=True)
class PoolBackend(Backend):
    """Clients in parallel, in worker processes of this machine; on the CPU each has its share of the threads.

    The results are those of the LocalBackend, to the bit on the CPU if a fit has as many threads.
    """

    workers: int | Literal["auto"] = "auto"
    """Number of processes; auto for as many as should make a round fastest, or none where that saves less than a tenth
    (few threads to share, few clients in a round, or an odd number of them for two workers)."""
    threads: int | None = None
    """Threads of a worker; null to divide torch's (OMP_NUM_THREADS, or the cores) among the workers, or for one where
    clients train on features."""

    def __post_init__(self) -> None:
        require_types(self, "--backend.")
        require(self.workers == "auto" or self.workers > 0, "--backend.workers", "auto or positive", self.workers)
        require(self.threads is None or self.threads > 0, "--backend.threads", "positive", self.threads)

    @contextmanager
    def open(self, experiment: Experiment, states: ClientStates) -> Iterator[Runner]:
        """Start the workers; where there is nothing to gain from them, train in this process."""
        # none if the user chose one, or if clients train on the CPU
        shared = experiment.trainer.accelerator in ("auto", "gpu", "cuda") and experiment.trainer.devices == 1
        gpus = torch.cuda.device_count() if shared else 0
        workers = self._auto(experiment, gpus) if self.workers == "auto" else self.workers
        if workers == 1 and self.workers == "auto":
            with limited_threads(self.threads), LocalBackend().open(experiment, states) as local:
                yield local
            return
        on_features = experiment.data.features is not None  # steps are too small for several threads
        threads = self.threads or (1 if on_features else max(1, torch.get_num_threads() // workers))
        with image_file(experiment.data.inputs) as images:
            pool: Dispatcher | None = None
            try:
                setups = [_pack(experiment, images, states, threads, gpu) for gpu in (range(gpus) if gpus else [None])]

                def start(place: int) -> Worker:
                    return _Process(setups[place % len(setups)], images)

                pool = Dispatcher(start, wait_for, workers, experiment.data.client_sizes)
            except _NoWorkersError as error:
                if self.workers != "auto":
                    raise
                notify(f"Clients train one after the other: {error.reason}")
            with LocalBackend().open(experiment, states) if pool is None else closing(pool) as runner:
                yield runner

    def _auto(self, experiment: Experiment, gpus: int) -> int:
        if os.name != "posix":
            return 1
        clients, accelerator = experiment.clients_per_round, experiment.trainer.accelerator
        if gpus:
            return min(clients, gpus)
        elsewhere = torch.backends.mps.is_available() or torch.cuda.device_count() > 0
        on_cpu = accelerator == "cpu" or (accelerator == "auto" and not elsewhere)
        if on_cpu and experiment.data.features is not None:
            return min(clients, torch.get_num_threads())
        return best_workers(clients, torch.get_num_threads(), self.threads) if on_cpu else 1


def best_workers(clients: int, cores: int, threads: int | None = None) -> int:
    """Return the number of workers that should make a round fastest; 1 if none saves a tenth of the time.

    As measured, t threads train t ** 0.6 times as fast as one; each worker trains its clients one after the other.

    Args:
        clients: participants of a round.
        cores: threads to share.
        threads: threads of a worker, if given.

    >>> [best_workers(clients, cores=2) for clients in (1, 2, 3, 4, 5, 10)]
    [1, 2, 1, 2, 1, 2]
    >>> best_workers(clients=5, cores=16), best_workers(clients=96, cores=16)
    (5, 16)
    """

    def seconds(workers: int) -> float:
        speed: float = (threads or cores // workers) ** 0.6
        return math.ceil(clients / workers) / speed

    best = min(range(1, min(clients, cores // (threads or 1)) + 1), key=seconds, default=1)
    return best if seconds(best) <= 0.9 * clients / cores**0.6 else 1


class _NoWorkersError(InputError):
    """Clients cannot be trained in other processes."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"Expected clients to train in worker processes but {reason}")
        self.reason = reason


def _pack(experiment: Experiment, images: ImageFile, states: ClientStates, threads: int, gpu: int | None) -> bytes:
    """Return a worker's setup as an encoded message."""
    trainer = experiment.trainer if gpu is None else replace(experiment.trainer, devices=f"[{gpu}]")
    sent = replace(without_images(experiment), trainer=trainer)
    try:
        setup = encode(WorkerSetup(sent, images, states, threads))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _NoWorkersError(f"they cannot be sent the settings: {error}.") from error
    if b"__main__" in setup:
        raise _NoWorkersError("they cannot import what a script or a notebook defines; put it into a module.")
    return setup


class _Process(Worker):
    """A process of this machine, and the connection to it."""

    def __init__(self, setup: bytes, images: ImageFile) -> None:
        try:
            self.process, self.connection = start_worker(setup)
        except (OSError, EOFError, AssertionError) as error:  # the last: a daemonic process may not have children
            hint = " Set TMPDIR to a folder with a shorter path." if "path too long" in str(error) else ""
            raise _NoWorkersError(f"none could be started: {error}.{hint}") from error
        self._common: bytes | None = None
        if isinstance(images.file, int):
            with suppress(OSError):  # it has ended already, as its first job will show
                send_handle(self.connection, images.file, self.process.pid)

    def begin(self, job: Job) -> None:
        """Send the job, and before it the parts shared by the round's tasks, if the worker does not have them yet."""
        try:
            if job.common is not None and job.common is not self._common:
                self.connection.send_bytes(encode(("common", job.common)))
                self._common = job.common
            self.connection.send_bytes(encode((job.kind, job.content)))
        except OSError as error:
            raise GoneError from error

    def takes_ahead(self, common: bytes) -> bool:
        """Return whether it has all but the task: to send more while it sends its answer, both would wait."""
        return self.job is not None and common is self._common

    def take(self) -> tuple[str, Any]:
        """Receive a message."""
        try:
            kind, answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise GoneError from error
        return kind, answer

    def end(self) -> str:
        """Close the connection, which ends the process even during a job."""
        self.connection.close()
        self.process.join(timeout=5)
        code = self.process.exitcode
        return f" by signal {-code}, as when memory runs out" if code and code < 0 else ""


def wait_for(workers: Sequence[_Process]) -> list[_Process]:
    """Wait until some of the workers have sent a message or closed their connection."""
    by_connection = {worker.connection: worker for worker in workers}
    return [by_connection[connection] for connection in wait(list(by_connection))]  # type: ignore[index]
