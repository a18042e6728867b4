"""PrivateFedAvg: FedAvg with client-level differential privacy at a trusted server (McMahan et al., 2018)."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from jdfl_lightning.algorithms.fedavg import FedAvg
from jdfl_lightning.algorithms.privacy import KEY_BYTES, STEPS, digest, grid_noise, secret_sample, spent_epsilon
from jdfl_lightning.core.errors import require
from jdfl_lightning.core.messages import FitResult, RoundContext
from jdfl_lightning.core.tensors import Record, Tensors, norm, sub

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


@dataclass(frozen=True)
class PrivateFedAvg(FedAvg):
    """theta <- theta + (sum of clipped updates + noise) / number of clients asked; all have equal weight.

    The sampling of clients and the noise come from a secret key in the server's record. The noise is a
    pseudo-random function of the key, the round and the sum it is added to, as in a deterministic signature. A round
    that is repeated with the same answers gets the same noise and so the same model, which reveals nothing new. With
    other answers it gets independent noise: the difference of two models never shows updates without noise.

    Updates and noise are whole multiples of one step, z C / 2^24. An update is rounded towards zero, which never makes
    it longer, and sums are exact in any order. As the sum is on the grid, adding rounded noise is the same as adding
    real-valued noise and then rounding: the last bits of a weight reveal nothing more.
    """

    clip_norm: float = 1.0
    """C, the largest norm of a client's update; longer updates are scaled down to it."""
    noise_multiplier: float = 1.0
    """z: the sum of a round's updates gets Gaussian noise of standard deviation z C."""
    delta: float = 1e-5
    """The delta for which epsilon is reported; below 1 / number of clients."""

    allows_discovery: ClassVar[bool] = False
    allows_buffers: ClassVar[bool] = False
    tells_weights: ClassVar[bool] = False
    may_be_empty: ClassVar[bool] = True
    keeps_best: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clip_norm", "noise_multiplier"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"--algorithm.{name}", "positive and finite", value)
        require(0 < self.delta < 1, "--algorithm.delta", "between 0 and 1", self.delta)

    def check_settings(self, experiment: Experiment) -> None:
        """Refuse settings under which the guarantee would not hold."""
        super().check_settings(experiment)
        clients = experiment.data.num_clients
        why = "as a larger one allows to publish one client's data"
        require(self.delta < 1 / clients, "--algorithm.delta", f"below 1 / {clients} clients, {why},", self.delta)
        senders = [type(part).__name__ for part in experiment.regularizers if part.sends]
        why = "as the files of its clients' states show who took part"
        require(not experiment.private, "--private", f"left out with PrivateFedAvg, {why},", experiment.private)
        why = "as their sums would leave a client without noise"
        require(
            not senders,
            "--regularizers",
            f"without ones to which clients send sums with PrivateFedAvg, {why},",
            senders,
        )
        for flag, value, wanted, why in (
            ("max_update_norm", experiment.max_update_norm, None, "which clips"),
            ("min_clients", experiment.min_clients, 1, "as no round may be void"),
            ("checkpoint.every", experiment.checkpoint.every, 1, "so that no round is repeated that was published"),
        ):
            named = "null" if wanted is None else wanted
            require(value == wanted, f"--{flag}", f"{named} with PrivateFedAvg, {why},", value)

    def check_run(self, experiment: Experiment, buffers: Tensors) -> None:
        """Refuse a network that sends more than trained weights; check that epsilon can be computed."""
        super().check_run(experiment, buffers)
        spent_epsilon(self.noise_multiplier, self.delta, experiment.data.num_clients, experiment.clients_per_round, 1)

    def init_server(self, weights: Tensors) -> Record:
        """Generate the secret key of a run."""
        return {"secret": {"key": torch.frombuffer(bytearray(secrets.token_bytes(KEY_BYTES)), dtype=torch.uint8)}}

    def broadcast(self, server: Record) -> Record:
        """Send nothing: the key never leaves the server."""
        return {}

    def sample(self, server: Record, context: RoundContext) -> list[int]:
        """Sample the participants with the secret key: epsilon assumes that participation is secret."""
        return secret_sample(_key(server), context.num_clients, context.asked, context.number, context.attempt)

    def aggregate(
        self, weights: Tensors, server: Record, results: Iterable[FitResult], context: RoundContext
    ) -> tuple[Tensors, Record]:
        """Add the mean of the clipped updates, with noise; a client that did not answer has an update of zero.

        So a missing client does not change the weight of the others.
        """
        step = self.noise_multiplier * self.clip_norm / STEPS
        total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in weights.items()}
        answered: list[int] = []
        for result in results:
            update = sub(result.weights, weights)
            factor = min(1.0, self.clip_norm / max(norm(update), 1e-30)) / step
            for name, tensor in update.items():
                total[name] += (tensor.double() * factor).trunc_()
            answered.append(result.client)
        where = (context.number, context.attempt, str(sorted(answered)), digest(total))
        moved: Tensors = {}
        for name, tensor in weights.items():
            noise = grid_noise(_key(server), tensor.numel(), *where, name).view(tensor.shape)
            moved[name] = (tensor + (total[name] + noise) * (step / context.asked)).to(tensor.dtype)
        return moved, server

    def metrics(self, server: Record, context: RoundContext) -> dict[str, float]:
        """Return the privacy budget spent after a round."""
        spent = spent_epsilon(
            self.noise_multiplier, self.delta, context.num_clients, context.asked, rounds=context.number
        )
        return {"privacy/epsilon": spent}


def _key(server: Record) -> bytes:
    return bytes(server["secret"]["key"].tolist())
