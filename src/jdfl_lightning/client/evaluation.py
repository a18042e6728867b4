"""Weights -> class-only accuracy on test, validation and unseen images; and of a client's own model, at the client."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from jdfl_lightning.algorithms.base import SECOND, LocalUpdate
from jdfl_lightning.client.fit import Workspace, prepare_fit, run_fit
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.client.trainer import quiet, silent_trainer
from jdfl_lightning.core.messages import PRIVATE, UNKNOWN, FitResult, FitTask
from jdfl_lightning.core.tensors import Record, Tensors
from jdfl_lightning.data import DomainDataModule
from jdfl_lightning.data.loader import BatchLoader
from jdfl_lightning.models import eval_mode

Counts = dict[str, tuple[int, int]]
"""Domain -> number of held-out images classified correctly, and number of all."""


@dataclass(frozen=True)
class Scores:
    """Accuracies on the union of the held-out images, from 0 to 1; NaN where there was no image."""

    overall: float
    domains: dict[str, float]
    further: dict[str, Scores] = field(default_factory=dict)
    """The scores on the other parts, by their names: val, unseen."""

    @classmethod
    def unknown(cls, domains: Sequence[str]) -> Scores:
        """Return the scores of a model that was not evaluated: NaN."""
        return cls(float("nan"), {name: float("nan") for name in domains})

    @classmethod
    def of(cls, counts: Counts) -> Scores:
        """Return the accuracies of counts, in single precision like torchmetrics.

        >>> Scores.of({"photo": (3, 4), "sketch": (1, 4)})
        Scores(overall=0.5, domains={'photo': 0.75, 'sketch': 0.25}, further={})
        """
        correct, seen = torch.tensor(list(counts.values())).float().unbind(dim=1)
        each = (correct / seen).tolist()
        return cls(float(correct.sum() / seen.sum()), dict(zip(counts, each, strict=True)))

    @property
    def worst(self) -> float:
        """Accuracy of the worst domain; NaN if not all were evaluated."""
        return float("nan") if math.isnan(self.overall) else min(self.domains.values())

    def as_metrics(self, part: str = "test") -> dict[str, float]:
        """Return the scores under the names they are logged with.

        >>> Scores(0.5, {"photo": 0.5}, {"unseen": Scores(0.25, {"sketch": 0.25})}).as_metrics()["unseen/acc/sketch"]
        0.25
        """
        each = {f"{part}/acc/{name}": value for name, value in self.domains.items()}
        found = {f"{part}/acc": self.overall, f"{part}/acc_worst": self.worst, **each}
        for name, scores in self.further.items():
            found |= scores.as_metrics(name)
        return found


@dataclass(frozen=True)
class Evaluation:
    """The scores of some models, by name, and the seconds the evaluation took."""

    scores: dict[str, Scores]
    seconds: float


def evaluate(workspace: Workspace, models: Mapping[str, Tensors], buffers: Tensors) -> Evaluation:
    """Evaluate models that share their buffers on the test images and on all further parts that there are."""
    start, parts = time.perf_counter(), further_parts(workspace.data)
    scores = {}
    for name, weights in models.items():
        found = Scores.of(count(workspace, weights, buffers))
        further = {part: Scores.of(count(workspace, weights, buffers, part)) for part in parts}
        scores[name] = replace(found, further=further)
    return Evaluation(scores, time.perf_counter() - start)


def further_parts(data: DomainDataModule) -> dict[str, Sequence[str]]:
    """Return the parts besides the test images that there are, with the names of their domains."""
    parts = {"val": data.domain_names if data.val_fraction else (), "unseen": data.unseen_names}
    return {name: domains for name, domains in parts.items() if domains}


def examine_without_trainer(module: pl.LightningModule, loader: BatchLoader) -> None:
    """Do what a Trainer's test does with the batches: what it does around them takes longer than small ones."""
    with torch.inference_mode(), eval_mode(module):
        for number, batch in enumerate(loader):
            module.test_step(batch, number)


class _TakeDown(pl.Callback):
    """Records the counts of a module before it logs them as accuracies."""

    counts: Tensor

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the counts; Lightning calls callbacks before the module."""
        assert isinstance(pl_module, JointModule)
        self.counts = pl_module.test_accuracy.counts.cpu()


def count(workspace: Workspace, weights: Tensors, buffers: Tensors, part: str = "test") -> Counts:
    """Evaluate a model on the images of a part that this process has."""
    module, data = workspace.module(weights, buffers), workspace.data
    names = [*data.domain_names, *data.unseen_names]
    found = torch.zeros(2, len(names), dtype=torch.long)
    for loader in part_batches(workspace, module, part):
        found += count_batches(workspace, module, loader)
    counts = {name: (right, seen) for name, right, seen in zip(names, *found.tolist(), strict=True)}
    return {name: counts[name] for name in (data.unseen_names if part == "unseen" else data.domain_names)}


def count_batches(workspace: Workspace, module: JointModule, loader: BatchLoader) -> Tensor:
    """Return, for every domain, how many images of a loader are classified correctly, and of all (2, domains)."""
    options = workspace.experiment.trainer
    if options.are_plain and type(module) is JointModule:
        module.test_accuracy.reset()
        examine_without_trainer(module, loader)
        counts = module.test_accuracy.counts
        module.test_accuracy.reset()
        return counts
    taken = _TakeDown()
    with quiet():
        silent_trainer(options, callbacks=[taken]).test(module, loader, verbose=False)
    return taken.counts


def part_batches(workspace: Workspace, module: JointModule, part: str) -> Iterator[BatchLoader]:
    """Yield the batches of a part: all at once or, with ``--statistics estimated``, those of one domain after another.

    Then the module has the BatchNorm statistics of a domain's images while its batches are evaluated.
    """
    loader: BatchLoader = getattr(workspace.data, f"{part}_dataloader")()
    if workspace.experiment.statistics == "saved":
        yield loader
        return
    domains = workspace.data.domains[loader.indices]
    for domain in domains.unique().tolist():
        own = copy.copy(loader)
        own.indices = loader.indices[domains == domain]
        estimate_statistics(module, own)
        yield own


def has_statistics(module: nn.Module) -> bool:
    """Return whether a network has BatchNorm layers with running statistics."""
    return any(isinstance(layer, _BatchNorm) and layer.track_running_stats for layer in module.modules())


def estimate_statistics(module: JointModule, batches: BatchLoader) -> None:
    """Replace BatchNorm's running statistics by the mean of those of some batches; labels are not used."""
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    momenta = [layer.momentum for layer in layers]
    with torch.inference_mode(), eval_mode(module):
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a cumulative average
            layer.train()
        for images, *_ in batches:
            module(images.to(module.device, module.head.weight.dtype))
        for layer in layers:
            layer.eval()
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum


GLOBAL, PERSONAL, FINETUNED = "global", "personal", "finetuned"
MODELS = (GLOBAL, PERSONAL, FINETUNED)
"""The models that a client evaluates: as the server sent it, its own, and its own after ``--finetune_epochs``."""
SEEN = "images"
"""Name of the number of images in an answer; under the models' names are the numbers of correctly classified ones."""
IMAGES = {"domain": "", "own": "_on_own_images"}
"""The images that a client evaluates on, with the suffix of the names in an answer: its domain's, and its own."""
COUNTS = tuple(f"{name}{suffix}" for suffix in IMAGES.values() for name in (SEEN, *MODELS))
"""All names in an answer."""


def evaluate_personal(workspace: Workspace, task: FitTask, state: Record) -> FitResult:
    """Count the test images of a client's domain, and its own if it has any, that its models classify correctly.

    Args:
        workspace: this process's data and module.
        task: what the server sent.
        state: what the client kept from its last participation.
    """
    experiment, client = workspace.experiment, task.client - workspace.first
    fit = prepare_fit(workspace, task, LocalUpdate(task, {}), state.get(PRIVATE, {}), "finetune ")
    fit = replace(fit, epochs=experiment.finetune_epochs)
    own = fit.weights, fit.buffers
    if experiment.algorithm.has_second_model:
        own = fit.weights | state[SECOND[0]], fit.buffers | state.get(SECOND[1], {})
    num_domains = len(fit.weights["head.weight"]) // len(workspace.data.class_names)
    models = {GLOBAL: workspace.complete(task.weights, task.buffers, num_domains=num_domains), PERSONAL: own}
    if experiment.finetune_epochs:
        weights, buffers, _ = run_fit(workspace, fit)
        models[FINETUNED] = weights, buffers
    found: dict[str, float] = {}
    loaders = workspace.data.client_test_loaders(client)
    for name, (weights, buffers) in models.items():
        if experiment.score == "own" and name != GLOBAL:
            weights = own_scorer(weights, task.domain, len(workspace.data.class_names))
        module = workspace.module(weights, buffers)
        if experiment.statistics == "estimated" and name == GLOBAL:
            estimate_statistics(module, loaders["domain"])
        for images, loader in loaders.items():
            counts, suffix = count_batches(workspace, module, loader), IMAGES[images]
            found[name + suffix], found[SEEN + suffix] = counts.sum(dim=1).double().tolist()
    return FitResult(client=task.client, num_examples=len(fit.loader.indices), num_steps=0, metrics=found)


def own_scorer(weights: Tensors, domain: int, num_classes: int) -> Tensors:
    r"""Return a model whose head has the C outputs of one pseudo-domain alone, so that it predicts by them.

    Its class probabilities are :math:`\mathrm{softmax}_c\, \ell_{d,c}`. Without a known pseudo-domain, or with a head
    of C outputs, the model is unchanged.

    Args:
        weights: a model with a head of M x C outputs.
        domain: d, or `UNKNOWN`.
        num_classes: C.

    >>> import torch
    >>> own_scorer({"head.bias": torch.arange(6)}, domain=1, num_classes=3)
    {'head.bias': tensor([3, 4, 5])}
    """
    rows = slice(domain * num_classes, (domain + 1) * num_classes)
    if domain == UNKNOWN:
        return weights
    return {name: tensor[rows] if name.startswith("head.") else tensor for name, tensor in weights.items()}
