"""Locks of folders, which other processes respect."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
