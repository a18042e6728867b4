"""Worker processes from Python's fork server, which imports all that a worker needs once, with this module.

The fork server is a fresh interpreter that only imports and forks: a worker shares none of the server's
memory, threads or locks, and a new worker starts in milliseconds. The fork server is started with the first worker,
serves all later runs of the process, and ends with the process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import Pipe, get_context, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from jdfl_lightning.backends.worker import block_group_signals, serve

_FOLDER = "JDFL_FORK_SERVER_FOLDER"
"""Variable with the folder of the fork server's socket; Python removes it only if the main process ends normally."""

if _FOLDER in os.environ:  # this is the fork server
    atexit.register(shutil.rmtree, os.environ[_FOLDER], ignore_errors=True)


def start_fork_server() -> None:
    """Start the fork server, unless it is running; it imports while this process continues."""
    from multiprocessing import forkserver, resource_tracker  # not available on every system

    forkserver.set_forkserver_preload([__name__])
    resource_tracker.ensure_running()  # first, as its start unblocks signals
    path = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}  # before 3.13.1 it has its own sys.path
    before = block_group_signals()  # new processes inherit this
    try:
        with _environment(path | {_FOLDER: util.get_temp_dir()}):
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    known = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in known.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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
