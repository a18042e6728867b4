"""EarlyStopping: ends a run whose metric no longer improves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from jdfl_lightning.callbacks.base import RoundReport, RunCallback
from jdfl_lightning.core.errors import require, require_choice, require_types

if TYPE_CHECKING:
    from pathlib import Path

    from jdfl_lightning.config import Experiment


@dataclass
class EarlyStopping(RunCallback):
    """Stop when a metric has not improved for some evaluated rounds."""

    metric: str | None = None
    """A metric of metrics.csv: val/acc, test/acc, test/acc_worst, test/acc/DOMAIN, train/loss and others; null for
    val/acc if there are validation images, else for test/acc."""
    patience: int = 10
    """Evaluated rounds without an improvement after which the run stops."""
    mode: Literal["max", "min"] = "max"
    """Whether a larger (max) or a smaller (min) value is better."""
    min_delta: float = 0.0
    """A value is better only if it differs from the best so far by more than this."""
    _name: str = field(default="test/acc", init=False, repr=False, compare=False)
    _best: float | None = field(default=None, init=False, repr=False, compare=False)
    _waited: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_types(self, "--callbacks.")
        self._name = self.metric or self._name
        require(self.patience > 0, "--callbacks.patience", "positive", self.patience)
        require(self.min_delta >= 0, "--callbacks.min_delta", "0 or more", self.min_delta)

    def check_settings(self, experiment: Experiment) -> None:
        """Refuse a private run: its guarantee does not cover a choice by metrics that have no noise."""
        algorithm = experiment.algorithm
        why = "whose guarantee does not cover a stop that depends on metrics without noise"
        require(
            algorithm.keeps_best, "--callbacks", f"without EarlyStopping with {type(algorithm).__name__}, {why},", self
        )
        metric = self._metric(experiment)
        if experiment.selection != "test":
            why = "as test images decide nothing with --data.val_fraction or --select last"
            honest = not metric.startswith("test/")
            require(honest, "--callbacks.metric", f"val/acc, train/loss or another, {why},", metric)
        unseen = metric.startswith("unseen/")
        require(not unseen, "--callbacks.metric", "of other images, as unseen domains decide nothing,", metric)

    def _metric(self, experiment: Experiment) -> str:
        return self.metric or ("val/acc" if experiment.data.val_fraction else "test/acc")

    def run_started(self, folder: Path, experiment: Experiment) -> None:
        """Remember which metric is meant."""
        self._name = self._metric(experiment)

    def round_evaluated(self, report: RoundReport) -> None:
        """Compare the round's metric with the best so far; NaN is never better."""
        if not report.evaluated:
            return
        value = report.metrics.get(self._name)
        if value is None and self._best is None:
            require_choice("--callbacks.metric", self._name, list(report.metrics))
        if self._improves(value):
            self._best, self._waited = value, 0
        else:
            self._waited += 1

    def _improves(self, value: float | None) -> bool:
        if value is None or self._best is None:
            return value is not None
        gain = value - self._best if self.mode == "max" else self._best - value
        return gain > self.min_delta

    def reason_to_stop(self) -> str | None:
        """Return the reason once the patience is over."""
        if self._waited < self.patience:
            return None
        return f"{self._name} has not been better than {self._best:g} for {self._waited} evaluated rounds"
