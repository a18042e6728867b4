"""Ctrl-C and SIGTERM: the first one ends a run after the current client, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from jdfl_lightning.core.errors import Terminated

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
