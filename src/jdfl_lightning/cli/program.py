"""The program's name and its exit codes, and what a terminal shows while it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

PROGRAM = "jdfl-lightning"
FAILED, BAD_INPUT, INTERRUPTED, CLOSED_PIPE, TERMINATED = 1, 2, 130, 141, 143


@contextmanager
def starting(options: Sequence[str] = (), doing: str = "starting") -> Iterator[None]:
    """Show that a command is starting, while libraries are imported and settings are read; only on a terminal.

    Args:
        options: of the command; nothing is shown if it prints its help or its settings instead.
        doing: what is shown.
    """
    console = Console(stderr=True, force_jupyter=False)
    prints = any(option == "-h" or option.startswith(("--help", "--print_config")) for option in options)
    if prints or not console.is_terminal:
        yield
        return
    with Live(Spinner("dots", doing), console=console, transient=True, redirect_stdout=False):
        yield
