"""Pretrained weights: torchvision's and timm's by name, or a file; and the preprocessing they were trained with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jdfl_lightning.core.errors import InputError, require_choice, without_stop
from jdfl_lightning.models.heads import HEADS
from jdfl_lightning.models.networks import FLAG, TIMM, import_timm, in_torchvision, is_import_path

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
