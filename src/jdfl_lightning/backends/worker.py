"""A worker of the pool: a process that builds its workspace once, then fits and evaluates what it is sent."""

from __future__ import annotations

import copy
import io
import os
import pickle
import select
import signal
import sys
import threading
import warnings
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from jdfl_lightning.backends.base import describe, fit_with_state
from jdfl_lightning.backends.local import LocalBackend
from jdfl_lightning.client.evaluation import evaluate
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.core.errors import StorageError
from jdfl_lightning.core.memory import reuse_memory
from jdfl_lightning.data.base import no_progress
from jdfl_lightning.data.cache import ImageFile
from jdfl_lightning.storage.checkpoint import ClientStates

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


def _from_bytes(content: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(content).view(dtype).reshape(shape)


def _as_bytes(tensor: Tensor) -> tuple[Any, ...]:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _from_bytes, (content, tensor.dtype, tuple(tensor.shape))


def encode(message: object) -> bytes:
    """Pickle a message with its tensors as plain bytes: no shared memory that a crash could leave behind."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=5)
    pickler.dispatch_table = {Tensor: _as_bytes}
    pickler.dump(message)
    return out.getvalue()


@dataclass(frozen=True)
class WorkerSetup:
    """All that a worker needs to know, sent once."""

    experiment: Experiment
    """The settings; its data has been dealt out and holds no images."""
    images: ImageFile
    """The file to map them from; one without a name is sent after the setup."""
    states: ClientStates
    """Where clients keep what they remember."""
    threads: int


def block_group_signals() -> set[int | signal.Signals]:
    """Block what a terminal or a job queue sends to all processes at once: the server decides when workers end.

    Returns:
        The signals that were blocked before.
    """
    return signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM))


def _watch(connection: Connection) -> None:
    """End the process as soon as the other end hangs up, however that comes, even in the middle of a fit."""
    watch = select.poll()
    watch.register(connection.fileno(), 0)  # a hang-up is told without being asked for
    watch.poll()
    os._exit(0)


def _next(connection: Connection) -> Any:
    """Return the next message; if the other end has hung up, leave."""
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        os._exit(0)


def _send(connection: Connection, message: object) -> None:
    """Send a message; if the other end has hung up, leave."""
    try:
        connection.send_bytes(encode(message))
    except ConnectionError:
        os._exit(0)


def without_images(experiment: Experiment) -> Experiment:
    """Return settings as another process needs them: with the data dealt out, and the images left for it to map."""
    data = copy.copy(experiment.data)
    data.progress = no_progress
    del data.images
    return replace(experiment, data=data, backend=LocalBackend(), logger=False)


def failure(error: Exception) -> tuple[str, str]:
    """Return what kind of failure an error is, storage or failed, and how it is told."""
    kind = "storage" if isinstance(error, StorageError) else "failed"
    return kind, describe(error)


def _answer(connection: Connection, setup: WorkerSetup) -> None:
    torch.set_num_threads(setup.threads)
    file = setup.images
    if isinstance(file.file, int):
        file = replace(file, file=recv_handle(connection))
    setup.experiment.data.images = file.map()
    workspace = Workspace(setup.experiment)
    common: dict[str, Any] = {}
    while True:
        kind, content = _next(connection)
        if kind == "common":
            common = pickle.loads(content)
            continue
        try:
            if kind == "fit":
                message: object = ("done", fit_with_state(workspace, setup.states, replace(content, **common)))
            else:
                message = ("done", evaluate(workspace, **content))
        except Exception as error:
            message = failure(error)
        _send(connection, message)


def serve(connection: Connection, path: list[str], environment: dict[str, str], setup: bytes) -> None:
    """Do what the server asks, until it hangs up.

    Args:
        connection: to the server.
        path: the server's `sys.path`.
        environment: the server's.
        setup: a `WorkerSetup`, which may need them to be read.
    """
    block_group_signals()  # also if somebody else has started the fork server
    threading.Thread(target=_watch, args=(connection,), daemon=True).start()
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    reuse_memory()
    try:
        _answer(connection, pickle.loads(setup))
    except Exception as error:  # the settings cannot be read here, the workspace cannot be built
        _send(connection, ("unusable", describe(error)))
    _next(connection)
