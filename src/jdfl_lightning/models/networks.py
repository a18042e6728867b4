"""Networks by name, without their heads: the paper's, torchvision's, timm's, your own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from jdfl_lightning.core.errors import InputError, did_you_mean, without_stop
from jdfl_lightning.models.heads import exchange, find_head
from jdfl_lightning.models.paper_cnn import PaperCNN

TIMM = "timm/"
"""Prefix of the name of a network of timm."""
FLAG = "--backbone_args.weights"


def is_import_path(name: str) -> bool:
    """Return whether a backbone's name is the import path of a class or function.

    >>> is_import_path("mine.net"), is_import_path("resnet18"), is_import_path("timm/resnet18.a1_in1k")
    (True, False, False)
    """
    return "." in name and not name.startswith(TIMM)


def import_timm() -> Any:
    """Import timm; raise an `InputError` that says how to install it."""
    try:
        import timm
    except ImportError as error:
        raise InputError(
            f"Expected timm to be installed for --backbone {TIMM}...: pip install 'jdfl-lightning[timm]'."
        ) from error
    return timm


def build_network(name: str, size: int, arguments: Mapping[str, Any], weights: Any = None) -> nn.Module:
    """Build a network without its head; random weights, or published ones of torchvision or timm.

    Args:
        name: ``PaperCNN``, a torchvision classifier, ``timm/`` and a name of timm's, or an import path.
        size: height and width of the images.
        arguments: the network's own arguments.
        weights: a member of torchvision's weights, or true for timm's.
    """
    if name.startswith(TIMM):
        return _from_timm(name, arguments, bool(weights))
    if name == "PaperCNN" or is_import_path(name):
        return _from_path(name, size, arguments)
    return _from_torchvision(name, arguments, weights)


def _from_path(name: str, size: int, arguments: Mapping[str, Any]) -> nn.Module:
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


def in_torchvision(name: str) -> bool:
    """Return whether torchvision has a classifier of this name; its other models download weights."""
    import torchvision
    from torchvision.models import list_models

    return name in list_models(module=torchvision.models)


def _from_torchvision(name: str, arguments: Mapping[str, Any], weights: Any) -> nn.Module:
    if not in_torchvision(name):
        raise InputError(
            f"Expected --backbone to be PaperCNN, one of torchvision's models (such as resnet18), {TIMM} and the name "
            f"of one of timm's, or an import path but got {name!r}."
        )
    import torch
    from torchvision.models import get_model

    try:
        model: nn.Module = get_model(name, **({"weights": weights} | dict(arguments)))
    except OSError as error:
        file = str(weights.url).rpartition("/")[2]
        raise InputError(
            f"Expected the weights of {name} but they cannot be fetched: {without_stop(error)}. Put the file {file} of "
            f"{weights.url} into {torch.hub.get_dir()}/checkpoints, or pass its path as {FLAG}."
        ) from error
    except (TypeError, ValueError, KeyError) as error:
        raise InputError(f"Expected --backbone_args to be arguments of {name} but: {without_stop(error)}.") from error
    exchange(model, find_head(model), nn.Identity())
    return model


def _from_timm(name: str, arguments: Mapping[str, Any], pretrained: bool) -> nn.Module:
    timm, own = import_timm(), name.removeprefix(TIMM)
    base = own.partition(".")[0]
    if not timm.is_model(base):
        raise InputError(
            f"Expected --backbone to be {TIMM} and the name of a network of timm but got {name!r}."
            f"{did_you_mean(base, timm.list_models())}"
        )
    try:
        model: nn.Module = timm.create_model(own, pretrained=pretrained, num_classes=0, **arguments)
    except OSError as error:
        home = (timm.get_pretrained_cfg(own) or timm.get_pretrained_cfg(base)).hf_hub_id
        raise InputError(
            f"Expected the weights of {name} but they cannot be fetched: {without_stop(str(error).splitlines()[0])}. "
            f"Get the file model.safetensors of {home} from huggingface.co, and pass its path as {FLAG}."
        ) from error
    except Exception as error:  # timm and its networks raise different errors
        raise InputError(f"Expected --backbone_args to be arguments of {name} but: {without_stop(error)}.") from error
    return model
