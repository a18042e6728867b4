"""Backbone: a network, parts of which may be frozen, and a trainable hidden layer on top of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from torch import Tensor, nn

from jdfl_lightning.core.errors import InputError


class Backbone(nn.Module):
    """A network without its head, and a hidden layer on its features.

    Frozen parts of the network are in eval mode always: BatchNorm uses its statistics and does not change them, and
    dropout does nothing.

    Args:
        network: gives features (B, F).
        in_features: F.
        hidden: width of a trainable layer on the features, linear with a ReLU; none if not given.
        freeze: whether the network is frozen; or patterns of names of its parameters that are.
        on_features: whether `forward` takes the network's features (B, F), so that the network is not needed.

    >>> backbone = Backbone(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Dropout()), 8, hidden=4, freeze=True)
    >>> [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]
    ['hidden.0.weight', 'hidden.0.bias']
    >>> backbone.train().network.training
    False
    """

    def __init__(
        self,
        network: nn.Module,
        in_features: int,
        hidden: int | None = None,
        freeze: bool | Sequence[str] = False,
        on_features: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.in_features, self.on_features = in_features, on_features
        self.hidden = nn.Identity() if hidden is None else nn.Sequential(nn.Linear(in_features, hidden), nn.ReLU())
        patterns = (["*"] if freeze else []) if isinstance(freeze, bool) else list(freeze)
        self._freeze(patterns)
        self.frozen = freeze is True or not any(parameter.requires_grad for parameter in network.parameters())
        """Whether the whole network is frozen."""
        self._still = [""] if self.frozen else list(_still_parts(network, patterns))
        """Names of the network's parts that are always in eval mode."""
        self.train(self.training)

    def _freeze(self, patterns: Sequence[str]) -> None:
        names = list(dict(self.network.named_parameters())) + list(dict(self.network.named_buffers()))
        for pattern in patterns if names else ():
            if not any(fnmatch(name, pattern) for name in names):
                raise InputError(
                    f"Expected --backbone_args.freeze to match parameters of the network but {pattern!r} matches none "
                    f"of {', '.join(names[:3])}, ..., {names[-1]}."
                )
        for name, parameter in self.network.named_parameters():
            if any(fnmatch(name, pattern) for pattern in patterns):
                parameter.requires_grad_(False)

    def train(self, mode: bool = True) -> Backbone:
        """Set the mode of all parts that are not frozen."""
        super().train(mode)
        for name in self._still:
            self.network.get_submodule(name).eval()
        return self

    def without_network(self) -> Backbone:
        """Return a backbone that takes the network's features in place of images, with a copy of the hidden layer."""
        found = Backbone(nn.Identity(), self.in_features, freeze=True, on_features=True)
        found.hidden = copy.deepcopy(self.hidden)
        return found

    def forward(self, images: Tensor) -> Tensor:
        """Return features (B, hidden), or those of the network (B, F)."""
        features: Tensor = self.hidden(self.network(images))
        return features


def _still_parts(network: nn.Module, patterns: Sequence[str]) -> Iterator[str]:
    """Yield the names of parts whose parameters are all frozen; of a part that has none, its statistics decide."""
    for name, part in network.named_modules():
        parameters = list(part.parameters())
        own = [f"{name}.{key}" for key, _ in part.named_buffers()]
        known = bool(own) and all(any(fnmatch(key, pattern) for pattern in patterns) for key in own)
        if (known and not parameters) or (parameters and not any(value.requires_grad for value in parameters)):
            yield name
