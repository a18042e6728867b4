"""RunJournal: what is kept of a run while it goes on: checkpoints, metrics, best and last weights, log, display."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from lightning.pytorch.loggers import Logger

from jdfl_lightning.config import Experiment, as_dict
from jdfl_lightning.core.errors import last_line
from jdfl_lightning.server.resume import as_record, bit_versions, fixed_settings
from jdfl_lightning.server.rounds import Journal, RoundReport, ServerState
from jdfl_lightning.storage.checkpoint import CheckpointHeader, Checkpoints
from jdfl_lightning.storage.discoveries import digest_discovery
from jdfl_lightning.storage.metrics import append_metrics, digest_metrics, digest_rows
from jdfl_lightning.storage.weights import ModelHeader, SavedModel
from jdfl_lightning.ui.display import Display
from jdfl_lightning.ui.loggers import logger_run


class RunJournal(Journal):
    """Writes a run folder, feeds a logger and moves the display.

    Args:
        experiment: the run's settings.
        folder: the run folder.
        data: fingerprint of the images.
        logger: gets every round's metrics.
        display: shows them.
        best: accuracy of the best round so far.
        check: is called where a run can be interrupted.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        data: str,
        logger: Logger | None,
        display: Display,
        best: float,
        check: Callable[[], None],
    ) -> None:
        self.experiment, self.folder, self.data = experiment, folder, data
        self.logger, self.display, self.best, self.check = logger, display, best, check
        self._checkpoints = Checkpoints(folder, experiment.checkpoint.keep)
        self._unsaved: tuple[ServerState, dict[str, float], str] | None = None
        """The last whole round, and the digest of the rows before its own."""
        self._settings = fixed_settings(as_dict(experiment))
        self._rows = ""
        """Digest of the rows written so far."""
        self._discovery: str | None = None
        self._tracebacks: set[str] = set()
        """The last lines of those that have been shown."""

    def resume(self, state: ServerState) -> None:
        """Take over what an earlier run has left, and remove what it no longer needs."""
        self._checkpoints.clean(state.round, state.clients)
        self._rows = digest_metrics(self.folder, state.round)

    def discovered(self) -> None:
        """Phase 1 is over, and what it found is in the folder."""
        self._discovery = digest_discovery(self.folder)

    def step(self, what: str, done: int, total: int) -> None:
        """Move the display; stop here if that was asked for."""
        self.display.step(what, done, total)
        self.check()

    def unassigned(self, client: int, reason: str) -> None:
        """Say who has no pseudo-domain yet, and why."""
        self.display.say(f"client {client} has no pseudo-domain yet: {self._brief(reason)}")

    def noted(self, round: int, client: int, note: str) -> None:
        """Say what there is to know of a client's answer."""
        self.display.say(f"round {round}: client {client}: {note}")

    def refused(self, round: int, client: int, reason: str) -> None:
        """Say who does not enter the round, and why."""
        self.display.say(f"round {round}: client {client} does not count: {self._brief(reason)}")
        self._checkpoints.forget([(client, round)])

    def _brief(self, reason: str) -> str:
        """Return a reason whole, or its last line if a traceback that ends with it has been shown before."""
        line = last_line(reason)
        if line in self._tracebacks:
            return line
        if "\n" in reason:
            self._tracebacks.add(line)
        return reason

    def broken(self, trace: str) -> None:
        """Show where: the error that ends the run is one line."""
        self.display.say(trace)

    def aggregated(self, state: ServerState, metrics: dict[str, float]) -> None:
        """Write a checkpoint, if it is the round's turn."""
        self._unsaved = state, metrics, self._rows
        self._checkpoints.advance(state.round, state.clients)
        if state.round % self.experiment.checkpoint.every == 0 or state.round == self.experiment.rounds:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the last whole round, unless it has one."""
        if self._unsaved is not None:
            state, metrics, rows = self._unsaved
            joined = {} if state.domains is None else state.domains.joined
            header = CheckpointHeader(
                round=state.round,
                metrics=metrics,
                data=self.data,
                logger=logger_run(self.logger),
                settings=self._settings,
                rows=rows,
                discovery=self._discovery,
                versions=bit_versions(),
                clients=state.clients,
                joined=joined,
            )
            self._checkpoints.save(as_record(state), header, last=state.round == self.experiment.rounds)
            self._unsaved = None

    def evaluated(self, report: RoundReport) -> None:
        """Write, log and show a round's metrics; keep its weights as the last ones and, if so, as the best."""
        improved = self.experiment.algorithm.keeps_best and report.scores.overall > self.best
        if improved:
            self.best = report.scores.overall
        kept = self.experiment.algorithm.keeps_best and math.isfinite(self.best)
        best = self.best if kept else float("nan")
        metrics = report.scores.as_metrics() | {"test/acc_best": best} | report.metrics
        number, state, data = report.state.round, report.state, self.experiment.data
        row = {"round": number} | metrics
        scores = {name: value for name, value in report.scores.as_metrics().items() if not math.isnan(value)}
        names, score = list(data.class_names), self.experiment.score
        header = ModelHeader(self.experiment.backbone, data.size, names, score, number, scores)
        model = SavedModel(state.weights, state.buffers, header)
        if improved:
            self.save()  # else a run that goes on from an earlier checkpoint would find a best that it never had
            model.save(self.folder, "best")
        model.save(self.folder, "last")
        append_metrics(self.folder, row)
        self._rows = digest_rows([row], self._rows)
        if self.logger is not None:
            self.logger.log_metrics({n: value for n, value in metrics.items() if not math.isnan(value)}, step=number)
        self.display.round(number, self.experiment.rounds, metrics)
