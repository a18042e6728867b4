"""Parts that a user might bring, found by their import paths in every process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from jdfl_lightning import DigitsDomains
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.clustering.criteria import Clusterings, Criterion
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import JointHead, TargetRule
from jdfl_lightning.regularizers import Regularizer, Step, Term
from jdfl_lightning.supervision import ClientSums, RoundInfo, Supervision


@dataclass(frozen=True)
class Halves(Supervision):
    """Half of the mass on the own pseudo-domain, half on the next one."""

    own: float = 0.5

    def table(self, centroids: Tensor) -> Tensor:
        eye = torch.eye(len(centroids))
        return self.own * eye + (1 - self.own) * eye.roll(1, dims=1)


class CountingRule(TargetRule):
    """A table that counts the samples of each class."""

    def __init__(self, table: Tensor, num_classes: int) -> None:
        super().__init__(table)
        self.num_classes = num_classes
        self.seen = torch.zeros(num_classes)

    def forward(
        self,
        domains: Tensor,
        generator: torch.Generator | None = None,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        assert labels is not None
        assert logits is not None
        assert not logits.requires_grad
        self.seen = self.seen + one_hot(labels.cpu(), self.num_classes).sum(dim=0)
        return super().forward(domains, generator)


@dataclass(frozen=True)
class Counting(Supervision):
    """The server counts what its clients have seen; the more it has, the more mass is on the own pseudo-domain."""

    num_classes: int = 10

    def init(self, centroids: Tensor, num_classes: int) -> Tensors:
        return {"seen": torch.zeros(len(centroids), num_classes)}

    def table(self, centroids: Tensor) -> Tensor:
        return torch.eye(len(centroids))

    def broadcast(self, record: Tensors, info: RoundInfo) -> Tensors:
        m = len(info.centroids)
        share = float(1 - 1 / (1 + record["seen"].sum() / 1000))
        return {"table": share * torch.eye(m) + (1 - share) * torch.full((m, m), 1 / m)}

    def rule(self, sent: Tensors, domain: int) -> TargetRule:
        return CountingRule(super().rule(sent, domain).table, self.num_classes)

    def collect(self, rule: TargetRule) -> Tensors:
        assert isinstance(rule, CountingRule)
        return {"seen": rule.seen}

    def upload_form(self, sent: Tensors, num_classes: int) -> Tensors:
        return {"seen": torch.empty(num_classes, device="meta")}

    def update(self, record: Tensors, answers: Sequence[ClientSums]) -> Tensors:
        seen = record["seen"].clone()
        for answer in answers:
            seen[answer.domain] += answer.sums["seen"]
        return {"seen": seen}

    def metrics(self, record: Tensors) -> dict[str, float]:
        return {"seen": float(record["seen"].sum())}


class ShortTerm(Term):
    """The mean squared norm of the features, and their number."""

    def __init__(self, weight: float) -> None:
        super().__init__(weight)
        self.count = torch.zeros(1)

    def value(self, step: Step) -> Tensor:
        self.count = self.count + len(step.features)
        return step.features.square().sum(dim=1).mean()

    def collect(self) -> Tensors:
        return {"count": self.count}


@dataclass(frozen=True)
class Short(Regularizer):
    """Short features; the server counts the samples."""

    def init(self, num_domains: int, num_classes: int, num_features: int) -> Tensors:
        return {"count": torch.zeros(1)}

    def term(self, sent: Tensors) -> Term:
        return ShortTerm(self.weight)

    def upload_form(self, sent: Tensors, num_classes: int) -> Tensors:
        return {"count": torch.empty(1, device="meta")}

    def update(self, record: Tensors, answers: Sequence[ClientSums]) -> Tensors:
        return {"count": record["count"] + sum(answer.sums["count"] for answer in answers)}


class Smooth(JointModule):
    """Noisy images, a scaled loss, a metric of its own."""

    def __init__(self, noise: float = 0.1, **rest: Any) -> None:
        super().__init__(**rest)
        self.noise = noise

    def augment(self, images: Tensor) -> Tensor:
        return images + self.noise * torch.randn_like(images)

    def task_loss(self, logits: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
        loss = super().task_loss(logits, weights, labels)
        self.log("train/twice", 2 * loss, on_step=False, on_epoch=True, batch_size=len(labels))
        return loss


class Neck(JointModule):
    """Layers of its own between backbone and head, with running statistics and a frozen parameter."""

    def __init__(self, width: int = 5, **rest: Any) -> None:
        super().__init__(**rest)
        head = self.head
        self.neck = nn.Sequential(nn.Linear(head.in_features, width), nn.BatchNorm1d(width))
        self.scale = nn.Parameter(torch.randn(width), requires_grad=False)
        self.head = JointHead(width, head.num_classes, head.num_domains, score=head.score)

    def features(self, images: Tensor) -> Tensor:
        found: Tensor = self.neck(self.backbone(images)) * self.scale
        return found

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        images, labels, domains = batch
        features = self.features(images)
        logits = self.head(features)
        loss = self.task_loss(logits, self.targets(domains, self.generator, logits.detach(), labels), labels)
        assert self.loss_term is not None
        return self.loss_term(loss, features, labels)


class Darker(JointModule):
    """An augmentation without random numbers."""

    def augment(self, images: Tensor) -> Tensor:
        return images / 2


class Narrow(JointModule):
    """It does not take what a run supplies."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone, 12, 10)


class OwnRate(JointModule):
    """An optimizer of its own, at the rate of the run."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr / 2)


class Mark(pl.Callback):
    """Counts epochs, and leaves a file for each fit."""

    def __init__(self, folder: str) -> None:
        self.folder, self.epochs = folder, 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs += 1

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        number = len(list(Path(self.folder).iterdir()))
        (Path(self.folder) / f"{number}-{self.epochs}").touch()


@dataclass(frozen=True)
class Always(Criterion):
    """Always the same number."""

    number: int = 2

    def choose(self, tried: Clusterings) -> tuple[int | None, str]:
        return self.number, ""


def halved(round: int) -> float:
    """A rate over the rounds."""
    return 0.5**round


class WideNet(nn.Sequential):
    """A backbone with an argument."""

    def __init__(self, size: int, width: int = 12) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * size * size, width), nn.ReLU())


class HiddenNet(nn.Sequential):
    """A backbone with an argument that backbones have of their own."""

    def __init__(self, size: int, hidden: int = 12) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * size * size, hidden), nn.ReLU())


class Matrices(torch.optim.SGD):
    """Trains matrices alone, as `torch.optim.Muon` of later versions does."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        if any(parameter.ndim != 2 for group in self.param_groups for parameter in group["params"]):
            raise ValueError("Matrices only supports 2D parameters.")


class FixedSize(DigitsDomains):
    """Digits of one size, with all other options of their class."""

    def __init__(self, num_clients: int = 10, **options: Any) -> None:
        super().__init__(size=8, num_clients=num_clients, **options)


def doubled(size: int) -> nn.Module:
    """Return a network with a layer whose outputs a hook doubles."""
    layer = nn.Linear(3 * size * size, 8)
    layer.register_forward_hook(lambda _, inputs, outputs: 2 * outputs)
    return nn.Sequential(nn.Flatten(), layer, nn.Tanh())
