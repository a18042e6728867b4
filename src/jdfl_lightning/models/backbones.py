"""Backbones by name, and their number of features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from jdfl_lightning.core.errors import InputError, require
from jdfl_lightning.core.parts import load, parameters
from jdfl_lightning.models.frozen import Backbone
from jdfl_lightning.models.networks import build_network, is_import_path
from jdfl_lightning.models.pretrained import is_file, load_file, published

OWN_ARGUMENTS = ("weights", "freeze", "hidden", "cache")
"""Arguments of a backbone beside those of its network."""
_WIDEST = 1_000_000


def build_backbone(
    name: str, size: int, arguments: Mapping[str, Any] | None = None, pretrained: bool = True
) -> nn.Module:
    """Build a backbone by name.

    Four arguments are the backbone's own, unless a class or function of yours has an argument of that name itself:
    `weights`, DEFAULT or another name of torchvision's, true for timm's, or a file; `freeze`, whether the network is
    not trained, or patterns of the names of parameters that are not; `hidden`, the width of a trainable layer on its
    features; `cache`, whether a frozen network is run over the images once.

    Args:
        name: ``PaperCNN``; a torchvision classifier (``resnet18``); ``timm/`` and a network of timm
            (``timm/efficientnet_lite0``); or the import path of a class or function that takes the image size and
            returns a module (``mine.net``). Classifiers are without their heads.
        size: height and width of the images.
        arguments: further arguments, by name.
        pretrained: whether `weights` are loaded; else the network is randomly initialised.

    >>> type(build_backbone("PaperCNN", 32)).__name__
    'PaperCNN'
    >>> backbone = build_backbone("PaperCNN", 32, {"freeze": True, "hidden": 64})
    >>> num_features(backbone, 32), sum(p.numel() for p in backbone.parameters() if p.requires_grad) == 128 * 64 + 64
    (64, True)
    """
    own, others = _split(name, arguments or {})
    weights = own.get("weights") if pretrained else None
    network = build_network(name, size, others, published(name, weights))
    if is_file(weights):
        load_file(network, name, str(weights))
    freeze, hidden = own.get("freeze", False), own.get("hidden")
    if not freeze and hidden is None:
        return network
    return Backbone(network, num_features(network, size), hidden, freeze)


def own_arguments(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are the backbone's own, and not its network's."""
    return _split(name, arguments)[0]


def backbone_on_features(name: str, arguments: Mapping[str, Any], in_features: int) -> Backbone:
    """Build what is above a frozen network: a backbone that takes its features (B, F) in place of images."""
    return Backbone(nn.Identity(), in_features, own_arguments(name, arguments).get("hidden"), True, on_features=True)


def _split(name: str, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide arguments into the backbone's own and the network's; raise an `InputError` if its own are wrong."""
    theirs = parameters(load(name)) if is_import_path(name) and set(arguments) & set(OWN_ARGUMENTS) else {}
    own = {key: value for key, value in arguments.items() if key in OWN_ARGUMENTS and key not in theirs}
    for key, value in own.items():
        flag = f"--backbone_args.{key}"
        if key == "hidden":
            sound = value is None or (type(value) is int and 0 < value <= _WIDEST)
            require(sound, flag, "null or a positive number", value)
        elif key == "freeze":
            sound = isinstance(value, bool) or (
                isinstance(value, list) and all(isinstance(item, str) for item in value)
            )
            require(sound, flag, "true, false or a list of patterns", value)
        elif key == "cache":
            require(isinstance(value, bool), flag, "true or false", value)
    return own, {key: value for key, value in arguments.items() if key not in own}


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode for the block; then restore the mode of every part."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def num_features(backbone: nn.Module, size: int) -> int:
    """Return the length of the feature vector, found by a forward pass of one empty image."""
    try:
        with torch.no_grad(), eval_mode(backbone):
            if isinstance(backbone, Backbone) and backbone.on_features:
                features = backbone(torch.zeros(1, backbone.in_features))
            else:
                features = backbone(torch.zeros(1, 3, size, size))
    except Exception as error:  # networks raise different errors for a wrong size
        raise InputError(
            f"Expected the backbone {type(backbone).__name__} to take images of {size} px (--data.size) but: {error}"
        ) from error
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise InputError(
            f"Expected the backbone {type(backbone).__name__} to give features of shape (B, F) but got "
            f"{tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__}."
        )
    return features.shape[1]
