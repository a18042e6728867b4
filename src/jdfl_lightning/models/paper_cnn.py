"""The paper's network."""

from __future__ import annotations

from torch import Tensor, nn

from jdfl_lightning.core.errors import InputError


def _block(inputs: int, outputs: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(groups, outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(groups, outputs),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2, 2),
    )


class PaperCNN(nn.Module):
    """The paper's lightweight CNN up to its features: three conv blocks with GroupNorm, then fc1 and fc2.

    The head (the paper's fc3) is a `JointHead` on the 128 features. The paper does not state the activation between
    the fully connected layers; here a ReLU follows fc1 and fc2.

    Args:
        size: height and width of the images, a multiple of 8.

    >>> import torch
    >>> PaperCNN(size=32)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 128])
    """

    def __init__(self, size: int = 112) -> None:
        super().__init__()
        if size < 8 or size % 8:
            raise InputError(
                f"Expected the image size to be a multiple of 8 but got {size}: PaperCNN halves it three times."
            )
        self.size = size
        self.block1 = _block(3, 32, groups=8)
        self.block2 = _block(32, 64, groups=16)
        self.block3 = _block(64, 128, groups=16)
        self.fc1 = nn.Linear(128 * (size // 8) ** 2, 256)
        self.fc2 = nn.Linear(256, 128)

    def forward(self, images: Tensor) -> Tensor:
        """Return features (B, 128) of images (B, 3, size, size)."""
        maps = self.block3(self.block2(self.block1(images)))
        features: Tensor = self.fc2(self.fc1(maps.flatten(1)).relu_()).relu_()
        return features
