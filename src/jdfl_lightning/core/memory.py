"""One setting of the C library that makes training on the CPU faster."""

from __future__ import annotations

import ctypes

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
