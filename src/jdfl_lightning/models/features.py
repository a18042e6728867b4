"""Sums of a network's features by class, from which prototypes are made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import JointHead
from jdfl_lightning.models.backbones import eval_mode

_SLACK = 1e-5
"""Tolerance for the norm of a feature normalised in single precision."""


def class_features(backbone: nn.Module, head: JointHead, batches: Iterable[Sequence[Tensor]]) -> Tensors:
    """Return the normalised features of each class, summed over all samples (C, F), and the numbers of samples (C,).

    Args:
        backbone: the network below the head; it is used in eval mode.
        head: has C classes, F inputs, and weights of the type and on the device of the images to use.
        batches: images and labels, and more that is ignored.
    """
    sums = torch.zeros(head.num_classes, head.in_features, dtype=torch.float64)
    counts = torch.zeros(head.num_classes, dtype=torch.float64)
    with torch.no_grad(), eval_mode(backbone):
        for images, labels, *_ in batches:
            features = normalize(backbone(images.to(head.weight)).float(), dim=1)
            sums.index_add_(0, labels, features.cpu().double())  # not every device has double precision
            counts.index_add_(0, labels, torch.ones_like(labels, dtype=torch.float64))
    return {"sums": sums, "counts": counts}


def reason_impossible(features: Tensors) -> str | None:
    """Return why sums and counts cannot be those of `class_features`: features have norm 1, so a sum has at most n."""
    sums, counts = features["sums"], features["counts"]
    possible = (counts >= 0) & (sums.norm(dim=1) <= counts * (1 + _SLACK))
    return None if possible.all() else "its sums of features are not those of as many samples as it counts"
