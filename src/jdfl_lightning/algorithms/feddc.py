"""FedDC: local drift variables and control variates (Gao et al., 2022)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from jdfl_lightning.algorithms.base import Algorithm, LocalUpdate
from jdfl_lightning.core.errors import require
from jdfl_lightning.core.messages import FitResult, FitTask, RoundContext
from jdfl_lightning.core.tensors import Record, RunningSum, Tensors, add, divide, placed, sub, zeros_like


@dataclass(frozen=True)
class FedDC(Algorithm):
    """hbar <- hbar + (1/N) sum_S (theta_i - theta); theta <- plain mean_S theta_i + hbar; c as in SCAFFOLD."""

    alpha: float = 0.1
    """Strength of the drift's penalty, above 0; a client's is alpha / w_i. The paper: 0.01 in PACS A, 0.1 elsewhere."""

    allows_momentum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha > 0, "--algorithm.alpha", "positive", self.alpha)

    def init_server(self, weights: Tensors) -> Record:
        """The mean drift and the variate start at zero."""
        return {"h": zeros_like(weights), "c": zeros_like(weights)}

    def init_client(self, weights: Tensors) -> Record:
        """A client's drift and variate start at zero."""
        return {"h": zeros_like(weights), "c": zeros_like(weights)}

    def broadcast(self, server: Record) -> Record:
        """Do not send the mean drift: clients need only theta, which includes it."""
        return {"c": server["c"]}

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        """Return the client side for one fit."""
        return DriftUpdate(task, state, self.alpha)

    def upload_form(self, weights: Tensors, server: Record, num_classes: int) -> Record:
        """The change of a client's variate."""
        return {"c_moved": sub(weights, server["c"])}

    def aggregate(
        self, weights: Tensors, server: Record, results: Iterable[FitResult], context: RoundContext
    ) -> tuple[Tensors, Record]:
        """Add the mean drift to the participants' plain mean; update c with the mean change over all N."""
        models, drift, moved = RunningSum(), RunningSum(), RunningSum()
        for result in results:
            models.add(result.weights)
            drift.add(sub(result.weights, weights))
            moved.add(result.upload["c_moved"], result.weight)
        mean_drift = add(server["h"], drift.result(1 / context.num_clients))
        variate = add(server["c"], moved.result(1 / context.num_clients))
        return add(models.mean(), mean_drift), {"h": mean_drift, "c": variate}

    def other_models(self, weights: Tensors, server: Record) -> dict[str, Tensors]:
        """Return the participants' plain mean, beyond which the server's model extrapolates."""
        return {"mean": sub(weights, server["h"])}


class DriftUpdate(LocalUpdate):
    """Local SGD with a_i (theta_i - theta + h_i) + c / w_i - c_i added to every gradient.

    Then h_i <- h_i + D_i and c_i+ = c_i - c / w_i - D_i / (K lr), with D_i = theta_i - theta.
    """

    needs_plain_sgd: ClassVar[bool] = True
    stacks: ClassVar[bool] = True

    def __init__(self, task: FitTask, state: Record, alpha: float) -> None:
        super().__init__(task, state)
        self.strength = alpha / task.weight

    def begin(self, params: Tensors) -> None:
        """Prepare the anchor theta - h_i and the shift c / w_i - c_i, both constant in a fit."""
        self.anchors = placed(sub(self.task.weights, self.state["h"]), params)
        self.shift = placed(sub(divide(self.task.server["c"], self.weight), self.state["c"]), params)

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        """Upload the change of the variate; keep drift and variate."""
        drift, c = sub(weights, self.task.weights), divide(self.task.server["c"], self.weight)
        moved = {n: -c[n] - drift[n] / self.lr_sums[n] for n in drift}
        return {"c_moved": moved}, {"h": add(self.state["h"], drift), "c": add(self.state["c"], moved)}
