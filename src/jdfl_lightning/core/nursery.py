"""A process that imports what workers need, once, and from which workers are forked; free of imports itself.

Importing torch and lightning takes seconds. The command line opens the nursery before it imports them for itself, so
that both go on at once; a worker that has to be replaced is there in milliseconds. Nothing of the server's memory,
threads or locks is in a worker: the nursery is a fresh interpreter that does nothing but import and fork.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection

from jdfl_lightning.core.errors import InputError

_START = "import sys; sys.path[:] = sys.argv[2:]; from jdfl_lightning.core.nursery import tend; tend(int(sys.argv[1]))"
_WORKER = "jdfl_lightning.backends.worker"
"""What is imported, by name: this file stands below everything else; its `serve` is what a worker does."""
_FILES = 2
"""Open files that a worker is given: its connection, and the images where they have no name."""


class Nursery:
    """The process, seen from the one that opened it."""

    def __init__(self) -> None:
        self._control, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(there.fileno()), *sys.path],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the server's to answer
            )
        self.users = 0
        self._ends: dict[int, int] = {}
        self._unread = b""

    def fork(self, files: Sequence[int]) -> Connection:
        """Have a worker forked that is given open files; return the connection to it."""
        here, there = socket.socketpair()
        with there:
            try:
                socket.send_fds(self._control, [b"+"], [there.fileno(), *files])
            except OSError as error:
                here.close()
                raise InputError(f"Expected worker processes to start but their source is gone: {error}.") from error
        return Connection(here.detach())

    def exit_code(self, pid: int, timeout: float) -> int | None:
        """Return how a worker ended, below 0 for the signal that ended it; nothing if it has not."""
        deadline = time.monotonic() + timeout
        while pid not in self._ends and (left := deadline - time.monotonic()) > 0:
            try:
                if not select.select([self._control], [], [], left)[0]:
                    break
                heard = self._control.recv(4096)
            except (OSError, ValueError):
                break
            if not heard:  # the nursery itself is gone: nobody knows
                break
            *lines, self._unread = (self._unread + heard).split(b"\n")
            self._ends |= {int(line.split()[0]): int(line.split()[1]) for line in lines}
        return self._ends.pop(pid, None)

    def close(self) -> None:
        """Let the process go; workers that are left end when their connections are closed."""
        self._control.close()
        self._process.kill()  # it may be importing, and has nothing to finish
        self._process.wait()


_open: list[Nursery] = []
_spare: list[Nursery] = []
"""Opened in case that it is needed."""


@contextmanager
def nursery(spare: bool = False) -> Iterator[Nursery]:
    """Open the nursery; inside a block that has done so already, give that one.

    Args:
        spare: whether `dismiss_spare` may close it before the block ends.
    """
    if not _open:
        _open.append(Nursery())
        if spare:
            _spare.append(_open[-1])
    own = _open[-1]
    own.users += 1
    try:
        yield own
    finally:
        own.users -= 1
        if own.users == 0:
            for opened in (_open, _spare):
                if own in opened:
                    opened.remove(own)
            own.close()


def dismiss_spare() -> None:
    """Close a nursery that was opened in case that it is needed: it is not."""
    if _spare and _spare[-1].users == 1:  # the one who opened it
        own = _spare.pop()
        _open.remove(own)
        own.close()


def tend(descriptor: int) -> None:
    """Fork a worker for each request, and tell how each one ended, until the other end hangs up."""
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a job queue sends it to all: workers end when the server does
    signal.signal(signal.SIGCHLD, lambda *_: _bury(control))
    serve = import_module(_WORKER).serve
    while True:
        try:
            request, files, _, _ = socket.recv_fds(control, 1, _FILES)
        except ConnectionError:
            request = b""
        if not request:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            serve(*files)
            os._exit(0)
        for file in files:
            os.close(file)


def _bury(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        try:
            control.sendall(f"{pid} {os.waitstatus_to_exitcode(status)}\n".encode())
        except OSError:  # nobody is left to be told
            return
