"""RayBackend: clients in parallel, on actors of a Ray cluster; the only import of ray, made when a run begins."""

from __future__ import annotations

import logging
import os
import pickle
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from jdfl_lightning.backends.base import RESET, Backend, Runner, describe, do_task, state_of
from jdfl_lightning.backends.dispatch import Dispatcher, GoneError, Job, Worker
from jdfl_lightning.backends.worker import encode, failure, receive, without_images
from jdfl_lightning.client.evaluation import evaluate
from jdfl_lightning.core.errors import InputError, notify, require, require_types, without_stop
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitTask
from jdfl_lightning.core.system import reuse_memory
from jdfl_lightning.core.tensors import Record
from jdfl_lightning.storage.checkpoint import ClientStates

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment

_PATIENCE = 60.0
"""Seconds without any actor after which the user gets a message."""
_STARTS = 3
"""Number of actors that may end in a row before any was ready."""


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "Expected Ray to be installed for --backend RayBackend: pip install 'jdfl-lightning[ray]'."
        ) from error
    return ray


@dataclass(frozen=True)
class RayBackend(Backend):
    """Clients in parallel, on actors of a Ray cluster; each builds its module and gets its images once.

    The results are those of the LocalBackend, to the bit on the CPU if a fit has as many threads.
    """

    address: str | None = None
    """The cluster: auto for the one that this machine belongs to, or host:port; null to start Ray on this machine."""
    actors: int | Literal["auto"] = "auto"
    """Clients that train at once; auto for as many as a round has and the cluster has room for."""
    cpus: int = 1
    """CPUs of a client, and its threads."""
    gpus: float = 0.0
    """GPUs of a client; a half lets two share one."""

    def __post_init__(self) -> None:
        require_types(self, "--backend.")
        require(self.actors == "auto" or self.actors > 0, "--backend.actors", "auto or positive", self.actors)
        require(self.cpus > 0, "--backend.cpus", "positive", self.cpus)
        require(self.gpus >= 0, "--backend.gpus", "0 or more", self.gpus)

    @contextmanager
    def open(self, experiment: Experiment, states: ClientStates) -> Iterator[Runner]:
        """Join the cluster, or start one, and start the actors."""
        with _joined(self.address) as ray:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            actors = self._count(nodes, experiment.clients_per_round)
            cluster, sizes = _Cluster(ray, self, experiment, states), experiment.data.client_sizes
            with closing(Dispatcher(lambda place: _Actor(cluster), cluster.wait, actors, sizes)) as runner:
                yield runner

    def _count(self, nodes: Sequence[Mapping[str, float]], clients: int) -> int:
        """Return the number of actors; raise an `InputError` if no machine of the cluster has room for one."""
        cpus, gpus = (max((node.get(kind, 0) for node in nodes), default=0) for kind in ("CPU", "GPU"))
        require(cpus >= self.cpus, "--backend.cpus", f"at most the {cpus:.0f} of one machine", self.cpus)
        require(gpus >= self.gpus, "--backend.gpus", f"at most the {gpus:g} of one machine", self.gpus)
        room = 0
        for node in nodes:
            share = int(node.get("CPU", 0) // self.cpus)
            room += min(share, int(node.get("GPU", 0) / self.gpus)) if self.gpus else share
        return min(room, clients) if self.actors == "auto" else self.actors


@contextmanager
def _joined(address: str | None) -> Iterator[Any]:
    """Join a cluster, or start one on this machine, unless this process has one; leave it only if joined here."""
    ray = _import_ray()
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options["include_dashboard"] = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"Expected --backend.address to be that of a Ray cluster but got {address}: {error}"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


class Clients:
    """An actor: builds its workspace once, then fits clients and evaluates models on request."""

    def enter(self, path: list[str]) -> None:
        """Add the server's import path here, as far as its folders exist."""
        sys.path += [folder for folder in path if folder not in sys.path and Path(folder).exists()]

    def prepare(self, experiment: Experiment, images: np.ndarray, threads: int) -> str:
        """Build the workspace; return why this actor cannot work, or nothing."""
        torch.set_num_threads(threads)
        reuse_memory()
        warnings.simplefilter("ignore")
        self._common: tuple[Any, dict[str, Any]] | None = None
        try:
            # shared by the actors of a machine, and read-only
            self._workspace = receive(experiment, torch.from_numpy(images))
        except Exception as error:
            return describe(error)
        return ""

    def do(self, kind: str, content: bytes, common: list[Any], state: bytes | None) -> np.ndarray:
        """Do a job; return (done, failed or storage), the result, and the client's new state if it keeps one.

        The reply is an array of bytes, which the object store passes on without a copy.
        """
        try:
            answer = encode(self._do(kind, pickle.loads(content), common, state))
        except Exception as error:
            answer = encode((*failure(error), None))
        return np.frombuffer(answer, np.uint8)

    def _do(self, kind: str, content: Any, common: list[Any], state: bytes | None) -> tuple[str, Any, Record | None]:
        if kind == "evaluate":
            return "done", evaluate(self._workspace, **content), None
        if self._common is None or self._common[0] != common[0]:
            self._common = common[0], pickle.loads(_import_ray().get(common[0]))
        task: FitTask = replace(content, **self._common[1])
        known = state_of(self._workspace, task, None if state is None else pickle.loads(state))
        result, after = do_task(self._workspace, task, known)
        return "done", result, after if result.keeps_state else None


class _Cluster:
    """Data shared by all actors, put into the object store once."""

    def __init__(self, ray: Any, options: RayBackend, experiment: Experiment, states: ClientStates) -> None:
        self.ray, self.states = ray, states
        self._class = ray.remote(num_cpus=options.cpus, num_gpus=options.gpus)(Clients)
        try:
            sent = ray.put(without_images(experiment))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"Expected settings that can be sent to Ray's actors but: {without_stop(error)}."
            ) from error
        images = ray.put(experiment.data.inputs.contiguous().numpy())
        self._settings = sent, images, options.cpus
        self._common: tuple[bytes, Any] | None = None
        self.failed_starts = 0
        """Number of actors in a row that ended before they were ready."""
        self._told = False

    def start(self) -> tuple[Any, Any]:
        """Start an actor; return it, and a reference that resolves once it is ready."""
        actor = self._class.remote()
        actor.enter.remote([str(Path(folder).absolute()) for folder in sys.path])
        return actor, actor.prepare.remote(*self._settings)

    def share(self, common: bytes | None) -> list[Any]:
        """Return a reference to the parts shared by a round's tasks, put into the object store once."""
        if common is None:
            return []
        if self._common is None or self._common[0] is not common:
            self._common = common, self.ray.put(common)
        return [self._common[1]]  # in a list: an actor fetches it when it is new

    def wait(self, workers: Sequence[_Actor]) -> list[Worker]:
        """Wait until some of the actors have answered or are gone."""
        by_answer, start = {worker.answer: worker for worker in workers}, time.monotonic()
        while True:
            answered, _ = self.ray.wait(list(by_answer), num_returns=1, timeout=1.0, fetch_local=False)
            if answered:
                return [by_answer[answer] for answer in answered]
            idle = not any(worker.ready for worker in workers) and time.monotonic() - start > _PATIENCE
            if idle and not self._told:
                self._told = True
                notify("Waiting for room on the Ray cluster: no actor could be started yet.")


class _Actor(Worker):
    """The server's handle of an actor."""

    def __init__(self, cluster: _Cluster) -> None:
        self._cluster = cluster
        self.ready = False
        self._actor, self.answer = cluster.start()
        self._note = ""

    def begin(self, job: Job) -> None:
        """Send a job, with the client's state."""
        state, self._note = None, ""
        if job.kind == "fit" and job.content.since and job.content.round != DISCOVERY_ROUND:
            known = self._cluster.states.recall(job.content.client, job.content.since)
            self._note = RESET if known is None else ""
            state = None if known is None else encode(known)
        common = self._cluster.share(job.common)
        self.answer = self._actor.do.remote(job.kind, encode(job.content), common, state)

    def take(self) -> tuple[str, Any] | None:
        """Receive a result, and save the client's state."""
        exceptions = self._cluster.ray.exceptions
        try:
            answer = self._cluster.ray.get(self.answer)
        except exceptions.RayTaskError as error:
            return ("failed" if self.ready else "unusable"), str(error)
        except exceptions.RayError as error:
            self._cluster.failed_starts += not self.ready
            if self._cluster.failed_starts >= _STARTS:
                raise InputError(f"Expected Ray's actors to start but {_STARTS} ended at once: {error}") from error
            raise GoneError from error
        if not self.ready:
            if answer:
                return "unusable", answer
            self.ready, self._cluster.failed_starts = True, 0
            return None
        kind, content, state = pickle.loads(answer)
        if self._note and kind == "done":
            content, self._note = replace(content, note=self._note), ""
        if state is not None and self.job is not None:
            self._cluster.states.save(self.job.content.client, self.job.content.round, state)
        return kind, content

    def end(self) -> str:
        """Kill the actor."""
        self._cluster.ray.kill(self._actor)
        return ""
