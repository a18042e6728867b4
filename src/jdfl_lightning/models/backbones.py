"""Backbones by name, their number of features, their pretrained weights, and the preprocessing of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jdfl_lightning.core.errors import InputError, require, require_choice, without_stop
from jdfl_lightning.core.parts import load, parameters
from jdfl_lightning.models.frozen import Backbone
from jdfl_lightning.models.heads import HEADS
from jdfl_lightning.models.networks import FLAG, TIMM, build_network, import_timm, in_torchvision, is_import_path

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


_SUFFIXES = (".pth", ".pt", ".bin", ".safetensors")
_NESTED = ("state_dict", "model")
"""Keys under which training scripts save the weights, beside other things."""


@dataclass(frozen=True)
class Preprocessing:
    """What weights were trained with: the size of the images, and the mean and std of their channels in [0, 1]."""

    size: int
    mean: list[float]
    std: list[float]


def is_file(weights: Any) -> bool:
    """Return whether weights are given as a file.

    >>> is_file("lite0.safetensors"), is_file("DEFAULT"), is_file(True)
    (True, False, False)
    """
    return isinstance(weights, (str, PathLike)) and Path(weights).suffix in _SUFFIXES


def published(name: str, weights: Any) -> Any:
    """Return the published weights that are asked for, as torchvision or timm names them; None for a file or none.

    Args:
        name: the backbone's name.
        weights: the user's value.
    """
    if weights is None or weights is False or is_file(weights):
        return None
    wanted = "DEFAULT" if weights is True else weights
    if name.startswith(TIMM):
        require_choice(FLAG, wanted, ("DEFAULT", True, f"a file ({', '.join(_SUFFIXES)})"))
        return True
    if name == "PaperCNN" or is_import_path(name) or not in_torchvision(name):
        raise InputError(f"Expected {FLAG} to be a file ({', '.join(_SUFFIXES)}) for {name} but got {weights!r}.")
    from torchvision.models import get_model_weights

    kind: Any = get_model_weights(name)
    known = list(kind.__members__)
    short = str(wanted).removeprefix(f"{kind.__name__}.")
    if short not in known:
        require_choice(FLAG, wanted, [*known, f"a file ({', '.join(_SUFFIXES)})"])
    return kind[short]


def preprocessing_of(name: str, arguments: Mapping[str, Any]) -> Preprocessing | None:
    """Return the preprocessing of a backbone's weights; None if it has none, or if it is not known.

    A file is taken to be of the same preprocessing as the network's published weights.

    Args:
        name: the backbone's name.
        arguments: the backbone's arguments, with `weights`.

    >>> preprocessing_of("resnet18", {"weights": "DEFAULT"})
    Preprocessing(size=224, mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    """
    weights = arguments.get("weights")
    if weights is None or weights is False or name == "PaperCNN" or is_import_path(name):
        return None
    if name.startswith(TIMM):
        own = name.removeprefix(TIMM)
        found = import_timm().get_pretrained_cfg(own)
        return None if found is None else Preprocessing(found.input_size[-1], [*found.mean], [*found.std])
    if not in_torchvision(name):
        return None
    look = (published(name, weights) or published(name, True)).transforms()
    return Preprocessing(look.crop_size[0], [*look.mean], [*look.std])


def load_file(network: nn.Module, name: str, file: str | PathLike[str]) -> None:
    """Load the weights of a file into a network without its head; those of the file's head are left out.

    Nothing in the file is executed.

    Args:
        network: the network, in place.
        name: the backbone's name.
        file: a safetensors file, or a file of torch with named tensors.
    """
    found, known = read_weights(Path(file).expanduser()), network.state_dict()
    top = getattr(network, "pretrained_cfg", {}).get("classifier") or HEADS
    heads = tuple(f"{head}." for head in ((top,) if isinstance(top, str) else top))
    kept = {key: value for key, value in found.items() if key in known or not key.startswith(heads)}
    try:
        missing, unexpected = network.load_state_dict(kept, strict=False)
    except RuntimeError as error:  # other shapes
        raise InputError(
            f"Expected {FLAG} to be of {name} but {file} is not: {without_stop(str(error).splitlines()[-1]).strip()}."
        ) from error
    if missing or unexpected:
        what = f"it has no {missing[0]}" if missing else f"{name} has no {unexpected[0]}"
        raise InputError(f"Expected {FLAG} to be of {name} but {file} is not: {what}.")


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read named tensors; raise an `InputError` if a file has none."""
    from jdfl_lightning.core.files import require_regular

    try:
        require_regular(file)
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file as load

            return load(file)
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"Expected {FLAG} to be a file but there is no {file}.") from error
    except Exception as error:  # torch and safetensors raise many
        why = without_stop((str(error).strip() or type(error).__name__).splitlines()[0])
        raise InputError(f"Expected {FLAG} to be a file of weights but {file} cannot be read: {why}.") from error
    for key in _NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"Expected {FLAG} to be a file of weights but {file} holds other things than named tensors.")
    return dict(found)
