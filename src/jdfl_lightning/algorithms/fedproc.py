"""FedProc: local features are aligned with global prototypes of the classes (Mu et al., 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from jdfl_lightning.algorithms.base import LocalUpdate
from jdfl_lightning.algorithms.fedavg import FedAvg
from jdfl_lightning.core.messages import FitResult, FitTask, RoundContext
from jdfl_lightning.core.tensors import Record, RunningSum, Tensors
from jdfl_lightning.joint import JointHead
from jdfl_lightning.models.features import class_features, reason_impossible


class _Loader(Protocol):
    """The training batches of a client."""

    def plain(self) -> Iterable[Sequence[Tensor]]:
        """Return the same images, labels and domains without augmentation."""


def prototype_contrast(features: Tensor, prototypes: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    r"""Return the softmax cross-entropy of :math:`z \cdot P_k` over the classes seen so far, the mean over a batch.

    Features and prototypes are normalised. A class never seen has no prototype: it is left out of the denominator,
    and samples of it are left out of the mean.

    >>> prototypes, z = torch.eye(2), torch.tensor([[1.0, 0.0]])
    >>> [prototype_contrast(z, prototypes, torch.tensor([True, True]), torch.tensor([y])) for y in (0, 1)]
    [tensor(0.3133), tensor(1.3133)]
    """
    known = seen[labels]
    if not known.any():
        return features.new_zeros(())
    if not known.all():  # to pick rows takes longer than all that follows
        features, labels = features[known], labels[known]
    return cross_entropy(_scores(features, prototypes, seen), labels)


def _scores(features: Tensor, prototypes: Tensor, seen: Tensor) -> Tensor:
    """Return the cosines of features (B, F) and prototypes (C, F); a class never seen has none."""
    # in single precision: in half precision the guard against a zero norm would underflow
    scores: Tensor = normalize(features.float(), dim=1) @ normalize(prototypes.float(), dim=1).T
    return scores.masked_fill(~seen, -torch.inf)


@dataclass(frozen=True)
class FedProc(FedAvg):
    """Loss a_t * task + (1 - a_t) * contrast with a_t = min(t / T, 1); the first round has the task's loss alone."""

    has_schedule: ClassVar[bool] = True

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        """Return the client side for one fit."""
        return PrototypeUpdate(task, state)

    def upload_form(self, weights: Tensors, server: Record, num_classes: int) -> Record:
        """Sums of normalised features and numbers of samples, for each class."""
        sums = weights["head.weight"].new_empty(num_classes, weights["head.weight"].shape[1], dtype=torch.float64)
        return {"features": {"sums": sums, "counts": sums[:, 0]}}

    def reason_unusable(self, upload: Record) -> str | None:
        """Features have norm 1, so the norm of a class's sum is at most its number of samples."""
        return reason_impossible(upload["features"])

    def aggregate(
        self, weights: Tensors, server: Record, results: Iterable[FitResult], context: RoundContext
    ) -> tuple[Tensors, Record]:
        """Average the models; a class's prototype is the mean feature over all participants' samples of it.

        A client that reports more samples than the server knows of is scaled down to the known number.
        """
        features = RunningSum()

        def watch() -> Iterable[FitResult]:
            for result in results:
                counted = float(result.upload["features"]["counts"].sum())
                features.add(result.upload["features"], min(1.0, result.num_examples / max(counted, 1.0)))
                yield result

        weights, _ = super().aggregate(weights, {}, watch(), context)
        totals = features.result()
        present = totals["counts"] > 0
        means = totals["sums"] / totals["counts"].clamp_min(1).unsqueeze(1)
        old = server.get("prototypes", {"means": torch.zeros_like(means), "seen": torch.zeros_like(present)})
        return weights, {
            "prototypes": {
                "means": torch.where(present.unsqueeze(1), means, old["means"]),
                "seen": old["seen"] | present,
            }
        }


class PrototypeUpdate(LocalUpdate):
    """Local SGD on the mixed loss; after it, features summed by class over all the client's data in eval mode."""

    def __init__(self, task: FitTask, state: Record) -> None:
        super().__init__(task, state)
        self.progress = min((task.round - 1) / task.rounds, 1.0)
        self._prototypes: tuple[Tensor, Tensor] | None = None
        self._features: Tensors = {}

    def begin(self, params: Tensors) -> None:
        """Copy the prototypes to the device of the parameters."""
        if "prototypes" in self.task.server:
            device = next(iter(params.values())).device
            prototypes = self.task.server["prototypes"]
            self._prototypes = prototypes["means"].float().to(device), prototypes["seen"].to(device)

    def loss(self, task_loss: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Mix the task's loss and the contrast with the prototypes."""
        if self._prototypes is None:
            return task_loss
        means, seen = self._prototypes
        term = prototype_contrast(features, means, seen, labels)
        return self.progress * task_loss + (1 - self.progress) * term

    @staticmethod
    def losses(
        updates: Sequence[PrototypeUpdate], task_losses: Tensor, features: Tensor, labels: Tensor, present: Tensor
    ) -> Tensor:
        """Mix the losses of a round's clients, who have the same prototypes, at once."""
        progress, prototypes = updates[0].progress, updates[0]._prototypes
        if prototypes is None:
            return task_losses
        means, seen = prototypes
        each = cross_entropy(_scores(features.flatten(0, 1), means, seen), labels.flatten(), reduction="none")
        known = seen[labels] & present
        total = each.view(labels.shape).masked_fill(~known, 0.0).sum(dim=1)
        return progress * task_losses + (1 - progress) * total / known.sum(dim=1).clamp_min(1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sum the normalised features of each class with the client's own model, of images without augmentation."""
        backbone, head = cast(nn.Module, pl_module.backbone), cast(JointHead, pl_module.head)
        self._features = class_features(backbone, head, cast(_Loader, trainer.train_dataloader).plain())

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        """Upload sums and counts; keep no state."""
        return {"features": self._features}, {}
