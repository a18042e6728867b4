"""A worker of the pool: a process that builds its workspace once, then fits clients and evaluates models on request.

Workers come from Python's fork server, a fresh interpreter that only imports this module, with all that a worker needs,
and forks: a worker shares none of the server's memory, threads or locks, and a new one starts in milliseconds. The fork
server is started with the first worker, serves all later runs of the process, and ends with the process.
"""

from __future__ import annotations

import atexit
import copy
import gc
import io
import os
import pickle
import select
import shutil
import signal
import sys
import threading
import warnings
from dataclasses import dataclass, replace
from multiprocessing import Pipe, get_context, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jdfl_lightning.backends.base import describe, fit_with_state
from jdfl_lightning.backends.local import LocalBackend
from jdfl_lightning.client.evaluation import evaluate
from jdfl_lightning.client.fit import Workspace, initial_backbone
from jdfl_lightning.core.errors import StorageError
from jdfl_lightning.core.system import reuse_memory
from jdfl_lightning.data.base import no_progress
from jdfl_lightning.data.cache import ImageFile
from jdfl_lightning.storage.checkpoint import ClientStates

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


_FOLDER = "JDFL_FORK_SERVER_FOLDER"
"""Variable with the folder of the fork server's socket; Python removes it only if the main process ends normally."""

if _FOLDER in os.environ:  # this is the fork server
    atexit.register(shutil.rmtree, os.environ[_FOLDER], ignore_errors=True)


def _from_bytes(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


def _as_bytes(tensor: Tensor) -> tuple[Any, ...]:
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _from_bytes, (bytearray(content), tensor.dtype, tuple(tensor.shape))


def encode(message: object) -> bytes:
    """Pickle a message with its tensors as plain bytes: no shared memory that a crash could leave behind."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=5)
    pickler.dispatch_table = {Tensor: _as_bytes}
    pickler.dump(message)
    return out.getvalue()


@dataclass(frozen=True)
class WorkerSetup:
    """A worker's setup, sent once."""

    experiment: Experiment
    """The settings; the data is partitioned and holds no images."""
    images: ImageFile
    """The file to map the images, or their features, from; a file without a name is sent after the setup."""
    states: ClientStates
    """Storage of the clients' states."""
    threads: int


def block_group_signals() -> set[int | signal.Signals]:
    """Block signals that a terminal or job queue sends to all processes: the server decides when workers end.

    Returns:
        The signals that were blocked before.
    """
    return signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM))


def _watch(connection: Connection) -> None:
    """End the process as soon as the server closes the connection or dies, even during a fit."""
    watch = select.poll()
    watch.register(connection.fileno(), 0)  # a hang-up is always reported
    watch.poll()
    os._exit(0)


def _next(connection: Connection) -> Any:
    """Return the next message; exit if the connection is closed."""
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        os._exit(0)


def _send(connection: Connection, message: object) -> None:
    """Send a message; exit if the connection is closed."""
    try:
        connection.send_bytes(encode(message))
    except ConnectionError:
        os._exit(0)


def without_images(experiment: Experiment) -> Experiment:
    """Return the settings for another process: the data is partitioned, images and features are left out for it to map.

    What only the server uses is left out too.
    """
    data = copy.copy(experiment.data)
    data.progress = no_progress
    for name in {"images", "features"} & set(vars(data)):
        delattr(data, name)
    return replace(experiment, data=data, backend=LocalBackend(), logger=False, callbacks=[])


def receive(experiment: Experiment, inputs: Tensor) -> Workspace:
    """Return the workspace of a process that is sent all weights.

    Args:
        experiment: the settings, as `without_images` made them.
        inputs: the images that were left out, or their features.
    """
    if inputs.is_floating_point():
        experiment.data.features = inputs
    else:
        experiment.data.images = inputs
    # clients begin with the pretrained weights of what is private, which nobody sends them
    return Workspace(experiment, backbone=initial_backbone(experiment, pretrained=bool(experiment.private)))


def failure(error: Exception) -> tuple[str, str]:
    """Return the kind of a failure, storage or failed, and its description."""
    kind = "storage" if isinstance(error, StorageError) else "failed"
    return kind, describe(error)


def _answer(connection: Connection, setup: WorkerSetup) -> None:
    torch.set_num_threads(setup.threads)
    file = setup.images
    if isinstance(file.file, int):
        file = replace(file, file=recv_handle(connection))
    workspace = receive(setup.experiment, file.map())
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
    """Do the server's jobs until it closes the connection.

    Args:
        connection: to the server.
        path: the server's `sys.path`.
        environment: the server's environment variables.
        setup: an encoded `WorkerSetup`, which may need the path and the environment to be decoded.
    """
    block_group_signals()  # also if other code has started the fork server
    gc.freeze()  # what the fork server has imported stays: to look through it for garbage takes half a second
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


def start_fork_server() -> None:
    """Start the fork server, unless it is running; it imports while this process continues."""
    from multiprocessing import forkserver, resource_tracker  # not available on every system

    forkserver.set_forkserver_preload([__name__])
    resource_tracker.ensure_running()  # first, as its start unblocks signals
    # before 3.13.1 it has its own sys.path
    added = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1", _FOLDER: util.get_temp_dir()}
    known, before = dict(os.environ), block_group_signals()  # new processes inherit both
    os.environ.update(added)
    try:
        forkserver.ensure_running()
    finally:
        for name in added.keys() - known.keys():
            del os.environ[name]
        os.environ.update(known)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(setup: bytes) -> tuple[BaseProcess, Connection[Any, Any]]:
    """Start a worker with its setup; return the process and the connection to it, which ends it when closed."""
    start_fork_server()
    here, there = Pipe()
    process = get_context("forkserver").Process(target=serve, args=(there, sys.path, dict(os.environ), setup))
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # else the worker would run the user's script
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
        there.close()
    util.Finalize(process, here.close, exitpriority=0)  # before Python joins the remaining processes
    return process, here
