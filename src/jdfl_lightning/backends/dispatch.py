"""Dispatcher: runs jobs on several workers, returns results in order, and retries failures."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from jdfl_lightning.backends.base import ATTEMPTS, Runner
from jdfl_lightning.backends.worker import encode
from jdfl_lightning.client.evaluation import Evaluation
from jdfl_lightning.core.errors import InputError, StorageError
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Tensors

HELD = 4
"""Finished results per worker that may wait for an earlier one before no further client is started."""

SHORT = 0.02
"""Seconds: a worker that does a shorter fit is sent the next one ahead, for which it would wait about as long.

Only clients with at most twice as many images as one whose fit was short are sent ahead, or behind one another.
"""


class GoneError(Exception):
    """A worker has ended unexpectedly."""


@dataclass(eq=False)
class Job:
    """A job for a worker."""

    kind: Literal["fit", "evaluate"]
    content: Any
    """A `FitTask` without the parts shared by all tasks of the round; or the arguments of `evaluate`."""
    done: Callable[[Any], None]
    """Called with the result, or with the `FitFailure` of a fit."""
    common: bytes | None = None
    """The parts shared by all fits of the round, sent to a worker once."""
    attempts: int = 0


class Worker(ABC):
    """A process, here or on another machine, that does one job at a time."""

    job: Job | None = None
    """What it is doing."""
    ahead: Job | None = None
    """What it does next."""
    since = 0.0
    """When it began its job."""
    ready = True
    """Whether it can be given a job yet."""

    @abstractmethod
    def begin(self, job: Job) -> None:
        """Send a job; raise a `GoneError` if the worker is gone."""

    def takes_ahead(self, common: bytes) -> bool:
        """Return whether it can be sent a fit while it does another; common: the parts shared by the round's fits."""
        return False

    @abstractmethod
    def take(self) -> tuple[str, Any] | None:
        """Receive a message: (done, failed, storage or unusable; content); None if it only means ready.

        Raise a `GoneError` if the worker is gone.
        """

    @abstractmethod
    def end(self) -> str:
        """End the worker, even during a job; if it had ended already, return how, as in `` by signal 9``."""


@dataclass(eq=False)
class Dispatcher(Runner):
    """Sends jobs to workers, the longest first, and puts results back in order."""

    start: Callable[[int], Worker]
    """Starts the worker with a given index."""
    wait: Callable[[Sequence[Any]], Sequence[Worker]]
    """Waits until some of the workers have a message, or are gone, and returns them."""
    num_workers: int
    sizes: Sequence[int]
    """Number of images of each client, to estimate the time of its fit."""

    def __post_init__(self) -> None:
        self.workers = [self.start(place) for place in range(self.num_workers)]
        self._again: deque[Job] = deque()  # evaluations and retries: before any further client
        self._short = 0  # the number of images whose fit is short, by the last fit

    def fit(self, tasks: Sequence[FitTask]) -> Iterator[FitResult | FitFailure]:
        """Fit clients in parallel; the server never holds more than a few results, however many clients there are."""
        if not tasks:
            return
        first = tasks[0]
        common = encode(
            {"weights": first.weights, "buffers": first.buffers, "server": first.server, "learned": first.learned}
        )
        results: dict[int, FitResult | FitFailure] = {}
        todo = deque(self._order(tasks))
        for due in range(len(tasks)):
            while True:
                while (
                    (worker := self._idle() or (todo and self._nearly_idle(common, tasks[todo[0]].client)) or None)
                    and todo
                    and len(results) < HELD * len(self.workers)
                ):
                    place = todo.popleft()
                    bare = replace(tasks[place], weights={}, buffers={}, server={}, learned={})
                    self._begin(worker, Job("fit", bare, partial(results.__setitem__, place), common))
                if due in results:
                    break
                self._take()
            yield results.pop(due)

    def _order(self, tasks: Sequence[FitTask]) -> list[int]:
        """Return the indices of the tasks in the order to start them: at the end of a round, the longest fit first."""
        places = list(range(len(tasks)))
        end = max(0, len(places) - HELD * len(self.workers))
        return places[:end] + sorted(places[end:], key=lambda place: -self.sizes[tasks[place].client])

    def evaluate(self, models: Mapping[str, Tensors], buffers: Tensors, done: Callable[[Evaluation], None]) -> None:
        """Evaluate the models in the next worker that is free, while others fit."""
        self._again.append(Job("evaluate", {"models": dict(models), "buffers": buffers}, done))

    def finish(self) -> None:
        """Wait until every worker is idle and every evaluation is done."""
        self._idle()
        while self._again or any(worker.job is not None for worker in self.workers):
            self._take()
            self._idle()

    def _idle(self) -> Worker | None:
        """Return an idle worker, after evaluations and retries have been given one."""
        for worker in self.workers:
            if worker.ready and worker.job is None:
                if not self._again:
                    return worker
                self._begin(worker, self._again.popleft())
        return None

    def _nearly_idle(self, common: bytes, client: int) -> Worker | None:
        """Return a worker that may be sent a client's fit ahead: both fits are short, and nothing else waits."""
        if self._again or self.sizes[client] > self._short:
            return None
        return next((one for one in self.workers if self._does_short(one) and one.takes_ahead(common)), None)

    def _does_short(self, worker: Worker) -> bool:
        job = worker.job if worker.ahead is None else None
        return job is not None and job.kind == "fit" and self.sizes[job.content.client] <= self._short

    def _begin(self, worker: Worker, job: Job) -> None:
        try:
            worker.begin(job)
            if worker.job is None:
                worker.job, worker.since = job, time.monotonic()
            else:
                worker.ahead = job
        except GoneError:  # it died while idle, not because of the job
            self._replace(worker)
            self._again.appendleft(job)

    def _replace(self, worker: Worker) -> None:
        """Replace a worker that died, and retry its job."""
        job, ahead, how = worker.job, worker.ahead, worker.end()
        place = self.workers.index(worker)
        self.workers[place] = self.start(place)
        if ahead is not None:  # it had not begun
            self._again.append(ahead)
        if job is not None:
            self._retry(job, f"its process was ended{how}.")

    def _retry(self, job: Job, reason: str) -> None:
        """Retry a job, or report its failure."""
        job.attempts += 1
        if job.attempts < ATTEMPTS:
            self._again.append(job)
        elif job.kind == "fit":
            job.done(FitFailure(job.content.client, reason))
        else:
            raise InputError(f"Expected the round's model to be evaluated but {reason}")

    def _take(self) -> None:
        """Wait for workers and process their messages."""
        awaited = [worker for worker in self.workers if worker.job is not None or not worker.ready]
        for worker in self.wait(awaited) if awaited else []:
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
            job, worker.job, worker.ahead = worker.job, worker.ahead, None
            assert job is not None
            now = time.monotonic()
            if job.kind == "fit":
                self._short = 2 * self.sizes[job.content.client] if now - worker.since < SHORT else 0
            worker.since = now
            if kind == "done":
                job.done(answer)
            else:
                self._retry(job, answer)

    def close(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.end()
