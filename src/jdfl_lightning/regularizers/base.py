"""The interface of a regularizer: a term of the loss, with a record at the server if it needs one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from jdfl_lightning.core.errors import require, require_types
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import JointHead
from jdfl_lightning.supervision.base import Learned


@dataclass(frozen=True)
class Step:
    """What a training step has computed."""

    head: JointHead
    logits: Tensor
    """Joint logits (B, M*C)."""
    features: Tensor
    """The head's input (B, F)."""
    labels: Tensor
    """Class labels (B,)."""
    weights: Tensor
    """Target weights over the pseudo-domains (B, M), without gradient."""


class Term(nn.Module):
    """The client side of a regularizer, for one fit: a `Step` in, a value to add to the loss out."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight

    def value(self, step: Step) -> Tensor:
        """Return the term before it is weighted."""
        raise NotImplementedError

    def forward(self, step: Step) -> Tensor:
        """Return the weighted term."""
        return self.weight * self.value(step)

    def finish(self, backbone: nn.Module, head: JointHead, batches: Iterable[Sequence[Tensor]]) -> None:
        """Look at the trained network; called once, after the last step of a fit.

        Args:
            backbone: the network below the head.
            head: the head.
            batches: the training batches, starting with images and labels, for terms that need another pass.
        """

    def collect(self) -> Tensors:
        """Return what is sent to the server after the fit, as the regularizer declares in `upload_form`."""
        return {}


@dataclass(frozen=True)
class Regularizer(Learned, ABC):
    """A term of the loss, beside any algorithm and supervision; any number of them."""

    weight: float = 0.1
    """Factor of the term; with 0 it changes nothing."""

    def __post_init__(self) -> None:
        require_types(self, "--regularizers.")
        require(self.weight >= 0, "--regularizers.weight", "0 or more", self.weight)

    def init(self, num_domains: int, num_classes: int, num_features: int) -> Tensors:
        """Server: return the record before the first round."""
        return {}

    @abstractmethod
    def term(self, sent: Tensors) -> Term:
        """Client: return the term for one fit, from what the server sent."""
