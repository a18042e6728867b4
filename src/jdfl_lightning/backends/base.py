"""The interface of a backend: tasks in, results out."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from jdfl_lightning.client.evaluation import Evaluation, evaluate_personal
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Record, Tensors
from jdfl_lightning.storage.checkpoint import ClientStates

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


RESET = "its saved state was damaged, so that it started afresh"
ATTEMPTS = 2
"""Number of attempts at a client's fit."""


class Runner(ABC):
    """An open backend: fits clients and evaluates models."""

    @abstractmethod
    def fit(self, tasks: Sequence[FitTask]) -> Iterator[FitResult | FitFailure]:
        """Fit the clients of some tasks; yield their results in the order of the tasks, each as early as possible.

        A client whose fit raises, or kills its process, is tried once more; then its failure is yielded.
        """

    @abstractmethod
    def evaluate(self, models: Mapping[str, Tensors], buffers: Tensors, done: Callable[[Evaluation], None]) -> None:
        """Evaluate models that share their buffers; call ``done`` with the outcome, at once or during later fits."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every evaluation is done."""


class Backend(ABC):
    """Where clients are trained."""

    states_here: ClassVar[bool] = True
    """Whether clients' states are in the run folder; else they are at the sites."""

    @abstractmethod
    def open(self, experiment: Experiment, states: ClientStates) -> AbstractContextManager[Runner]:
        """Start the backend for a run; closing the context frees all resources.

        Args:
            experiment: the run's settings; its data is loaded and partitioned.
            states: storage of the clients' states.
        """


def describe(error: Exception) -> str:
    """Return the message of an error meant for users, or the traceback of any other error."""
    return str(error) if isinstance(error, InputError) else "".join(traceback.format_exception(error)).strip()


def fit_with_state(workspace: Workspace, states: ClientStates, task: FitTask) -> FitResult:
    """Fit a client from its saved state, and save its new state."""
    known = states.recall(task.client, task.since) if task.since else None
    result, state = do_task(workspace, task, state_of(workspace, task, known))
    if result.keeps_state:
        states.save(task.client, task.round, state)
    return replace(result, note=RESET) if task.since and known is None else result


def do_task(workspace: Workspace, task: FitTask, state: Record) -> tuple[FitResult, Record]:
    """Fit a client, or evaluate its own model; return its answer and its new state."""
    return (evaluate_personal(workspace, task, state), {}) if task.personal else fit_client(workspace, task, state)


def state_of(workspace: Workspace, task: FitTask, known: Record | None) -> Record:
    """Return a client's state: the saved one, or the initial one if there is none; Phase 1 uses no states."""
    if task.round == DISCOVERY_ROUND:
        return {}
    if known is not None and not workspace.private:
        return known
    initial = workspace.experiment.algorithm.init_client(task.weights)
    return initial | (known or {})  # a file has no groups without tensors, as an algorithm's are if all are private
