"""Progress of a run: a live display on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from textwrap import TextWrapper
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jdfl_lightning.ui.tables import as_text


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, or hours, minutes and seconds.

    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Display:
    """Progress of a run. The base class shows nothing."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        """Take the display down."""

    def say(self, text: str) -> None:
        """Show one line."""

    def table(self, table: Table) -> None:
        """Show a table; it is not rendered where lines are not shown."""
        if getattr(self.say, "__func__", None) is not Display.say:
            self.say(as_text(table))

    def step(self, what: str, done: int, total: int) -> None:
        """Show the progress of a stage, from 0 on: decoding, downloading, discovery, the clients of a round."""

    def round(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        """Show a finished round."""

    def run(self, number: int, total: int, name: str) -> None:
        """Show which of several runs begins."""


def _accuracy(metrics: Mapping[str, float]) -> str:
    """Return a round's accuracy, on validation and unseen images too, and the best round's, unless none is kept."""
    names = {"acc": "test/acc", "val": "val/acc", "unseen": "unseen/acc", "best": "test/acc_best"}
    found = {word: metrics.get(name, math.nan) for word, name in names.items()}
    return "".join(f"{word} {100 * value:.2f}  " for word, value in found.items() if not math.isnan(value))


def round_line(number: int, total: int, metrics: Mapping[str, float], left: float | None = None) -> str:
    """Return a round's numbers in one line, with the time left if it is given."""
    accuracy = (
        "not evaluated"
        if math.isnan(metrics["test/acc"])
        else f"{_accuracy(metrics)}worst domain {100 * metrics['test/acc_worst']:.2f}"
    )
    rest = "" if left is None else f"  left {clock(left)}"
    return f"round {number}/{total}  {accuracy}  loss {metrics['train/loss']:.4f}{rest}"


class PlainDisplay(Display):
    """Plain lines: one for each finished stage and for each round.

    Args:
        console: console to print to; standard output if not given.
    """

    def __init__(self, console: Console | None = None) -> None:
        # in a notebook rich would render every line as an HTML block
        self.console = console or Console(force_jupyter=False)
        self._begin: tuple[float, int] | None = None
        self._first_run: float | None = None
        self._last_table = ""

    def say(self, text: str) -> None:
        """Show one line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def table(self, table: Table) -> None:
        """Show a table, as wide as the console; not if it is the one shown last, as the runs of a suite share data."""
        text = as_text(table, self.console.width)
        if text != self._last_table:
            self.say(text)
        self._last_table = text

    def _run_line(self, number: int, total: int, name: str) -> str:
        """Return the line shown when one of several runs begins, with the time left for all; reset the round times."""
        now = time.monotonic()
        self._begin = None
        if self._first_run is None:
            self._first_run = now
        mean = (now - self._first_run) / (number - 1) if number > 1 else 0.0
        left = f", about {clock(mean * (total - number + 1))} left" if mean >= 1 else ""
        return f"run {number}/{total}: {name}{left}"

    def _time_left(self, number: int, total: int, metrics: Mapping[str, float]) -> float:
        """Return the seconds left, from the mean of the rounds seen so far."""
        now = time.monotonic()
        if self._begin is None:
            self._begin = now - metrics["time/fit"] - metrics["time/evaluate"], number - 1
        begin, before = self._begin
        return (now - begin) / (number - before) * (total - number)

    def step(self, what: str, done: int, total: int) -> None:
        """Print a line when a long stage ends; none for the clients of a round."""
        if done == total and not what.startswith("round"):
            self.say(f"{what}: {total} done")

    def round(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        """Print the round's line."""
        self.say(round_line(number, total, metrics, self._time_left(number, total, metrics)))

    def run(self, number: int, total: int, name: str) -> None:
        """Print the run's line."""
        self.say(self._run_line(number, total, name))


class _Count(TextColumn):
    """How much of a bar is done, if that is known."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}", "progress.download")


class LiveDisplay(PlainDisplay):
    """A line for each round, which stays; below, a bar for the rounds and one for the current stage.

    The first bar moves from the start to the end, also where nothing can be counted: while images are loaded, and
    while the first client trains.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), _Count())
        numbers = TextColumn("{task.fields[numbers]}")
        self._bars = Progress(*columns, TimeElapsedColumn(), numbers, console=console, transient=True)
        self._stage: tuple[str, TaskID] | None = None
        self._runs: TaskID | None = None
        self._rounds = self._bars.add_task("starting", total=None, numbers="")
        self._counts = False
        """Whether the number of rounds is known: one is over."""

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Take the display down."""
        self._bars.stop()

    def say(self, text: str) -> None:
        """Show one line, or several: broken between words, which a terminal itself does not do."""
        wrap = TextWrapper(self.console.width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        super().say("\n".join(line if len(line) <= wrap.width else wrap.fill(line) for line in text.splitlines()))

    def step(self, what: str, done: int, total: int) -> None:
        """Update the stage's bar; a new stage replaces the old one."""
        if self._stage is None or self._stage[0] != what:
            self._end_stage()
            if not self._counts:
                self._bars.update(self._rounds, description="running")
            self._stage = what, self._bars.add_task(what, total=total, numbers="")
        self._bars.update(self._stage[1], completed=done, total=total)

    def round(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        """Print the round's line and update the rounds' bar."""
        self.say(round_line(number, total, metrics))
        self._counts = True
        left = f"left {clock(self._time_left(number, total, metrics))}"
        if number < total:
            self._bars.update(self._rounds, description="rounds", completed=number, total=total, numbers=left)
        else:
            self._end_stage()
            self._bars.update(self._rounds, description="finishing", numbers="")
            [bar] = (task for task in self._bars.tasks if task.id == self._rounds)
            bar.total = None  # nothing left to count; `update` takes None for no change

    def run(self, number: int, total: int, name: str) -> None:
        """Print the run's line and update the runs' bar; the next run has its own bar of rounds."""
        line = self._run_line(number, total, name)
        self.say(line)
        self._end_stage()
        self._bars.remove_task(self._rounds)
        if self._runs is None:
            self._runs = self._bars.add_task("runs", total=total, numbers="")
        self._bars.update(self._runs, completed=number - 1, numbers=line.partition(", ")[2])
        self._rounds, self._counts = self._bars.add_task("starting", total=None, numbers=""), False

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._bars.remove_task(self._stage[1])
            self._stage = None


class NotebookDisplay(PlainDisplay):
    """One output of a notebook's cell, replaced as the run goes on: the last lines, then round and stage."""

    LINES = 20
    """Lines that are kept in view."""
    SECONDS = 0.25
    """Time from one update of the output to the next."""

    def __init__(self) -> None:
        super().__init__()
        self._said: list[str] = []
        self._now: dict[str, str] = {}
        """The latest line of each kind: run, round, stage."""
        self._output: Any = None
        """IPython's handle of the output."""
        self._shown = -math.inf

    def __exit__(self, *error: object) -> None:
        """Leave the last state in view, without the stage that is over."""
        self._now.pop("stage", None)
        self._show()

    def say(self, text: str) -> None:
        """Add a line, or several."""
        self._said += text.splitlines()
        self._show()

    def step(self, what: str, done: int, total: int) -> None:
        """Replace the stage's line."""
        self._now["stage"] = f"{what}: {done}/{total}"
        if time.monotonic() - self._shown >= self.SECONDS:
            self._show()

    def round(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        """Replace the round's line."""
        self._now["round"] = round_line(number, total, metrics, self._time_left(number, total, metrics))
        self._show()

    def run(self, number: int, total: int, name: str) -> None:
        """Replace the run's line."""
        self._now = {"run": self._run_line(number, total, name)}
        self._show()

    def _show(self) -> None:
        from IPython.display import display

        self._shown = time.monotonic()
        earlier = len(self._said) - self.LINES
        lines = [*([f"(earlier lines: {earlier})"] if earlier > 0 else []), *self._said[-self.LINES :]]
        order = ("run", "round", "stage")
        text = {"text/plain": "\n".join([*lines, *(self._now[kind] for kind in order if kind in self._now)])}
        if self._output is None:
            self._output = display(text, raw=True, display_id=True)
        else:
            self._output.update(text, raw=True)


def open_display(console: Console) -> Display:
    """Return the display that suits the console: live on a terminal or in a notebook, plain lines elsewhere."""
    if console.is_jupyter:
        return NotebookDisplay()
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def default_display() -> Display:
    """Return the display of a run that is started from Python."""
    return open_display(Console())


@contextmanager
def progress_display(progress: bool | Display) -> Iterator[Display]:
    """Open the display that the argument `progress` of a function asks for.

    Args:
        progress: whether progress is shown; or a display, which whoever made it opens and closes.
    """
    if isinstance(progress, Display):
        yield progress
    else:
        with default_display() if progress else Display() as display:
            yield display
