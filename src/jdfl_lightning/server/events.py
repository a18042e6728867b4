"""Events: tells the callbacks of a run what happens in it."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec

from jdfl_lightning.callbacks import RoundReport, RunCallback
from jdfl_lightning.client.evaluation import Scores
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.storage.details import Stop
from jdfl_lightning.storage.names import Selection

P = ParamSpec("P")


def _told(event: Callable[Concatenate[RunCallback, P], None]) -> Callable[Concatenate[Events, P], None]:
    """Return a method of `Events` that calls this one of every callback."""

    def tell(events: Events, /, *args: P.args, **kwargs: P.kwargs) -> None:
        for callback in events._all:
            events._call(callback, event.__name__, *args, **kwargs)

    return tell


class Events:
    """Calls the callbacks of a run: first its own, then copies of the user's, in their order.

    Args:
        own: the run's own callback.
        callbacks: the user's.
        select: the images by whose accuracy a round is the best; last if no round is.
        say: shows the traceback of an error that ends the run.
    """

    def __init__(
        self,
        own: RunCallback,
        callbacks: Sequence[RunCallback] = (),
        select: Selection = "test",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._own, self._select, self._say = own, select, say
        self._best: dict[str, float] = {}
        """The best round's accuracies, overall: on the test images and on those that decide."""
        self.users = [self._guarded(callback, "__deepcopy__", copy.deepcopy, callback) for callback in callbacks]
        """Copies of the user's callbacks: they may stop the run, so that every evaluation is waited for."""
        self._last: RoundReport | None = None
        self.stop: Stop | None = None
        """Set if a callback has asked the run to stop."""

    run_started = _told(RunCallback.run_started)
    discovered = _told(RunCallback.discovered)
    clients_asked = _told(RunCallback.clients_asked)
    client_answered = _told(RunCallback.client_answered)
    client_unassigned = _told(RunCallback.client_unassigned)
    client_noted = _told(RunCallback.client_noted)
    client_refused = _told(RunCallback.client_refused)
    round_aggregated = _told(RunCallback.round_aggregated)
    run_ended = _told(RunCallback.run_ended)

    def round_evaluated(self, state: ServerState, scores: Scores, metrics: Mapping[str, float]) -> None:
        """Report a round with its scores, which are NaN if it was not evaluated.

        Args:
            state: the state after the round.
            scores: its accuracies.
            metrics: its other metrics.
        """
        found = scores.as_metrics()
        improved = self._improves(found)
        names = ["test/acc", *(["val/acc"] if self._select == "val" else [])]
        best = {f"{name}_best": self._best.get(name, float("nan")) for name in names}
        row = {"round": state.round} | found | best | dict(metrics)
        self._last = RoundReport(row, improved, state)
        for callback in self._all:
            self._call(callback, "round_evaluated", self._last)

    def repeat(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Report the rounds of a resumed run that are over to the user's callbacks.

        Args:
            rows: lines of ``metrics.csv``.
        """
        for row in rows:
            self._last = RoundReport(row, self._improves(row), None)
            for callback in self.users:
                self._call(callback, "round_evaluated", self._last)

    def _improves(self, row: Mapping[str, float]) -> bool:
        """Return whether a round is the best so far by the images that decide, and remember its accuracies."""
        name = f"{self._select}/acc"
        improved = self._select != "last" and row[name] > self._best.get(name, float("-inf"))
        if improved:
            self._best = {name: row[name] for name in ("test/acc", name)}
        return improved

    def asks_to_stop(self) -> bool:
        """Return whether the last round was evaluated and a callback asks the run to stop after it."""
        if self._last is not None and self._last.evaluated:
            for callback in self.users:
                reason = self._call(callback, "reason_to_stop")
                if reason:
                    self.stop = Stop(self._last.round, type(callback).__name__, " ".join(str(reason)[:1000].split()))
                    return True
        return False

    @property
    def _all(self) -> list[RunCallback]:
        return [self._own, *self.users]

    def _call(self, callback: RunCallback, event: str, *details: object, **named: object) -> Any:
        return self._guarded(callback, event, getattr(callback, event), *details, **named)

    def _guarded(
        self, callback: RunCallback, name: str, method: Callable[..., Any], *details: Any, **named: Any
    ) -> Any:
        """Call a method; an error in a callback of the user ends the run with one line, after its traceback."""
        try:
            return method(*details, **named)
        except InputError:
            raise
        except Exception as error:
            if callback is self._own:
                raise
            self.show(error)
            what = f"{type(error).__name__}: {error}"
            raise InputError(f"The callback {type(callback).__name__} failed in {name}: {what}") from error

    def show(self, error: Exception) -> None:
        """Show the traceback of an error in the code of the user, as the error that ends the run is one line."""
        self._say("".join(traceback.format_exception(error)).strip())
