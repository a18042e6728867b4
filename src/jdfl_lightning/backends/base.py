"""What a backend is: tasks in, results out."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from jdfl_lightning.client.evaluation import Evaluation
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Record, Tensors
from jdfl_lightning.storage.checkpoint import ClientStates

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


RESET = "its saved state was damaged, so that it started afresh"
ATTEMPTS = 2
"""Times that a client's fit is tried."""


class Runner(ABC):
    """A backend that is ready: fits clients and evaluates models."""

    @abstractmethod
    def fit(self, tasks: Sequence[FitTask]) -> Iterator[FitResult | FitFailure]:
        """Fit the clients of some tasks; give their results in the order of the tasks, each as soon as it can.

        A client whose fit raises, or ends its process, is tried once more; then its failure is given.
        """

    @abstractmethod
    def evaluate(self, models: Mapping[str, Tensors], buffers: Tensors, done: Callable[[Evaluation], None]) -> None:
        """Evaluate models that share their buffers and tell the outcome: at once, or while later fits go on."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every evaluation has been told."""


class Backend(ABC):
    """Where clients are trained."""

    states_here: ClassVar[bool] = True
    """Whether clients' states are in the run folder; else they are where the clients are."""

    @abstractmethod
    def open(self, experiment: Experiment, states: ClientStates) -> AbstractContextManager[Runner]:
        """Make ready for a run; closing the context lets everything go.

        Args:
            experiment: the run's settings; its data has been loaded and dealt out.
            states: where clients keep what they remember.
        """


def describe(error: Exception) -> str:
    """Return an error as a line for the user, or with its trace if it is not meant for one."""
    return str(error) if isinstance(error, InputError) else "".join(traceback.format_exception(error)).strip()


def fit_with_state(workspace: Workspace, states: ClientStates, task: FitTask) -> FitResult:
    """Fit a client from the state it kept, and keep its new one."""
    known = states.recall(task.client, task.since) if task.since else None
    result, state = fit_client(workspace, task, init_state(workspace, task) if known is None else known)
    if result.keeps_state:
        states.save(task.client, task.round, state)
    return replace(result, note=RESET) if task.since and known is None else result


def init_state(workspace: Workspace, task: FitTask) -> Record:
    """Return the state of a client that has none yet; Phase 1 knows no states."""
    return {} if task.round == DISCOVERY_ROUND else workspace.experiment.algorithm.init_client(task.weights)
