"""Discovery without federation: groups of data are clustered like the clients in Phase 1."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from jdfl_lightning.client.fit import train
from jdfl_lightning.client.probe import DiscoveryProbe
from jdfl_lightning.client.trainer import TrainerOptions
from jdfl_lightning.clustering.clusters import PseudoDomains, cluster, project
from jdfl_lightning.clustering.criteria import Criterion
from jdfl_lightning.clustering.updates import Updates, reason_unusable
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitTask
from jdfl_lightning.core.seeding import derive_seed
from jdfl_lightning.core.tensors import snapshot
from jdfl_lightning.data.base import Progress, no_progress
from jdfl_lightning.models import select_parameters


@dataclass(frozen=True, repr=False)
class GroupDomains:
    """Pseudo-domains of named groups of data."""

    names: list[str]
    """The groups."""
    vectors: Tensor
    """Their normalised updates (groups, D)."""
    found: PseudoDomains
    """The clustering: how M was chosen, inertias, silhouettes; groups are identified by their index."""

    def __repr__(self) -> str:
        """Show the result without the vectors, which are as long as the weights."""
        return f"GroupDomains(num_domains={self.num_domains}, assignments={self.assignments})"

    @property
    def assignments(self) -> dict[str, int]:
        """The pseudo-domain of each group."""
        return {name: self.found.assignments[number] for number, name in enumerate(self.names)}

    @property
    def num_domains(self) -> int:
        """M."""
        return self.found.num_domains

    @property
    def centroids(self) -> Tensor:
        """mu_d (M, D), the input of `GradedTargets`."""
        return self.found.centroids

    def record(self, true_domains: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the content of a run's ``discovery.json``, with group names as keys, for the same tables and figure.

        Args:
            true_domains: the true domain of each group, where it is known.
        """
        truth = None if true_domains is None else [true_domains[name] for name in self.names]
        record = self.found.as_json(truth)
        record["assignments"] = self.assignments
        if truth is not None:
            record["true_domains"] = dict(zip(self.names, truth, strict=True))
        return record | {"projection": dict(zip(self.names, project(self.vectors), strict=True)), "left_out": {}}


def discover_domains(
    module: pl.LightningModule,
    loaders: Mapping[str, Iterable[Any]],
    epochs: int = 3,
    layers: str | list[str] = "B",
    num_domains: int | None = None,
    criterion: Criterion | str = "elbow",
    max_domains: int = 10,
    seed: int = 0,
    trainer: TrainerOptions | None = None,
    progress: Progress = no_progress,
) -> GroupDomains:
    """Find pseudo-domains among groups of data - clinics, cameras, years - as in a federated run.

    A copy of the module is trained briefly on each group, always from the same weights, and the directions in which
    the weights moved are clustered. The module, its mode and all random generators, including those of the loaders,
    are restored. On the CPU, two calls with one seed give bit-identical results.

    Args:
        module: an ordinary classifier, such as a `JointModule` without targets, or a LightningModule of your own.
        loaders: the training batches of each group, by its name; what the module's ``training_step`` takes.
        epochs: E_0, passes through each group.
        layers: parameters to compare: for a `JointModule` ``"A"`` (head), ``"B"`` (last conv block and head) or ``"C"``
            (last two and head); patterns of parameter names (``["model.layer4.*", "model.fc.*"]``) for any module.
        num_domains: M if it is known; fewer than four groups are too few to find it by an elbow.
        criterion: how M is chosen otherwise: elbow, silhouette, or your own `Criterion`.
        max_domains: the largest M to try.
        seed: seed of shuffling, dropout and k-means.
        trainer: accelerator and precision, if not Lightning's defaults.
        progress: called with (name, done, total) after each group, for example ``print``.
    """
    if not loaders or epochs < 1 or max_domains < 1:
        raise InputError(
            "Expected `loaders` of one group or more, and `epochs` and `max_domains` of 1 or more, but got "
            f"{len(loaders)} groups, {epochs} and {max_domains}."
        )
    if num_domains is not None and not 1 <= num_domains <= len(loaders):
        raise InputError(
            f"Expected `num_domains` to be between 1 and the number of groups, {len(loaders)}, but got {num_domains}."
        )
    names = select_parameters(module, layers)
    theta_0 = snapshot({name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad})
    vectors = []
    for number, (name, loader) in enumerate(loaders.items()):
        probe = DiscoveryProbe(FitTask(number, DISCOVERY_ROUND, seed, theta_0), names)
        with _own_randomness(loader, derive_seed(seed, "group", number)):
            weights, _ = train(copy.deepcopy(module), loader, probe, epochs, trainer or TrainerOptions())
        update = probe.report(weights)[0]["update"]["u"]
        problem = reason_unusable(update) if probe.num_steps else "it has no batch"
        if problem is not None:
            raise InputError(f"Expected every group to give an update but {name!r} does not: {problem}.")
        vectors.append(update)
        progress(name, number + 1, len(loaders))
    updates = Updates(list(range(len(vectors))), torch.stack(vectors))
    return GroupDomains(list(loaders), updates.vectors, cluster(updates, num_domains, criterion, max_domains, seed))


@contextmanager
def _own_randomness(loader: Iterable[Any], seed: int) -> Iterator[None]:
    """Seed Python and NumPy, which transforms use, for the block; then restore them and the loader's generator."""
    own = getattr(loader, "generator", None)
    state = own.get_state() if isinstance(own, torch.Generator) else None
    try:
        with isolate_rng():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        if isinstance(own, torch.Generator) and state is not None:
            own.set_state(state)
