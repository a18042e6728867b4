"""Dispatcher: several workers at once, wherever they run; results in order, what fails is tried again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jdfl_lightning.backends.base import ATTEMPTS, Runner
from jdfl_lightning.backends.worker import encode
from jdfl_lightning.client.evaluation import Evaluation
from jdfl_lightning.core.errors import InputError, StorageError
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Tensors

HELD = 4
"""Results for each worker that may wait for an earlier one before no further client is begun."""


class GoneError(Exception):
    """A worker has ended, not of its own will."""


class Job:
    """Something that a worker is asked to do.

    Args:
        kind: ``fit`` or ``evaluate``.
        content: a `FitTask` without what it shares with the round's others; or the arguments of `evaluate`.
        done: takes the answer.
        failed: is told why there is none.
        common: what a fit shares with the round's others, sent to a worker once.
    """

    def __init__(
        self,
        kind: str,
        content: Any,
        done: Callable[[Any], None],
        failed: Callable[[str], None],
        common: bytes | None = None,
    ) -> None:
        self.kind, self.content, self.done, self.failed, self.common = kind, content, done, failed, common
        self.attempts = 0


class Worker(ABC):
    """Something that does one job at a time, elsewhere."""

    job: Job | None = None
    """What it is doing."""
    ready = True
    """Whether it can be given a job yet."""

    @abstractmethod
    def begin(self, job: Job) -> None:
        """Send a job; raise a `GoneError` if the worker is gone."""

    @abstractmethod
    def take(self) -> tuple[str, Any] | None:
        """Take a message: (done, failed, storage or unusable; what); nothing if it only says that the worker is there.

        Raise a `GoneError` if the worker is gone.
        """

    @abstractmethod
    def end(self) -> str:
        """End the worker, whatever it does; return how it ended if it had already, as in `` by signal 9``."""


class Dispatcher(Runner):
    """Hands jobs to workers, the longest first, and puts results back in order.

    Args:
        start: starts the worker of a place.
        wait: waits until some of the workers have a message, or are gone, and returns them.
        workers: number of places.
        sizes: images of each client, by which the time of its fit is estimated.
    """

    def __init__(
        self,
        start: Callable[[int], Worker],
        wait: Callable[[Sequence[Any]], Sequence[Worker]],
        workers: int,
        sizes: Sequence[int],
    ) -> None:
        self._start, self._wait, self._sizes = start, wait, sizes
        self.workers = [start(place) for place in range(workers)]
        self._again: deque[Job] = deque()  # evaluations, and what has to be tried again: before any further client

    def fit(self, tasks: Sequence[FitTask]) -> Iterator[FitResult | FitFailure]:
        """Fit clients in parallel; the server never holds more than a few results, however many clients there are."""
        if not tasks:
            return
        first = tasks[0]
        common = encode(
            {"weights": first.weights, "buffers": first.buffers, "server": first.server, "table": first.table}
        )
        results: dict[int, FitResult | FitFailure] = {}
        todo = deque(self._order(tasks))
        for due in range(len(tasks)):
            while True:
                while (worker := self._idle()) and todo and len(results) < HELD * len(self.workers):
                    place = todo.popleft()
                    bare = replace(tasks[place], weights={}, buffers={}, server={}, table=None)
                    self._begin(worker, self._fit_job(place, bare, results, common))
                if due in results:
                    break
                self._take()
            yield results.pop(due)

    def _fit_job(self, place: int, task: FitTask, results: dict[int, FitResult | FitFailure], common: bytes) -> Job:
        def done(result: FitResult) -> None:
            results[place] = result

        def failed(reason: str) -> None:
            results[place] = FitFailure(task.client, reason)

        return Job("fit", task, done, failed, common)

    def _order(self, tasks: Sequence[FitTask]) -> list[int]:
        """Return the places of the tasks as they are begun: at the end of a round, the longest fit first."""
        places = list(range(len(tasks)))
        end = max(0, len(places) - HELD * len(self.workers))
        return places[:end] + sorted(places[end:], key=lambda place: -self._sizes[tasks[place].client])

    def evaluate(self, models: Mapping[str, Tensors], buffers: Tensors, done: Callable[[Evaluation], None]) -> None:
        """Evaluate the models in the next worker that is free, while others fit."""

        def failed(reason: str) -> None:
            raise InputError(f"Expected the round's model to be evaluated but {reason}")

        self._again.append(Job("evaluate", {"models": dict(models), "buffers": buffers}, done, failed))

    def finish(self) -> None:
        """Wait until every worker is idle and every evaluation told."""
        self._idle()
        while self._again or any(worker.job is not None for worker in self.workers):
            self._take()
            self._idle()

    def _idle(self) -> Worker | None:
        """Return a worker that has nothing to do, once evaluations and repetitions have one."""
        for worker in self.workers:
            if worker.ready and worker.job is None:
                if not self._again:
                    return worker
                self._begin(worker, self._again.popleft())
        return None

    def _begin(self, worker: Worker, job: Job) -> None:
        try:
            worker.begin(job)
            worker.job = job
        except GoneError:  # it died while it was idle, not of the job
            self._replace(worker)
            self._again.appendleft(job)

    def _replace(self, worker: Worker) -> None:
        """Put a new worker in the place of one that died, and have what that one was at done again."""
        job, how = worker.job, worker.end()
        place = self.workers.index(worker)
        self.workers[place] = self._start(place)
        if job is not None:
            self._retry(job, f"its process was ended{how}.")

    def _retry(self, job: Job, reason: str) -> None:
        """Have a job done again, or give it up."""
        job.attempts += 1
        if job.attempts < ATTEMPTS:
            self._again.append(job)
        else:
            job.failed(reason)

    def _take(self) -> None:
        """Wait for workers and take what they answer."""
        awaited = [worker for worker in self.workers if worker.job is not None or not worker.ready]
        for worker in self._wait(awaited) if awaited else []:
            try:
                message = worker.take()
            except GoneError:
                self._replace(worker)
                continue
            if message is None:
                continue
            kind, answer = message
            if kind == "storage":
                raise StorageError(answer)
            if kind == "unusable":
                raise InputError(f"Expected a worker to start but: {answer}")
            job, worker.job = worker.job, None
            assert job is not None
            if kind == "done":
                job.done(answer)
            else:
                self._retry(job, answer)

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.end()
