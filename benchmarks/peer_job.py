"""The job of `peers.py`: images, clients, batches and first weights, the same for all who do it.

A job is prepared once, by the package, and saved; then everyone reads the same file. In it are the images of every
batch of every client in every round, so that nobody needs a random number.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

BATCH = 32
CLASSES = 7


@dataclass(frozen=True)
class Job:
    """What is trained."""

    size: int
    """Height and width of the images."""
    clients: int
    """All of them take part in every round; an even number."""
    images: int
    """Of a client, a multiple of 8."""
    rounds: int
    """The first one warms up and does not count."""
    backbone: str = "jdfl_lightning.PaperCNN"
    """Import path of the network below the head."""
    lr: float = 0.01
    bf16: bool = False
    """Whether products are computed in bfloat16."""

    @property
    def exact(self) -> bool:
        """Whether rounding stays rounding: the small network has too few ReLUs and no maxima to be nearly ties."""
        return not self.backbone.endswith("PaperCNN")


@dataclass
class Rounds:
    """What somebody notes down of the rounds of a job."""

    total: int
    ends: list[float] = field(default_factory=list)
    """When each round ended."""
    resumes: list[float] = field(default_factory=list)
    """When the next one began: to note the weights takes time that is not the round's."""
    first: dict[str, Tensor] = field(default_factory=dict)
    """The server's weights after the first round."""
    last: dict[str, Tensor] = field(default_factory=dict)
    """The server's weights after the last round."""

    def note(self, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """A round is over; the weights are asked for after the first and the last round only."""
        self.ends.append(time.monotonic())
        if len(self.ends) in (1, self.total):
            copy = {name: value.detach().clone() for name, value in weights().items()}
            self.first, self.last = self.first or copy, copy
        self.resumes.append(time.monotonic())


@dataclass(frozen=True)
class Prepared:
    """A job with its tensors."""

    job: Job
    images: Tensor
    """uint8 (N, H, W, 3)."""
    labels: Tensor
    orders: list[list[Tensor]]
    """For each round and client, which images it trains on, in their order."""
    weights: dict[str, Tensor]
    """The server's, before the first round."""

    def save(self, file: Path) -> None:
        """Write the job to a file."""
        torch.save(vars(self) | {"job": asdict(self.job)}, file)

    @classmethod
    def load(cls, file: str | Path) -> Prepared:
        """Read the job from a file."""
        content = torch.load(file)
        return cls(**content | {"job": Job(**content["job"])})

    def network(self) -> Network:
        """Return the network with the server's first weights, in the memory layout that suits convolutions on a CPU."""
        network = Network(self.job, self.weights["head.weight"].shape[1])
        network.load_state_dict(self.weights)
        return network.to(memory_format=torch.channels_last)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass."""
        return torch.autocast("cpu", torch.bfloat16) if self.job.bf16 else nullcontext()

    def train(self, network: Network, round: int, client: int) -> int:
        """Train a network as a client does in a round, by plain PyTorch; return the number of images."""
        order = self.orders[round - 1][client]
        sgd = torch.optim.SGD(network.parameters(), lr=self.job.lr)
        for chosen in order.split(BATCH):
            with self.autocast():
                loss = network.loss(self.images[chosen], self.labels[chosen])
            sgd.zero_grad()
            loss.backward()
            sgd.step()
        return len(order)


class Network(nn.Module):
    """A backbone and a head; tensors have the names that they have in the package."""

    def __init__(self, job: Job, features: int) -> None:
        super().__init__()
        module, _, name = job.backbone.rpartition(".")
        build: Callable[[int], nn.Module] = getattr(importlib.import_module(module), name)
        self.backbone, self.head = build(job.size), nn.Linear(features, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits of uint8 images (B, H, W, 3)."""
        return self.head(self.backbone(pixels.permute(0, 3, 1, 2).float().mul_(2 / 255).sub_(1)))

    def loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return cross_entropy(self(pixels), labels)
