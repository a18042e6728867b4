"""Ctrl-C: the first one ends a run after the current client, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def after_current_client(say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Hold back the first Ctrl-C; give a function that lets it out where it does no harm.

    Args:
        say: tells the user that it was heard.
    """
    asked: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        with suppress(RuntimeError):  # in the middle of another line
            say("stopping after the current client; Ctrl-C again to stop at once")

    def check() -> None:
        if asked:
            raise KeyboardInterrupt

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, hear)
    try:
        yield check
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
