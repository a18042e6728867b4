"""PoolBackend: clients in parallel, in worker processes of this machine."""

from __future__ import annotations

import copy
import math
import os
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Literal

import torch

from jdfl_lightning.backends.base import ATTEMPTS, Backend, Runner
from jdfl_lightning.backends.local import LocalBackend
from jdfl_lightning.backends.worker import Parcel, Place, encode
from jdfl_lightning.checkpoint import ClientStates
from jdfl_lightning.data.base import no_progress
from jdfl_lightning.data.cache import ImageFile, image_file
from jdfl_lightning.errors import InputError, Note, StorageError, require
from jdfl_lightning.evaluation import Evaluation
from jdfl_lightning.messages import FitFailure, FitResult, FitTask
from jdfl_lightning.nursery import Nursery, dismiss_spare, nursery
from jdfl_lightning.tensors import Tensors

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment

_HELD = 4
"""Results for each worker that may wait for an earlier one before no further client is begun."""


@dataclass(frozen=True)
class PoolBackend(Backend):
    """Clients in parallel, in worker processes of this machine; on the CPU each has its share of the threads.

    The results are those of the LocalBackend, to the bit on the CPU if a fit has as many threads.
    """

    workers: int | Literal["auto"] = "auto"
    """Number of processes; auto for as many as should make a round fastest, or none where that saves less than a tenth
    (few threads to share, few clients in a round, or an odd number of them for two workers)."""
    threads: int | None = None
    """Threads of a worker; null to divide torch's (OMP_NUM_THREADS, or the cores) among the workers."""

    def __post_init__(self) -> None:
        require(self.workers == "auto" or self.workers > 0, "--backend.workers", "auto or positive", self.workers)
        require(self.threads is None or self.threads > 0, "--backend.threads", "positive", self.threads)

    @contextmanager
    def open(self, experiment: Experiment, states: ClientStates) -> Iterator[Runner]:
        """Start the workers; where there is nothing to gain from them, train in this process."""
        gpus = _gpus(experiment)
        workers = self._auto(experiment, gpus) if self.workers == "auto" else self.workers
        if workers == 1 and self.workers == "auto":
            dismiss_spare()
            with _limited(self.threads), LocalBackend().open(experiment, states) as local:
                yield local
            return
        threads = self.threads or max(1, torch.get_num_threads() // workers)
        with image_file(experiment.data.images) as images:
            try:
                parcels = [_pack(experiment, images, states, threads, gpu) for gpu in (range(gpus) if gpus else [None])]
            except _UnsendableError as error:
                if self.workers != "auto":
                    raise InputError(f"Expected clients to train in worker processes but {error}") from error
                warnings.warn(f"Clients train one after the other: {error}", Note, stacklevel=2)
                dismiss_spare()
                with LocalBackend().open(experiment, states) as local:
                    yield local
                return
            files = [images.file] if isinstance(images.file, int) else []
            sizes = [len(indices) for indices in experiment.data.partition.clients]
            with nursery() as source:

                def start(place: int) -> _Worker:
                    return _Worker(source, parcels[place % len(parcels)], files)

                pool = PoolRunner(start, workers, sizes)
                try:
                    yield pool
                finally:
                    pool.close()

    def _auto(self, experiment: Experiment, gpus: int) -> int:
        if os.name != "posix":
            return 1
        clients, accelerator = experiment.clients_per_round, experiment.trainer.accelerator
        if gpus:
            return min(clients, gpus)
        on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.backends.mps.is_available())
        return best_workers(clients, torch.get_num_threads(), self.threads) if on_cpu else 1


@contextmanager
def _limited(threads: int | None) -> Iterator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def best_workers(clients: int, cores: int, threads: int | None = None) -> int:
    """Return the number of workers that should make a round fastest; 1 if none saves a tenth of the time.

    As measured, t threads train t ** 0.6 times as fast as one; all else is whole rounds of clients.

    Args:
        clients: participants of a round.
        cores: threads to share.
        threads: of a worker, if that is given.

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


def _gpus(experiment: Experiment) -> int:
    """Return how many GPUs workers can share: none if the user chose one, or if clients train on the CPU."""
    wanted = experiment.trainer.accelerator in ("auto", "gpu", "cuda") and experiment.trainer.devices == 1
    return torch.cuda.device_count() if wanted else 0


class _UnsendableError(Exception):
    """The settings hold something that another process cannot have."""


def _pack(experiment: Experiment, images: ImageFile, states: ClientStates, threads: int, gpu: int | None) -> bytes:
    """Return what a worker has to know, as the message to it."""
    data = copy.copy(experiment.data)
    data.progress = no_progress
    del data.images
    trainer = experiment.trainer if gpu is None else replace(experiment.trainer, devices=f"[{gpu}]")
    sent = replace(experiment, data=data, backend=LocalBackend(), logger=False, trainer=trainer)
    try:
        parcel = encode(Parcel(sent, images, states, threads))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _UnsendableError(f"they cannot be sent the settings: {error}.") from error
    if b"__main__" in parcel:
        raise _UnsendableError("they cannot import what a script or a notebook defines; put it into a module.")
    return parcel


class _Job:
    """Something that a worker is asked to do.

    Args:
        request: the message to the worker.
        done: takes the answer.
        failed: is told why there is none.
        common: what the request shares with others, sent to a worker once.
    """

    def __init__(
        self, request: bytes, done: Callable[[Any], None], failed: Callable[[str], None], common: bytes | None = None
    ) -> None:
        self.request, self.done, self.failed, self.common = request, done, failed, common
        self.attempts = 0


class _Worker:
    """A process, the connection to it, and what it is doing."""

    def __init__(self, source: Nursery, parcel: bytes, files: Sequence[int]) -> None:
        self._source = source
        self.connection = source.fork(files)
        self.job: _Job | None = None
        self._parcel: bytes | None = parcel
        self._common: bytes | None = None
        self._pid: int | None = None

    def begin(self, job: _Job) -> None:
        """Send a job; raise an `OSError` if the worker is gone."""
        self.job = job
        if self._parcel is not None:
            self.connection.send_bytes(encode(Place.here()))
            self.connection.send_bytes(self._parcel)
            self._parcel = None
        if job.common is not None and job.common is not self._common:
            self.connection.send_bytes(job.common)
            self._common = job.common
        self.connection.send_bytes(job.request)

    def take(self) -> tuple[str, Any] | None:
        """Take a message; nothing if it only says that the worker is there. Raise if the worker is gone."""
        message = pickle.loads(self.connection.recv_bytes())
        if isinstance(message, int):
            self._pid = message
            return None
        kind, answer = message
        return kind, answer

    def end(self) -> int | None:
        """Hang up, which ends the process whatever it does; return its exit code, if known."""
        self.connection.close()
        pid, self._pid = self._pid, None
        return None if pid is None else self._source.exit_code(pid, timeout=5)


class PoolRunner(Runner):
    """Hands jobs to workers, the longest first, and puts results back in order.

    Args:
        start: starts the worker of a place.
        workers: number of places.
        sizes: images of each client, by which the time of its fit is judged.
    """

    def __init__(self, start: Callable[[int], _Worker], workers: int, sizes: Sequence[int]) -> None:
        self._start, self._sizes = start, sizes
        self._workers = [start(place) for place in range(workers)]
        self._again: deque[_Job] = deque()  # evaluations, and what has to be tried again: before any further client

    def fit(self, tasks: Sequence[FitTask]) -> Iterator[FitResult | FitFailure]:
        """Fit clients in parallel; the server never holds more than a few results, however many clients there are."""
        if not tasks:
            return
        first = tasks[0]
        common = {"weights": first.weights, "buffers": first.buffers, "server": first.server, "table": first.table}
        shared = encode(("common", common))
        results: dict[int, FitResult | FitFailure] = {}
        todo = deque(self._order(tasks))
        for due in range(len(tasks)):
            while True:
                while (worker := self._idle()) and todo and len(results) < _HELD * len(self._workers):
                    place = todo.popleft()
                    bare = replace(tasks[place], weights={}, buffers={}, server={}, table=None)
                    self._begin(worker, self._fit_job(place, bare, results, shared))
                if due in results:
                    break
                self._take()
            yield results.pop(due)

    def _fit_job(self, place: int, task: FitTask, results: dict[int, FitResult | FitFailure], shared: bytes) -> _Job:
        def done(result: FitResult) -> None:
            results[place] = result

        def failed(reason: str) -> None:
            results[place] = FitFailure(task.client, reason)

        return _Job(encode(("fit", task)), done, failed, shared)

    def _order(self, tasks: Sequence[FitTask]) -> list[int]:
        """Return the places of the tasks as they are begun: at the end of a round, the longest fit first."""
        places = list(range(len(tasks)))
        end = max(0, len(places) - _HELD * len(self._workers))
        return places[:end] + sorted(places[end:], key=lambda place: -self._sizes[tasks[place].client])

    def evaluate(self, models: Mapping[str, Tensors], buffers: Tensors, done: Callable[[Evaluation], None]) -> None:
        """Judge the models in the next worker that is free, while others fit."""
        request = encode(("evaluate", {"models": dict(models), "buffers": buffers}))

        def failed(reason: str) -> None:
            raise InputError(f"Expected the round's model to be evaluated but {reason}")

        self._again.append(_Job(request, done, failed))

    def finish(self) -> None:
        """Wait until every worker is idle and every evaluation told."""
        while self._idle() is None or any(worker.job is not None for worker in self._workers):
            self._take()

    def _idle(self) -> _Worker | None:
        """Return a worker that has nothing to do, once evaluations and repetitions have one."""
        for worker in self._workers:
            if worker.job is None:
                if not self._again:
                    return worker
                self._begin(worker, self._again.popleft())
        return None

    def _begin(self, worker: _Worker, job: _Job) -> None:
        try:
            worker.begin(job)
        except OSError:  # it died while it was idle, not of the job
            worker.job = None
            self._replace(worker)
            self._again.appendleft(job)

    def _replace(self, worker: _Worker) -> None:
        """Put a new worker in the place of one that died, and have what that one was at done again."""
        job, code = worker.job, worker.end()
        place = self._workers.index(worker)
        self._workers[place] = self._start(place)
        if job is not None:
            by = f" by signal {-code}, as when memory runs out" if code and code < 0 else ""
            self._retry(job, f"its process was ended{by}.")

    def _retry(self, job: _Job, reason: str) -> None:
        """Have a job done again, or give it up."""
        job.attempts += 1
        if job.attempts < ATTEMPTS:
            self._again.append(job)
        else:
            job.failed(reason)

    def _take(self) -> None:
        """Wait for workers and take what they answer."""
        busy = {worker.connection: (worker, worker.job) for worker in self._workers if worker.job is not None}
        for connection in wait(list(busy)) if busy else []:
            worker, job = busy[connection]  # type: ignore[index]
            try:
                message = worker.take()
            except (EOFError, OSError):
                self._replace(worker)
                continue
            if message is None:
                continue
            kind, answer = message
            if kind == "storage":
                raise StorageError(answer)
            if kind == "unusable":
                raise InputError(f"Expected a worker process to start but: {answer}")
            worker.job = None
            if kind == "done":
                job.done(answer)
            else:
                self._retry(job, answer)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()
