"""A client's own model, evaluated where its private tensors are; only counts of images leave the client."""

from __future__ import annotations

from dataclasses import replace

from jdfl_lightning.algorithms.base import SECOND, LocalUpdate
from jdfl_lightning.client.evaluation import count_batches, estimate_statistics
from jdfl_lightning.client.fit import Workspace, prepare_fit, run_fit
from jdfl_lightning.core.messages import PRIVATE, UNKNOWN, FitResult, FitTask
from jdfl_lightning.core.tensors import Record, Tensors

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
    models = {GLOBAL: workspace.complete(task.weights, task.buffers, num_domains=_num_domains(workspace, fit.weights))}
    models[PERSONAL] = own
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
            found[name + suffix], found[SEEN + suffix] = (float(sum(column)) for column in zip(*counts, strict=True))
    return FitResult(client=task.client, num_examples=len(fit.loader.indices), num_steps=0, metrics=found)


def _num_domains(workspace: Workspace, weights: Tensors) -> int:
    return len(weights["head.weight"]) // len(workspace.data.class_names)


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
