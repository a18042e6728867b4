"""Central differential privacy for clients: updates are clipped, their mean is noised, the budget spent is counted."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from jdfl_lightning.errors import InputError, StorageError, require
from jdfl_lightning.files import write_whole
from jdfl_lightning.messages import FitResult
from jdfl_lightning.seeding import torch_generator
from jdfl_lightning.tensors import RunningSum, Tensors, norm, sub


@dataclass(frozen=True)
class Privacy:
    """Client-level differential privacy, with a server that is trusted; off unless clip_norm is given."""

    clip_norm: float | None = None
    """C, the longest update of a client; longer ones are shortened to it. null: no privacy."""
    noise_multiplier: float = 1.0
    """z: the sum of a round's updates gets Gaussian noise of standard deviation z C."""
    delta: float = 1e-5
    """The delta for which epsilon is reported; below 1 / number of clients."""

    def __post_init__(self) -> None:
        bounded = self.clip_norm is None or 0 < self.clip_norm < math.inf
        require(bounded, "--privacy.clip_norm", "positive and finite", self.clip_norm)
        require(self.noise_multiplier > 0, "--privacy.noise_multiplier", "positive", self.noise_multiplier)
        require(0 < self.delta < 1, "--privacy.delta", "between 0 and 1", self.delta)
        asked = (self.noise_multiplier, self.delta) != (Privacy.noise_multiplier, Privacy.delta)
        require(self.clip_norm is not None or not asked, "--privacy.clip_norm", "given with --privacy", None)


def private_mean(
    weights: Tensors, results: Iterator[FitResult], count: int, privacy: Privacy, key: int, round: int
) -> Tensors:
    """Return theta + (sum of clipped updates + noise) / count, every client counting the same.

    Args:
        weights: theta, as it was sent out.
        results: the participants' answers.
        count: clients that were asked; one that did not answer counts as an update of zero, so that nobody's absence
            changes what the others weigh.
        privacy: clipping norm and noise.
        key: secret of the run, of which the noise is a function.
        round: the round.
    """
    assert privacy.clip_norm is not None
    total = RunningSum()
    total.add({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    for result in results:
        update = sub(result.weights, weights)
        total.add(update, min(1.0, privacy.clip_norm / max(norm(update), 1e-30)))
    deviation, mean = privacy.noise_multiplier * privacy.clip_norm / count, total.result(1 / count)
    noised: Tensors = {}
    for name, tensor in weights.items():
        generator = torch_generator(key, "privacy", round, name)
        noise = deviation * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        noised[name] = tensor + mean[name] + noise.to(tensor.dtype)
    return noised


def noise_key(folder: Path) -> int:
    """Return the secret of a run that its noise is a function of: drawn when the run begins, kept in its folder.

    It is not the run's seed, which is no secret: two runs of one seed would share their noise.
    """
    file = folder / "privacy.key"
    if not file.exists():
        write_whole(file, str(secrets.randbits(128)).encode())
    try:
        return int(file.read_text())
    except (OSError, ValueError) as error:
        raise StorageError(f"Expected the secret of a private run but {file} cannot be read: {error}.") from error


def spent_epsilon(privacy: Privacy, num_clients: int, per_round: int, rounds: int) -> float:
    """Return epsilon after some rounds, by Renyi accounting of sampling without replacement.

    Neighbouring federations differ in one client's data, so that a round's sum changes by at most 2 C: the noise is
    z / 2 in units of that.
    """
    try:
        from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent, SelfComposedDpEvent
        from dp_accounting.privacy_accountant import NeighboringRelation
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise InputError("Expected dp-accounting for --privacy: pip install 'jdfl-lightning[privacy]'.") from error
    event = GaussianDpEvent(privacy.noise_multiplier / 2)
    if per_round < num_clients:
        event = SampledWithoutReplacementDpEvent(num_clients, per_round, event)
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(SelfComposedDpEvent(event, rounds))
    return float(accountant.get_epsilon(privacy.delta))
