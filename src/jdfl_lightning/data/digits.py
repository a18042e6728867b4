"""DigitsDomains: real handwritten digits in four visual domains, with no download.

scikit-learn ships 1,797 digits of 8 x 8 pixels and two photographs. Every digit is used in exactly one domain:
*ink* (dark on white), *chalk* (light on noisy dark), *photo* (its difference with a piece of a photograph, tinted) or
*outline* (its edges).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor
from torch.nn.functional import interpolate, pad

from jdfl_lightning.core.errors import require
from jdfl_lightning.core.seeding import numpy_generator
from jdfl_lightning.data.base import DomainDataModule
from jdfl_lightning.data.options import DataOptions, Unpack

Array = npt.NDArray[np.float64]


class DigitsDomains(DomainDataModule):
    """1,797 handwritten digits, each in one of four visual domains.

    Args:
        size: height and width of the images; null for that of the backbone's weights, or 16.
        num_clients: N; in proportion to the domains' sizes, at least one each.
        test_fraction: share of every domain that is held out, rounded up.
        **options: those of every data module.

    >>> data = DigitsDomains(num_clients=10)
    >>> data.setup()
    >>> data.images.shape, [len(held) for held in data.partition.test]
    (torch.Size([1797, 16, 16, 3]), [90, 90, 90, 90])
    """

    domain_names = ("ink", "chalk", "photo", "outline")
    class_names = tuple(str(digit) for digit in range(10))
    default_size = 16

    def __init__(
        self, size: int | None = None, num_clients: int = 10, test_fraction: float = 0.2, **options: Unpack[DataOptions]
    ) -> None:
        super().__init__(size, num_clients, test_fraction, **options)

    def check(self) -> None:
        """Refuse a size that the digits cannot be drawn in."""
        super().check()
        require(8 <= self.size <= 256, "--data.size", "between 8 and 256 for the digits", self.size)

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """Render every digit in its domain; the images do not depend on the run's seed."""
        digits = load_digits()
        labels = torch.from_numpy(digits.target).long()
        rng = numpy_generator(0, "digits")
        # dealt class by class, so that every domain has as many of each digit
        domains = torch.empty_like(labels)
        by_class = rng.permutation(len(labels))
        by_class = by_class[np.argsort(digits.target[by_class], kind="stable")]
        domains[torch.from_numpy(by_class)] = torch.arange(len(labels)) % len(self.domain_names)
        strokes = self._enlarge(torch.from_numpy(digits.images / 16.0)).numpy()
        photos = [image / 255.0 for image in load_sample_images().images]
        renderers = (_ink, _chalk, _photo, _outline)
        images = [
            renderers[domain](stroke, rng, photos) for stroke, domain in zip(strokes, domains.tolist(), strict=True)
        ]
        pixels = (np.stack(images).clip(0, 1) * 255).round().astype(np.uint8)
        return torch.from_numpy(pixels), labels, domains

    def _enlarge(self, digits: Tensor) -> Tensor:
        """Enlarge (N, 8, 8) to (N, size, size), a border of an eighth around the digit."""
        border = self.size // 8
        inner = self.size - 2 * border
        enlarged = interpolate(digits.unsqueeze(1), size=(inner, inner), mode="bicubic", align_corners=False)
        return pad(enlarged, (border,) * 4).squeeze(1).clamp(0, 1)


def _ink(stroke: Array, rng: np.random.Generator, photos: list[Array]) -> Array:
    paper = rng.uniform(0.9, 1.0)
    return np.repeat((paper - 0.9 * stroke)[..., None], 3, axis=2)


def _chalk(stroke: Array, rng: np.random.Generator, photos: list[Array]) -> Array:
    board = 0.15 + rng.normal(0, 0.08, stroke.shape)
    dust = rng.uniform(0.6, 1.0, stroke.shape)
    return np.repeat((board + 0.8 * stroke * dust)[..., None], 3, axis=2)


def _photo(stroke: Array, rng: np.random.Generator, photos: list[Array]) -> Array:
    photo = photos[rng.integers(len(photos))]
    size = len(stroke)
    top, left = (rng.integers(extent - size) for extent in photo.shape[:2])
    piece = photo[top : top + size, left : left + size]
    tint = rng.uniform(0.6, 1.0, 3)
    difference: Array = np.abs(piece - stroke[..., None] * tint)
    return difference


def _outline(stroke: Array, rng: np.random.Generator, photos: list[Array]) -> Array:
    down, across = np.gradient(stroke)
    edges = np.hypot(down, across)
    edges /= edges.max()
    colour = rng.uniform(0.0, 0.5, 3)
    outline: Array = 1 - edges[..., None] * (1 - colour)
    return outline
