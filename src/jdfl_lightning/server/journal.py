"""RunJournal: saves a run's checkpoints, metrics, best and last weights; logs and displays its rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.loggers import Logger

from jdfl_lightning.callbacks import RoundReport, RunCallback
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.clustering.clusters import PseudoDomains
from jdfl_lightning.config import Experiment, as_dict
from jdfl_lightning.core.errors import last_line
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.server.resume import bit_versions, fixed_settings
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.storage.checkpoint import CheckpointHeader, Checkpoints, ClientStates
from jdfl_lightning.storage.discoveries import digest_discovery
from jdfl_lightning.storage.metrics import append_metrics, digest_metrics, digest_rows, is_score
from jdfl_lightning.storage.weights import ModelHeader, SavedModel
from jdfl_lightning.ui.display import Display
from jdfl_lightning.ui.loggers import logger_run


@dataclass(eq=False)
class RunJournal(RunCallback):
    """Writes the run folder, logs metrics and updates the display."""

    experiment: Experiment
    folder: Path
    """The run folder."""
    data: str
    """Fingerprint of the images."""
    logger: Logger | None
    """Logs every round's metrics."""
    display: Display
    """Shows them."""
    check: Callable[[], None]
    """Called wherever a run can be interrupted."""
    network: str = ""
    """Checksum of the frozen network, if clients train on its features."""
    complete: Callable[..., tuple[Tensors, Tensors]] | None = None
    """Adds the shared initialisation of what is private to weights and buffers (`Workspace.complete`)."""
    states: ClientStates | None = None
    """The clients' states, which the backend uses too."""

    def __post_init__(self) -> None:
        self._checkpoints = Checkpoints(self.folder, self.experiment.checkpoint.keep, self.states)
        self._unsaved: tuple[ServerState, dict[str, float], str] | None = None
        """The last aggregated round without a checkpoint: state, metrics, and the digest of the rows before its own."""
        self._settings = fixed_settings(as_dict(self.experiment))
        self._rows = ""
        """Digest of the rows written so far."""
        self._discovery: str | None = None
        self._tracebacks: set[str] = set()
        """The last lines of the tracebacks shown so far."""

    def resume(self, state: ServerState) -> None:
        """Continue the folder of a resumed run; remove files that it no longer needs."""
        self._checkpoints.clean(state.round, state.clients)
        self._rows = digest_metrics(self.folder, state.round)

    def discovered(self, domains: PseudoDomains | None) -> None:
        """Bind the rounds to the discovery, which is in the folder."""
        self._discovery = digest_discovery(self.folder)

    def clients_asked(self, stage: str, total: int) -> None:
        """Display that a stage begins, long before its first client has answered."""
        self.display.step(stage, 0, total)

    def client_answered(self, stage: str, done: int, total: int) -> None:
        """Update the display; stop here if the user asked for it."""
        self.display.step(stage, done, total)
        self.check()

    def client_unassigned(self, client: int, reason: str) -> None:
        """Display which client has no pseudo-domain yet, and why."""
        self.display.say(f"client {client} has no pseudo-domain yet: {self._brief(reason)}")

    def client_noted(self, round: int, client: int, note: str) -> None:
        """Display a note about a client's answer."""
        self.display.say(f"round {round}: client {client}: {note}")

    def client_refused(self, round: int, client: int, reason: str) -> None:
        """Display which client is left out of the round, and why."""
        self.display.say(f"round {round}: client {client} does not count: {self._brief(reason)}")
        self._checkpoints.forget([(client, round)])

    def _brief(self, reason: str) -> str:
        """Return the whole reason, or only its last line if a traceback that ends with this line was shown before."""
        line = last_line(reason)
        if line in self._tracebacks:
            return line
        if "\n" in reason:
            self._tracebacks.add(line)
        return reason

    def round_aggregated(self, state: ServerState, metrics: dict[str, float]) -> None:
        """Write a checkpoint if one is due after this round."""
        self._unsaved = state, metrics, self._rows
        self._checkpoints.advance(state.round, state.clients)
        if state.round % self.experiment.checkpoint.every == 0 or state.round == self.experiment.rounds:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the last aggregated round, unless it has one."""
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
            self._checkpoints.save(state.as_record(), header, last=state.round == self.experiment.rounds)
            self._unsaved = None

    def round_evaluated(self, report: RoundReport) -> None:
        """Write, log and display a round's metrics; save its weights as last and, if they improve, as best."""
        state, data = report.state, self.experiment.data
        assert state is not None  # rounds that are over are repeated to the user's callbacks alone
        scores = {name: value for name, value in report.metrics.items() if is_score(name)}
        # a subclass of JointModule that changes the training alone is not needed to use what was trained
        part = self.experiment.model
        own = None if part is None or part.load().forward is JointModule.forward else part
        header = ModelHeader(
            backbone=self.experiment.backbone,
            size=data.size,
            class_names=list(data.class_names),
            score=self.experiment.global_score,
            round=report.round,
            scores=scores,
            backbone_args=self.experiment.backbone_args,
            normalize=data.normalize,
            resize=data.resize,
            model=None if own is None else as_dict(own),
            network=self.network,
        )
        weights, buffers = state.weights, state.buffers
        if self.complete is not None:
            joint = state.domains if self.experiment.supervision.needs_discovery else None
            weights, buffers = self.complete(weights, buffers, num_domains=1 if joint is None else joint.num_domains)
        model = SavedModel(weights, buffers, header)
        if report.improved:
            self.save()  # else a run resumed from an earlier checkpoint would find the best weights of a later round
            model.save(self.folder, "best")
        model.save(self.folder, "last")
        append_metrics(self.folder, report.row)
        self._rows = digest_rows([report.row], self._rows)
        if self.logger is not None:
            numbers = {name: value for name, value in report.row.items() if name != "round" and not math.isnan(value)}
            self.logger.log_metrics(numbers, step=report.round)
        self.display.round(report.round, self.experiment.rounds, report.row)

    def stop(self, state: ServerState) -> None:
        """Leave the checkpoints as after the last round."""
        self.save()
        self._checkpoints.clean(state.round, state.clients)
