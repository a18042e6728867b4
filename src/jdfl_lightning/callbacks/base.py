"""The interface of a callback, and what it receives about a round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jdfl_lightning.clustering.clusters import PseudoDomains
    from jdfl_lightning.config import Experiment
    from jdfl_lightning.server.state import ServerState


@dataclass(frozen=True)
class RoundReport:
    """The outcome of a round."""

    row: Mapping[str, float]
    """The round's line of ``metrics.csv``, in which NaN stands for what was not computed."""
    improved: bool
    """Whether it is the best round so far."""
    state: ServerState | None
    """The server's state after the round: weights, buffers, the algorithm's record. None for a round that was over
    before the run was resumed."""

    @property
    def round(self) -> int:
        """Number of the round, from 1."""
        return int(self.row["round"])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that were computed, by their names in ``metrics.csv``; a resumed run has the same.

        >>> RoundReport({"round": 3, "test/acc": float("nan"), "train/loss": 0.5}, False, None).metrics
        {'train/loss': 0.5}
        """
        found = {name: float(value) for name, value in self.row.items() if name != "round"}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    @property
    def evaluated(self) -> bool:
        """Whether the round has an accuracy over all held-out images: see ``evaluate_every``."""
        return "test/acc" in self.metrics


class RunCallback:
    """Methods that the server calls at the events of a run. These do nothing: override those that you need.

    A run uses a deep copy of a callback, so that one object can be given to several runs. A callback may keep state in
    its attributes. When a run is resumed, a new copy receives the start, the discovery and, by `round_evaluated`,
    every round that is over: state that is made of these alone is as in a run that was never interrupted. No other
    event is repeated.

    An error that a method raises ends the run with one line; the last aggregated round is saved.
    """

    def check_settings(self, experiment: Experiment) -> None:
        """Raise an `InputError` if a run's settings do not work with this callback; called when they are made."""

    def run_started(self, folder: Path, experiment: Experiment) -> None:
        """Called first, for a new and for a resumed run.

        Args:
            folder: the run folder.
            experiment: the settings: ``experiment.rounds``, ``experiment.data.num_clients`` and all others.
        """

    def discovered(self, domains: PseudoDomains | None) -> None:
        """Called before the first round with the pseudo-domains; None for the baseline, which has none."""

    def clients_asked(self, stage: str, total: int) -> None:
        """Called before clients begin to train.

        Args:
            stage: what they are asked for: ``discovery``, or such as ``round 3``.
            total: how many are asked.
        """

    def client_answered(self, stage: str, done: int, total: int) -> None:
        """Called when a client has answered, whether its answer can be used or not.

        Args:
            stage: what it was asked for, such as ``round 3``.
            done: how many clients have answered.
            total: how many were asked.
        """

    def client_unassigned(self, client: int, reason: str) -> None:
        """Called for a client that has no pseudo-domain yet."""

    def client_noted(self, round: int, client: int, note: str) -> None:
        """Called with a note about a client's answer, which still enters the round."""

    def client_refused(self, round: int, client: int, reason: str) -> None:
        """Called for a client whose answer is missing or does not enter the round."""

    def round_aggregated(self, state: ServerState, metrics: dict[str, float]) -> None:
        """Called after a round is aggregated, before it is evaluated.

        Args:
            state: the server's state after the round.
            metrics: the round's metrics without its accuracies.
        """

    def round_evaluated(self, report: RoundReport) -> None:
        """Called for every round, in order; ``report.evaluated`` says whether an evaluation was due."""

    def reason_to_stop(self) -> str | None:
        """Return why the run should end now, or None; asked after every round that was evaluated."""
        return None

    def run_ended(self, reason: str | None) -> None:
        """Called last, when everything is saved.

        Args:
            reason: why the run ended before its last round: a callback's reason to stop, or an error.
        """
