"""A task for Phase 1 that no class label enters: to tell by which angle an image was turned."""

from __future__ import annotations

import torch
from torch import Tensor

from jdfl_lightning.data.loader import BatchLoader

_ANGLES = 4


def turn(images: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Turn the images of a batch by 0, 90, 180 and 270 degrees in turn; return them and their angles as labels.

    Every angle is as frequent as any other, to one image, whatever the classes of the images are.

    Args:
        images: square (B, 3, H, H).
        num_classes: outputs of the head; fewer than four leave the last angles out.

    >>> turned, labels = turn(torch.tensor([[[[1, 2], [3, 4]]]] * 5), num_classes=10)
    >>> turned.flatten(1).tolist()
    [[1, 2, 3, 4], [2, 4, 1, 3], [4, 3, 2, 1], [3, 1, 4, 2], [1, 2, 3, 4]]
    >>> labels.tolist(), turn(turned, num_classes=2)[1].tolist()
    ([0, 1, 2, 3, 0], [0, 1, 0, 1, 0])
    """
    count = min(_ANGLES, num_classes)
    turned = images.clone()
    for angle in range(1, count):
        turned[angle::count] = images[angle::count].rot90(angle, (2, 3))
    return turned, torch.arange(len(images)) % count


class TurnedBatches(BatchLoader):
    """A client's batches with turned images and their angles as labels.

    Args:
        loader: the client's batches.
        num_classes: outputs of the head.
    """

    def __init__(self, loader: BatchLoader, num_classes: int) -> None:
        vars(self).update(vars(loader))
        self.num_classes = num_classes

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch of some of the images, turned."""
        images, _, domains = super().take(chosen)
        return *turn(images, self.num_classes), domains
