"""What a model does on a part of the images in detail: classes, domains, calibration, chosen pseudo-domains."""

from __future__ import annotations

import math
import statistics
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassCalibrationError

from jdfl_lightning.client.evaluation import Scores, examine_without_trainer, further_parts, part_batches
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.client.module import Batch, JointModule
from jdfl_lightning.client.trainer import quiet, silent_trainer
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import Score, class_scores, predict_class, split_index

_CALIBRATED: tuple[Score, ...] = ("max", "sum")


def examine(workspace: Workspace, weights: Tensors, buffers: Tensors) -> dict[str, dict[str, Any]]:
    """Return the details of a model on the test images and on the unseen domains, if there are any, as plain values.

    Args:
        workspace: the data and the module of this process.
        weights: the model's trained parameters.
        buffers: its other tensors.
    """
    parts = ["test", *(part for part in further_parts(workspace.data) if part == "unseen")]
    return {part: _examine_part(workspace, weights, buffers, part) for part in parts}


class _Examiner(pl.LightningModule):
    """Looks at every output of a module in a test; nothing is kept of an image but two confidences.

    Args:
        module: the module.
        num_groups: number of the domains.
        score: how a class is predicted.
    """

    def __init__(self, module: JointModule, num_groups: int, score: Score) -> None:
        super().__init__()
        self.module, self.score, head = module, score, module.head
        self.calibration = nn.ModuleDict({name: MulticlassCalibrationError(head.num_classes) for name in _CALIBRATED})
        self.confusion = torch.zeros(num_groups, head.num_classes, head.num_classes, dtype=torch.long)
        """For each domain, the numbers of images of each class that are predicted as each class."""
        self.chosen = torch.zeros(num_groups, head.num_domains, dtype=torch.long)
        """For each domain, the numbers of images whose largest output is of each pseudo-domain."""

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Count a batch."""
        images, labels, domains = batch
        logits: Tensor = self.module(images)
        logits, num_classes = logits.to(torch.promote_types(logits.dtype, torch.float32)), self.module.head.num_classes
        predicted = predict_class(logits, num_classes, self.score)
        for name in _CALIBRATED:
            probabilities = class_scores(logits, num_classes, name).softmax(dim=-1)
            self.calibration[name].update(probabilities.nan_to_num(), labels)  # type: ignore[operator]
        chosen, _ = split_index(logits.argmax(dim=1), num_classes)
        one, domains = torch.tensor(1), domains.cpu()
        self.confusion.index_put_((domains, labels.cpu(), predicted.cpu()), one, accumulate=True)
        self.chosen.index_put_((domains, chosen.cpu()), one, accumulate=True)


def _examine_part(workspace: Workspace, weights: Tensors, buffers: Tensors, part: str) -> dict[str, Any]:
    data, module = workspace.data, workspace.module(weights, buffers)
    names = [*data.domain_names, *data.unseen_names]
    examiner = _Examiner(module, len(names), module.head.score)
    options = workspace.experiment.trainer
    with quiet():
        for loader in part_batches(workspace, module, part):
            if options.are_plain and type(module) is JointModule:
                examine_without_trainer(examiner, loader)
            else:
                silent_trainer(options).test(examiner, loader, verbose=False)
        errors = {name: float(metric.compute()) for name, metric in examiner.calibration.items()}  # type: ignore[operator]
    right = examiner.confusion.diagonal(dim1=1, dim2=2).sum(dim=1).tolist()
    seen, confusion = examiner.chosen.sum(dim=1).tolist(), examiner.confusion.sum(dim=0)
    own = range(len(data.domain_names)) if part == "test" else range(len(data.domain_names), len(names))
    scores = Scores.of({names[group]: (right[group], seen[group]) for group in own})
    recalls = (confusion.diagonal() / confusion.sum(dim=1)).tolist()  # NaN for a class without images
    known = [recall for recall in recalls if not math.isnan(recall)]
    each = [accuracy for accuracy in scores.domains.values() if not math.isnan(accuracy)]
    return {
        "images": sum(seen),
        "accuracy": scores.overall,
        "balanced_accuracy": statistics.fmean(known),
        "mean_over_domains": statistics.fmean(each),
        "std_over_domains": statistics.stdev(each) if len(each) > 1 else None,
        "calibration_error": errors,
        "classes": {
            name: None if math.isnan(recall) else recall for name, recall in zip(data.class_names, recalls, strict=True)
        },
        "domains": {
            names[group]: {
                "images": seen[group],
                "accuracy": scores.domains[names[group]],
                "pseudo_domains": (examiner.chosen[group] / seen[group]).tolist(),
            }
            for group in own
        },
        "confusion": confusion.tolist(),
    }
