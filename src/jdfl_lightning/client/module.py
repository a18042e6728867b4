"""JointModule, the LightningModule of a client; it also trains without a federation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import (
    DomainAccuracy,
    JointAccuracy,
    JointHead,
    PlainTargets,
    Score,
    SoftTargetKLLoss,
    TargetRule,
)
from jdfl_lightning.joint.loss import class_kl
from jdfl_lightning.regularizers import Step, Term

Batch = Sequence[Tensor]
"""Images (B, 3, H, W), class labels (B,) and, where they matter, domains (B,)."""
_OF_A_FIT = ("targets", "regularizers")
"""Parts of the module that every fit replaces; all others are the network."""


def _with_domains(batch: Batch, needed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, labels and domains of a batch; domains default to 0 unless they are needed."""
    images, labels, *domains = batch
    if needed and not domains:
        raise ValueError("Expected batches of (images, labels, domains) but got (images, labels): the domains matter.")
    return images, labels, domains[0] if domains else torch.zeros_like(labels)


class JointModule(pl.LightningModule):
    """A backbone with a joint head, trained on soft joint targets and evaluated by the class alone.

    Batches are (images, labels, domains). In training the domains choose the targets; in a test they only name the
    groups that accuracy is reported for. Where domains are not used (one domain, random targets, validation)
    batches of (images, labels) are enough.

    A subclass can replace any step: `augment` for the images, `task_loss` for the loss of a batch,
    `configure_optimizers`, or the whole `training_step`. Numbers that it logs in training become metrics of the round.

    A checkpoint holds everything but the backbone: ``load_from_checkpoint(file, backbone=PaperCNN())``. A checkpoint
    of LightningCLI holds the backbone's settings too.

    Args:
        backbone: gives features (B, in_features).
        in_features: length of the feature vector.
        num_classes: C.
        targets: how mass is shared among the M pseudo-domains; `PlainTargets` (M = 1) is an ordinary classifier.
        domains: names, or the number, of the domains that accuracy is reported for.
        lr: learning rate of SGD.
        momentum: momentum of SGD.
        weight_decay: weight decay of SGD.
        score: how the logits of a class become its score.
        regularizers: terms that are added to the loss.

    >>> module = JointModule(nn.Flatten(), in_features=12, num_classes=3, targets=TargetRule(torch.eye(2)))
    >>> module(torch.zeros(5, 3, 2, 2)).shape
    torch.Size([5, 6])
    """

    def __init__(
        self,
        backbone: nn.Module,
        in_features: int,
        num_classes: int,
        targets: TargetRule | None = None,
        domains: Sequence[str] | int | None = None,
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        score: Score = "max",
        regularizers: Sequence[Term] = (),
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["backbone", "targets", "regularizers"])
        if "_instantiator" in self.hparams:  # LightningCLI made them from settings, which can be saved
            self.save_hyperparameters()
        self.backbone = backbone
        self.loss = SoftTargetKLLoss()
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.optimizer: Part | None = None
        """Set by a run: the optimizer, in place of SGD with lr, momentum and weight_decay."""
        self.lr_scheduler: Part | None = None
        """Set by a run: a scheduler that steps after every epoch."""
        self.head_lr, self.lr_factor = 1.0, 1.0
        """Set by a run: factors on the learning rate of the head, and of all parameters in this fit."""
        self.private: frozenset[str] = frozenset()
        """Set by a run: names of the parameters and buffers that the client keeps and never sends."""
        self.regularizers = nn.ModuleList(regularizers)
        self.val_accuracy = JointAccuracy(num_classes, score)
        self._domains = domains
        self._has_targets = targets is not None
        self._build(targets if targets is not None else PlainTargets(), in_features, num_classes, score)
        self.loss_term: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        """Set by an algorithm during a fit: (task's loss, features, labels) to the loss to minimise."""
        self.generator: torch.Generator | None = None
        """Source of the random targets; torch's global one if not set."""
        self.live: tuple[Tensors, list[tuple[str, dict[str, Any], str]]] | None = None
        """Set by a run whose parameters stay, as to look for tensors takes long: the trained parameters, and for each
        other tensor its name, and where it is, as a layer may replace its buffers."""

    def _build(self, targets: TargetRule, in_features: int, num_classes: int, score: Score) -> None:
        """Build the parts that depend on the number of pseudo-domains."""
        self.targets = targets
        self.head = JointHead(in_features, num_classes, targets.num_domains, score=score)
        groups = self._domains if self._domains is not None else targets.num_domains
        self.test_accuracy = DomainAccuracy(num_classes, groups, score)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save how the target rule chooses a row; its table is in the weights."""
        checkpoint["draw_targets"] = self.targets.draw

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Use the checkpoint's target rule, and a head of its size, if this module was built without targets."""
        table = checkpoint["state_dict"].get("targets.table")
        if not self._has_targets and table is not None and len(table) > 1:
            head, rule = self.head, TargetRule(table, checkpoint["draw_targets"])
            self._build(rule, head.in_features, head.num_classes, head.score)
            self.head.to(head.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Return joint logits (B, M*C)."""
        logits: Tensor = self.head(self.backbone(images))
        return logits

    def augment(self, images: Tensor) -> Tensor:
        """Return the images of a training batch as the network sees them; here unchanged."""
        return images

    def task_loss(self, logits: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch: the divergence of its joint targets from the joint probabilities.

        Args:
            logits: joint logits (B, M*C).
            weights: target weights over the pseudo-domains (B, M).
            labels: class labels (B,).
        """
        loss: Tensor = self.loss(logits, weights, labels)
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch: the task's, changed by the algorithm, and the regularizers'."""
        images, labels, domains = _with_domains(batch, self.targets.needs_domains)
        features = self.backbone(self.augment(images))
        logits = self.head(features)
        weights: Tensor | None = None
        if len(self.regularizers) or not self._has_class_labels:
            weights = self.targets(domains, self.generator, logits.detach(), labels)
            loss = self.task_loss(logits, weights, labels)
        else:
            loss = class_kl(logits, labels).mean()
        if self.loss_term is not None:
            loss = self.loss_term(loss, features, labels)
        for term in self.regularizers:
            assert weights is not None
            loss = loss + term(Step(self.head, logits, features, labels, weights))
        if self.loss_term is None:
            self.log("train/loss", loss, prog_bar=True)
        return loss

    @property
    def _has_class_labels(self) -> bool:
        """Whether the loss of a batch is that of ordinary class labels, by nobody's code but this package's."""
        own = type(self).task_loss is JointModule.task_loss and type(self.loss) is SoftTargetKLLoss
        return own and type(self.targets) is PlainTargets and self.loss.reduction == "mean"

    def on_train_end(self) -> None:
        """Show the trained network to the regularizers."""
        self.finish_terms(cast(Any, self.trainer.train_dataloader))

    def finish_terms(self, batches: Iterable[Batch]) -> None:
        """Show the trained network and the training batches, without augmentation, to the regularizers."""
        plain = batches.plain() if hasattr(batches, "plain") else batches  # a client's; others have no such method
        for term in self.regularizers:
            cast(Term, term).finish(self.backbone, self.head, plain)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count class-only accuracy."""
        images, labels, _ = _with_domains(batch, needed=False)
        self.val_accuracy.update(self(images), labels)
        self.log("val/acc", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Count class-only accuracy for each domain."""
        images, labels, domains = _with_domains(batch, len(self.test_accuracy.names) > 1)
        self.test_accuracy.update(self(images), labels, domains)

    def on_test_epoch_end(self) -> None:
        """Log accuracy overall, of the worst domain, and for each domain."""
        scores = self.test_accuracy.compute()
        overall, worst, spread = (scores.pop(name) for name in ("overall", "worst", "spread"))
        summary = {"test/acc": overall, "test/acc_worst": worst, "test/acc_spread": spread}
        # the metric is reduced already; Lightning warns unless it may synchronise again
        self.log_dict(summary | {f"test/acc/{name}": score for name, score in scores.items()}, sync_dist=True)
        self.test_accuracy.reset()

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> tuple[Tensor, Tensor]:
        """Return predicted classes (B,) and class probabilities (B, C) of images or a batch that starts with images.

        A class is predicted as ``score`` says; its probability is that of its joint outputs, summed.
        """
        logits = self(batch if isinstance(batch, Tensor) else batch[0])
        return self.head.predict(logits), self.head.class_probabilities(logits)

    def configure_optimizers(self) -> Any:
        """SGD, the paper's local optimizer, or the one that was given, with its scheduler."""
        part = self.optimizer or Part(
            torch.optim.SGD, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
        own = [*self.targets.parameters(), *self.regularizers.parameters()]
        known = self.live is not None and not own
        groups: list[dict[str, Any]] = [{"params": list(self.trainable().values() if known else self.parameters())}]
        if self.head_lr != 1:
            head = {id(param) for param in self.head.parameters()}
            groups = [{"params": [p for p in self.parameters() if (id(p) in head) is own]} for own in (False, True)]
        optimizer: torch.optim.Optimizer = part.build(groups)
        for group, factor in zip(optimizer.param_groups, (1.0, self.head_lr), strict=False):
            group["lr"] *= factor * self.lr_factor
        if self.lr_scheduler is None:
            return optimizer
        return [optimizer], [self.lr_scheduler.build(optimizer)]

    def trainable(self) -> Tensors:
        """Return the live parameters that are trained, by name: of backbone, head and a subclass's own layers."""
        if self.live is not None:
            return self.live[0]
        trained = {name: param for name, param in self.named_parameters() if param.requires_grad}
        return _of_the_network(trained)

    def statistics(self) -> Tensors:
        """Return the network's other tensors, by name: buffers (BatchNorm's statistics) and frozen parameters."""
        if self.live is not None:
            return {name: place[key] for name, place, key in self.live[1]}
        frozen = {name: param for name, param in self.named_parameters() if not param.requires_grad}
        return _of_the_network({**dict(self.named_buffers()), **frozen})

    def find_live(self) -> None:
        """Find all tensors once, for `live`."""
        places: list[tuple[str, dict[str, Any], str]] = []
        for name in self.statistics():
            path, _, key = name.rpartition(".")
            layer = self.get_submodule(path)
            places.append((name, layer._buffers if key in layer._buffers else layer._parameters, key))
        self.live = self.trainable(), places


def _of_the_network(tensors: Mapping[str, Tensor]) -> Tensors:
    """Leave out the tensors of what every fit replaces."""
    return {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] not in _OF_A_FIT}


SUPPLIED = tuple(inspect.signature(JointModule).parameters)
"""Arguments of a `JointModule` that are a run's to give."""
