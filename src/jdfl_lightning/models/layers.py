"""The parameters of a network that Phase 1 uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatch, fnmatchcase

from torch import nn

from jdfl_lightning.core.errors import InputError


def conv_blocks(backbone: nn.Module) -> list[str]:
    """Return the names of the backbone's outermost parts that hold a convolution, first to last.

    >>> from jdfl_lightning.models import PaperCNN
    >>> conv_blocks(PaperCNN(32))
    ['block1', 'block2', 'block3']
    """
    parts, prefix = list(backbone.named_children()), ""
    while len(convolutional := [(n, m) for n, m in parts if _has_convolution(m)]) == 1:
        name, only = convolutional[0]
        if isinstance(only, nn.Conv2d):
            break
        prefix, parts = f"{prefix}{name}.", list(only.named_children())
    return [prefix + name for name, _ in convolutional]


def _has_convolution(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Conv2d) for part in module.modules())


LAYER_SUBSETS = {"A": 0, "B": 1, "C": 2}
"""The paper's subsets of layers, by the number of last conv blocks besides the head."""


def select_parameters(module: nn.Module, layers: str | list[str]) -> list[str]:
    """Return the names of the parameters that discovery uses.

    Args:
        module: has a ``backbone`` and a ``head``.
        layers: ``"A"`` the head, ``"B"`` the last conv block and the head, ``"C"`` the last two and the head; or
            patterns of parameter names (``["backbone.fc*", "head.*"]``).
    """
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if isinstance(layers, str):
        if layers not in LAYER_SUBSETS:
            raise InputError(f"Expected --clustering.layers to be A, B, C or a list of patterns but got {layers!r}.")
        backbone = getattr(module, "backbone", None)
        if not isinstance(backbone, nn.Module):
            raise InputError(
                f"Expected the layers (--clustering.layers) to be patterns of parameter names but got {layers!r}, and "
                f"{type(module).__name__} has no backbone to choose from."
            )
        blocks = conv_blocks(backbone)
        patterns = [f"backbone.{block}.*" for block in blocks[len(blocks) - LAYER_SUBSETS[layers] :]] + ["head.*"]
    else:
        patterns = layers
    chosen = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
    if not chosen:
        raise InputError(f"Expected --clustering.layers to match parameters but {patterns} match none of {names}.")
    return chosen


def matching(patterns: Iterable[str], names: Collection[str], flag: str) -> frozenset[str]:
    """Return the names that match some patterns; raise an `InputError` if a pattern matches none.

    >>> sorted(matching(["head.*"], ["fc.weight", "head.weight", "head.bias"], "--private"))
    ['head.bias', 'head.weight']
    """
    found: set[str] = set()
    for pattern in patterns:
        own = {name for name in names if fnmatchcase(name, pattern)}
        if not own:
            raise InputError(
                f"Expected every pattern of {flag} to match a name but {pattern!r} matches none of {', '.join(names)}."
            )
        found |= own
    return frozenset(found)
