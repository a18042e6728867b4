"""LocalBackend: clients one after the other, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from jdfl_lightning.backends.base import ATTEMPTS, Backend, Runner, describe, fit_with_state
from jdfl_lightning.client.evaluation import Evaluation, evaluate
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.core.errors import StorageError
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.storage.checkpoint import ClientStates

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


@contextmanager
def limited_threads(threads: int | None) -> Iterator[None]:
    """Set torch's number of threads inside the block; None leaves it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class LocalBackend(Backend):
    """Clients one after the other, in this process."""

    @contextmanager
    def open(self, experiment: Experiment, states: ClientStates) -> Iterator[Runner]:
        """Build one module and train every client with it.

        On features one thread does it: steps are too small for several.
        """
        with limited_threads(1 if experiment.data.features is not None else None):
            yield LocalRunner(Workspace(experiment), states)


class LocalRunner(Runner):
    """One module for everything.

    Args:
        workspace: the data and the module.
        states: storage of the clients' states.
        describe: turns an error of a fit into the reason of its failure.
    """

    def __init__(
        self, workspace: Workspace, states: ClientStates, describe: Callable[[Exception], str] = describe
    ) -> None:
        self._workspace, self._states, self._describe = workspace, states, describe

    def fit(self, tasks: Sequence[FitTask]) -> Iterator[FitResult | FitFailure]:
        """Fit one client after the other."""
        for task in tasks:
            yield self._try(task)

    def _try(self, task: FitTask) -> FitResult | FitFailure:
        for _ in range(ATTEMPTS):
            try:
                return fit_with_state(self._workspace, self._states, task)
            except StorageError:  # not the client's fault: a full disk affects every client
                raise
            except Exception as error:  # whatever a user's algorithm, network or data raises
                reason = self._describe(error)
        return FitFailure(task.client, reason)

    def evaluate(self, models: Mapping[str, Tensors], buffers: Tensors, done: Callable[[Evaluation], None]) -> None:
        """Evaluate the models now."""
        done(evaluate(self._workspace, models, buffers))

    def finish(self) -> None:
        """Do nothing: every evaluation is done at once."""
