"""What is asked of the operating system: locks of folders, Ctrl-C and SIGTERM after the current client, memory."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from jdfl_lightning.core.errors import Terminated

_TRIES = 3
"""Attempts to lock a folder: whoever only looks at its state holds the lock for an instant."""


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[bool]:
    """Keep other processes from locking a folder during the block, if the system supports locks.

    The system releases the lock when this process ends.

    Args:
        folder: the folder; it must exist.
        wait: whether to wait for another process that has locked it; else the block gets False if one has.
    """
    if os.name != "posix":
        yield True
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                time.sleep(0.02)
                continue
            except OSError:  # a file system without locks
                pass
            yield True
            return
        yield False
    finally:
        os.close(descriptor)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def reuse_memory() -> bool:
    """Ask glibc to keep freed memory for the next tensor; return whether the C library is glibc.

    By default the memory of every large tensor is returned to the system when freed. The system must zero new pages for
    the next tensor: a fifth of a training step at 112 px. The setting suits processes that only train: the command
    line, workers and sites.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


_USUAL: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""Python's default handlers; a handler that a program has changed is kept."""


@contextmanager
def after_current_client(say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Delay the first Ctrl-C or SIGTERM; yield a function that raises it where the run can stop safely.

    Inside the block both raise a `KeyboardInterrupt`; one caused by SIGTERM leaves the block as `Terminated`, with the
    same message.

    Args:
        say: shows the user that the signal was received.
    """
    asked: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
        with suppress(RuntimeError):  # while another line is being printed
            say(f"stopping after the current client; {again} to stop at once")

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    ours = [number for number, usual in _USUAL.items() if main and signal.getsignal(number) is usual]
    for number in ours:
        signal.signal(number, hear)
    try:
        yield check
    except KeyboardInterrupt as error:
        if signal.SIGTERM in asked:
            raise Terminated(*error.args) from None
        raise
    finally:
        for number in ours:
            signal.signal(number, _USUAL[number])
