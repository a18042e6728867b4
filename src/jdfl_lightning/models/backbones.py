"""Backbones by name, and their number of features."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from jdfl_lightning.core.errors import InputError, without_stop
from jdfl_lightning.models.heads import exchange, find_head
from jdfl_lightning.models.paper_cnn import PaperCNN


def build_backbone(name: str, size: int, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a backbone by name.

    Args:
        name: ``PaperCNN``; a torchvision classifier (``resnet18``), randomly initialised and without its head; or
            the import path of a class or function that takes the image size and returns a module (``mine.net``).
        size: height and width of the images.
        arguments: further arguments, by name.

    >>> type(build_backbone("PaperCNN", 32)).__name__
    'PaperCNN'
    """
    arguments = dict(arguments or {})
    if name == "PaperCNN" or "." in name:
        path, _, attribute = name.rpartition(".")
        try:
            build = getattr(importlib.import_module(path), attribute) if path else PaperCNN
            backbone = build(size, **arguments)
        except InputError:
            raise
        except Exception as error:  # a user's code may raise anything
            shown = ", ".join([str(size), *(f"{key}={value!r}" for key, value in arguments.items())])
            raise InputError(
                f"Expected --backbone to build a module but {name}({shown}) failed: {without_stop(error)}."
            ) from error
        if not isinstance(backbone, nn.Module):
            raise InputError(f"Expected --backbone to build a module but {name} gave {type(backbone).__name__}.")
        return backbone
    import torchvision
    from torchvision.models import get_model, list_models

    if name not in list_models(module=torchvision.models):  # classifiers only: other models download weights
        raise InputError(
            f"Expected --backbone to be PaperCNN, one of torchvision's models (such as resnet18) or an import path "
            f"but got {name!r}."
        )
    try:
        model: nn.Module = get_model(name, **({"weights": None} | arguments))
    except (TypeError, ValueError, KeyError) as error:
        raise InputError(f"Expected --backbone_args to be arguments of {name} but: {without_stop(error)}.") from error
    exchange(model, find_head(model), nn.Identity())
    return model


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
