"""FedDyn: a dynamic regularizer that makes the clients' optima agree with the server's (Acar et al., 2021)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from jdfl_lightning.algorithms.base import Algorithm, LocalUpdate
from jdfl_lightning.core.errors import require
from jdfl_lightning.core.messages import FitResult, FitTask, RoundContext
from jdfl_lightning.core.tensors import Record, RunningSum, Tensors, add, placed, sub, zeros_like


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """vbar <- vbar + (1/N) sum_S (theta_i - theta); theta <- plain mean_S theta_i + vbar."""

    alpha: float = 0.01
    """Strength of the regularizer, above 0; a client's is alpha / w_i."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha > 0, "--algorithm.alpha", "positive", self.alpha)

    def init_server(self, weights: Tensors) -> Record:
        """The mean dual of all clients starts at zero."""
        return {"v": zeros_like(weights)}

    def init_client(self, weights: Tensors) -> Record:
        """A client's dual starts at zero."""
        return {"v": zeros_like(weights)}

    def broadcast(self, server: Record) -> Record:
        """Do not send the mean dual: clients need only theta, which includes it."""
        return {}

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        """Return the client side for one fit."""
        return DualUpdate(task, state, self.alpha)

    def aggregate(
        self, weights: Tensors, server: Record, results: Iterable[FitResult], context: RoundContext
    ) -> tuple[Tensors, Record]:
        """Add the mean dual to the participants' plain mean."""
        models, drift = RunningSum(), RunningSum()
        for result in results:
            models.add(result.weights)
            drift.add(sub(result.weights, weights))
        dual = add(server["v"], drift.result(1 / context.num_clients))
        return add(models.mean(), dual), {"v": dual}

    def other_models(self, weights: Tensors, server: Record) -> dict[str, Tensors]:
        """Return the participants' plain mean, beyond which the server's model extrapolates."""
        return {"mean": sub(weights, server["v"])}


class DualUpdate(LocalUpdate):
    """Local SGD with a_i (theta_i - theta + v_i) added to every gradient; then v_i <- v_i + theta_i - theta."""

    stacks: ClassVar[bool] = True

    def __init__(self, task: FitTask, state: Record, alpha: float) -> None:
        super().__init__(task, state)
        self.strength = alpha / task.weight

    def begin(self, params: Tensors) -> None:
        """Prepare the anchor theta - v_i, so that a_i (theta_i - theta + v_i) is added."""
        self.anchors = placed(sub(self.task.weights, self.state["v"]), params)

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        """Keep the new dual; upload nothing, as the server computes the mean dual from the weights."""
        return {}, {"v": add(self.state["v"], sub(weights, self.task.weights))}
