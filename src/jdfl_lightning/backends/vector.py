"""VectorBackend: the clients of a round trained together, for small networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jdfl_lightning.backends.base import RESET, Backend, Runner, state_of
from jdfl_lightning.backends.local import LocalRunner, limited_threads
from jdfl_lightning.client.fit import LocalFit, Workspace, begin_fit, begin_second, end_fit, second_state
from jdfl_lightning.client.loop import has_known_hooks
from jdfl_lightning.client.stack import check_stackable, fit_stack
from jdfl_lightning.core.errors import StorageError, last_line, require, require_types
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Record
from jdfl_lightning.storage.checkpoint import ClientStates

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


@dataclass(frozen=True)
class VectorBackend(Backend):
    """The clients of a round trained together in this process, as one stack of networks: fast for small networks.

    It suits heads on the features of a frozen backbone, and other networks of a few layers. Weights agree with those of
    other backends to rounding, not to the bit: sums run in another order. Where a network has ReLU or max-pooling,
    rounding can decide which of two values is larger, and such differences grow over the rounds.
    """

    group: int = 256
    """Clients that are trained together; memory grows with it, and by twice their states while these are saved."""

    def __post_init__(self) -> None:
        require_types(self, "--backend.")
        require(self.group > 0, "--backend.group", "positive", self.group)

    @contextmanager
    def open(self, experiment: Experiment, states: ClientStates) -> Iterator[Runner]:
        """Build one module, and check that copies of it can be stacked; on features one thread does it."""
        with limited_threads(1 if experiment.data.features is not None else None):
            workspace = Workspace(experiment)
            check_stackable(workspace)
            yield VectorRunner(workspace, states, self.group)


class VectorRunner(LocalRunner):
    """Trains groups of clients together; a group that fails, or cannot be stacked, is trained one by one.

    Args:
        workspace: the data and the module.
        states: storage of the clients' states.
        group: clients that are trained together.
    """

    def __init__(self, workspace: Workspace, states: ClientStates, group: int) -> None:
        super().__init__(workspace, states)
        self._group = group
        self._has_said = False

    def fit(self, tasks: Sequence[FitTask]) -> Iterator[FitResult | FitFailure]:
        """Fit one group after the other; clients' own models are evaluated one by one."""
        if tasks and tasks[0].personal:
            yield from super().fit(tasks)
            return
        for start in range(0, len(tasks), self._group):
            group = tasks[start : start + self._group]
            together = self._fit_group(group)
            if isinstance(together, str):
                yield from self._fit_alone(group, together)
            else:
                yield from together

    def _fit_alone(self, tasks: Sequence[FitTask], reason: str) -> Iterator[FitResult | FitFailure]:
        """Fit one client after the other; the first answer of a run that comes this way says why."""
        for result in super().fit(tasks):
            if not self._has_said and isinstance(result, FitResult) and tasks[0].round != DISCOVERY_ROUND:
                self._has_said = True
                why = f"its group, and others that cannot be trained together, are trained one by one: {reason}"
                yield replace(result, note="; ".join(filter(None, (result.note, why))))
            else:
                yield result

    def _fit_group(self, tasks: Sequence[FitTask]) -> list[FitResult | FitFailure] | str:
        """Return the results of a group trained together, or why it cannot be: one by one the fault is found."""
        workspace, states = self._workspace, self._states
        try:
            fits: list[LocalFit] = []
            seconds: list[LocalFit] = []
            known = states.recall_all({task.client: task.since for task in tasks if task.since})
            for task in tasks:
                state = state_of(workspace, task, known.get(task.client))
                fits.append(begin_fit(workspace, task, state))
                if (second := begin_second(workspace, task, state)) is not None:
                    seconds.append(second)
            if not all(has_known_hooks(fit.update) and not fit.task.every_epoch for fit in fits):
                return "its algorithm acts between the steps of a fit"
            if any(fit.targets is not None and [*fit.targets.parameters()] for fit in fits):
                return "its target rule has parameters of its own"
            results: list[FitResult | FitFailure] = []
            new: dict[int, Record] = {}
            own = fit_stack(workspace, seconds) if seconds else [{}] * len(fits)
            for fit, weights, personal in zip(fits, fit_stack(workspace, fits), own, strict=True):
                task = fit.task
                result, state = end_fit(workspace, fit, weights, fit.buffers, {})
                if seconds:
                    state = state | second_state(workspace, personal, fit.buffers)
                if result.keeps_state:
                    new[task.client] = state
                reset = task.since and known[task.client] is None
                results.append(replace(result, note=RESET) if reset else result)
            states.save_all(tasks[0].round, new)
            return results
        except StorageError:  # not the client's fault: a full disk affects every client
            raise
        except Exception as error:  # whatever a part of the user's raises
            return last_line(f"{type(error).__name__}: {error}")
