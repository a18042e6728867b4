"""One setting of the C library that makes training on the CPU faster."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def reuse_memory() -> bool:
    """Ask glibc to keep freed memory for the next tensor; return whether there was a glibc to ask.

    By default the memory of every large tensor goes back to the system when it is freed and comes anew, page by page
    and filled with zeros, with the next one: a fifth of a training step at 112 px. It is for processes that train and
    nothing else, so it is left to those who own the process: the command line and the pool's workers.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
