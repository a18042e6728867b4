"""Images of noise, as many as a benchmark wants; in a module of its own, so that worker processes can import it."""

from __future__ import annotations

import torch
from torch import Tensor

from jdfl_lightning import DomainDataModule


class RandomImages(DomainDataModule):
    """Coarse noise, brighter from class to class, with seven classes and four domains as PACS has."""

    domain_names = ("photo", "art", "cartoon", "sketch")
    class_names = tuple("abcdefg")

    def __init__(self, size: int, num_clients: int, images: int) -> None:
        super().__init__(size, num_clients, test_fraction=0.1)
        self.count = images

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the images."""
        generator = torch.Generator().manual_seed(0)
        coarse = torch.randint(0, 128, (self.count, self.size // 8, self.size // 8, 3), generator=generator)
        places = torch.arange(self.count)
        labels = places % 7
        pixels = (coarse + 16 * labels.reshape(-1, 1, 1, 1)).to(torch.uint8)
        return pixels.repeat_interleave(8, 1).repeat_interleave(8, 2), labels, places * 4 // self.count
