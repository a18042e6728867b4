"""LocalBackend: clients one after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jdfl_lightning.backends.base import Backend, Runner
from jdfl_lightning.checkpoint import ClientStates
from jdfl_lightning.client import Site, fit_client
from jdfl_lightning.messages import DISCOVERY, FitResult, FitTask

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


@dataclass(frozen=True)
class LocalBackend(Backend):
    """Clients one after the other, in this process."""

    @contextmanager
    def open(self, experiment: Experiment, states: ClientStates) -> Iterator[Runner]:
        """Build one module and train every client with it."""
        site = Site(experiment)

        def run(tasks: Sequence[FitTask]) -> Iterator[FitResult]:
            for task in tasks:
                if task.round == DISCOVERY:
                    yield fit_client(site, task, {})[0]
                    continue
                state = states.load(task.client)
                result, state = fit_client(
                    site, task, experiment.algorithm.init_client(task.weights) if state is None else state
                )
                states.save(task.client, state)
                yield result

        yield run
