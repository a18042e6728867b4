"""What a backend is: tasks in, results out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from jdfl_lightning.checkpoint import ClientStates
from jdfl_lightning.messages import FitResult, FitTask

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment

Runner = Callable[[Sequence[FitTask]], Iterator[FitResult]]
"""Fits the clients of some tasks and gives their results in the order of the tasks, each as soon as it can."""


class Backend(ABC):
    """Where clients are trained."""

    @abstractmethod
    def open(self, experiment: Experiment, states: ClientStates) -> AbstractContextManager[Runner]:
        """Make ready for a run; closing the context lets everything go.

        Args:
            experiment: the run's settings; its data has been loaded and dealt out.
            states: where clients keep what they remember.
        """
