"""MOON: features are pulled to the global model's and pushed from the client's previous ones (Li et al., 2021)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, softplus
from torch.utils.hooks import RemovableHandle

from jdfl_lightning.algorithms.base import LocalUpdate
from jdfl_lightning.algorithms.fedavg import FedAvg
from jdfl_lightning.core.errors import require
from jdfl_lightning.core.messages import FitTask
from jdfl_lightning.core.tensors import Record, Tensors, snapshot


def contrast(features: Tensor, global_features: Tensor, previous: Tensor, temperature: float) -> Tensor:
    r"""Return :math:`-\log \frac{e^{s_g/T}}{e^{s_g/T} + e^{s_p/T}}`, the mean over a batch, with cosines s_g and s_p.

    >>> z, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    >>> contrast(z, z, other, 0.5), contrast(z, other, z, 0.5)
    (tensor(0.1269), tensor(2.1269))
    """
    z = features.float()  # in half precision the guard against a zero norm would underflow
    towards = cosine_similarity(z, global_features.float())
    away = cosine_similarity(z, previous.float())
    return softplus((away - towards) / temperature).mean()


@dataclass(frozen=True)
class MOON(FedAvg):
    """Adds mu * contrast to a client's loss; the server is FedAvg's."""

    mu: float = 1.0
    """Weight of the contrastive term, 0 or more."""
    temperature: float = 0.5
    """Temperature of the contrastive term, above 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.mu >= 0, "--algorithm.mu", "0 or more", self.mu)
        require(self.temperature > 0, "--algorithm.temperature", "positive", self.temperature)

    def state_groups(self, weights: Tensors) -> Iterable[str]:
        """A client keeps its network after a fit; it has no state before its first."""
        return ("previous",)

    def local(self, task: FitTask, state: Record) -> LocalUpdate:
        """Return the client side for one fit."""
        return ContrastiveUpdate(task, state, self.mu, self.temperature)


class ContrastiveUpdate(LocalUpdate):
    """Local SGD on the task's loss plus mu * contrast; a client's first fit has the task's loss alone."""

    def __init__(self, task: FitTask, state: Record, mu: float, temperature: float) -> None:
        super().__init__(task, state)
        self.mu, self.temperature = mu, temperature
        self._frozen: list[nn.Module] = []
        self._images = torch.empty(0)
        self._watch: RemovableHandle | None = None
        self._trained: Tensors = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the backbone twice: as the server sent it, and as it was after this client's last fit."""
        super().on_train_start(trainer, pl_module)
        if self.state:
            backbone = cast(nn.Module, pl_module.backbone)
            self._frozen = [copy.deepcopy(backbone).eval().requires_grad_(False) for _ in range(2)]
            self._frozen[1].load_state_dict(self.state["previous"])
            self._watch = backbone.register_forward_pre_hook(self._keep_images)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep the images, which the frozen networks need too."""
        self._images = batch[0]

    def _keep_images(self, backbone: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Keep the images as the backbone gets them, augmented: the frozen networks need the same."""
        self._images = args[0].detach()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.remove()

    def loss(self, task_loss: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Add mu * contrast."""
        if not self._frozen:
            return task_loss
        with torch.no_grad():
            global_features, previous = (network(self._images) for network in self._frozen)
        return task_loss + self.mu * contrast(features, global_features, previous, self.temperature)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the local network after the fit."""
        self._unwatch()
        self._trained = snapshot(cast(nn.Module, pl_module.backbone).state_dict())
        self._frozen = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the module as it was; a process uses it for its next client."""
        self._unwatch()

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        """Keep the local network."""
        return {}, {"previous": self._trained}
