"""SCAFFOLD: control variates at server and clients correct the drift of local steps (Karimireddy et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from jdfl_lightning.algorithms.base import LocalUpdate
from jdfl_lightning.algorithms.fedavg import FedAvg
from jdfl_lightning.core.errors import require
from jdfl_lightning.core.messages import FitResult, FitTask, RoundContext
from jdfl_lightning.core.tensors import Record, RunningSum, Tensors, add, placed, sub, zeros_like


@dataclass(frozen=True)
class SCAFFOLD(FedAvg):
    """Option II of the paper: theta <- theta + lr_g (mean_S theta_i - theta); c <- c + (1/N) sum_S w_i (c_i+ - c_i)."""

    global_lr: float = 1.0
    """lr_g, the server's step size."""

    allows_momentum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.global_lr > 0, "--algorithm.global_lr", "positive", self.global_lr)

    def init_server(self, weights: Tensors) -> Record:
        """The server's variate starts at zero."""
        return {"c": zeros_like(weights)}

    def init_client(self, weights: Tensors) -> Record:
        """A client's variate starts at zero."""
        return {"c": zeros_like(weights)}

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        """Return the client side for one fit."""
        return VariateUpdate(task, state)

    def upload_form(self, weights: Tensors, server: Record, num_classes: int) -> Record:
        """The change of a client's variate."""
        return {"c_moved": sub(weights, server["c"])}

    def aggregate(
        self, weights: Tensors, server: Record, results: Iterable[FitResult], context: RoundContext
    ) -> tuple[Tensors, Record]:
        """Step towards the participants' mean; add the sum of the participants' variate changes over N to c."""
        models, moved = RunningSum(), RunningSum()
        for result in results:
            models.add(result.weights, self.share(result))
            moved.add(result.upload["c_moved"], result.weight)
        mean = models.mean()
        if self.global_lr != 1:
            mean = add(weights, sub(mean, weights), alpha=self.global_lr)
        return mean, {"c": add(server["c"], moved.result(1 / context.num_clients))}


class VariateUpdate(LocalUpdate):
    """Local SGD with c - c_i added to every gradient; then c_i+ = c_i - c + (theta - theta_i) / (K lr)."""

    needs_plain_sgd: ClassVar[bool] = True
    stacks: ClassVar[bool] = True

    def begin(self, params: Tensors) -> None:
        """Prepare the shift c - c_i, which is constant in a fit."""
        self.shift = placed(sub(self.task.server["c"], self.state["c"]), params)

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        """Upload the change of the variate; keep the new variate."""
        gradient = {n: (self.task.weights[n] - weights[n]) / self.lr_sums[n] for n in weights}
        moved = sub(gradient, self.task.server["c"])
        return {"c_moved": moved}, {"c": add(self.state["c"], moved)}
