"""What happens to a decoded image before the network gets it: augmentation of training images, normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, get_args, get_type_hints

import torch
from torch import Tensor, nn

from jdfl_lightning.core.errors import InputError, require, require_choice, without_stop
from jdfl_lightning.core.parts import Part

Augment = list[str | dict]  # type: ignore[type-arg]
"""Transforms as plain values: the name of a class, or its ``class_path`` and ``init_args``. jsonargparse would build
the classes that are named inside of a ``dict[str, Any]``."""
Normalize = Literal["unit", "imagenet"] | dict[str, list[float]]
"""unit, imagenet, or the ``mean`` and the ``std`` of the three channels."""
Resize = Literal["squash", "crop"]
"""How an image becomes a square: by its whole area, or by the largest square at its centre."""

_IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_AUGMENT = "--data.augment"
_TRANSFORMS = "torchvision.transforms.v2"
_WHOLE_BATCHES = ("MixUp", "CutMix")
_TRIALS = 8  # a transform may change an image only now and then


def checked_normalize(value: Any) -> Normalize:
    """Return a normalisation as plain values; raise an `InputError` if it is none.

    >>> checked_normalize({"mean": (0.5, 0.5, 0.5), "std": (1, 1, 1)})
    {'mean': [0.5, 0.5, 0.5], 'std': [1.0, 1.0, 1.0]}
    """
    if not isinstance(value, Mapping):
        require_choice("--data.normalize", value, ("unit", "imagenet", {"mean": "[r, g, b]", "std": "[r, g, b]"}))
        return value  # type: ignore[no-any-return]
    require(set(value) == {"mean", "std"}, "--data.normalize", "unit, imagenet, or a mean and a std", dict(value))
    found: dict[str, list[float]] = {}
    for name, numbers in value.items():
        right = isinstance(numbers, Sequence) and len(numbers) == 3
        right = right and all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        require(right, f"--data.normalize.{name}", "three numbers, one for each channel,", numbers)
        require(name == "mean" or min(numbers) > 0, f"--data.normalize.{name}", "positive", numbers)
        found[name] = [float(number) for number in numbers]
    return found


def normalize_of(mean: Sequence[float], std: Sequence[float]) -> Normalize:
    """Return a normalisation, by its name if it has one.

    >>> normalize_of((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), normalize_of([0, 0, 0], [1, 1, 1])
    ('unit', {'mean': [0.0, 0.0, 0.0], 'std': [1.0, 1.0, 1.0]})
    """
    found = {"mean": list(map(float, mean)), "std": list(map(float, std))}
    if found == {"mean": [0.5] * 3, "std": [0.5] * 3}:
        return "unit"
    return "imagenet" if found == _IMAGENET else found


def to_input(images: Tensor, normalize: Normalize = "unit") -> Tensor:
    """Turn uint8 images (B, H, W, 3) into a network's input (B, 3, H, W).

    The memory layout is kept: viewed as (B, 3, H, W) it is torch's channels_last, which is fast for convolutions.

    Args:
        images: values from 0 to 255.
        normalize: unit for [-1, 1]; else values in [0, 1], minus the mean, divided by the standard deviation.
    """
    pixels = images.permute(0, 3, 1, 2).to(torch.float32)
    if torch.compiler.is_compiling():
        pixels = pixels.clone()  # torch.export of torch 2.4 forbids to change what `to` returned
    if normalize == "unit":
        return pixels.mul_(2 / 255).sub_(1)
    numbers = _IMAGENET if isinstance(normalize, str) else normalize
    mean, std = (torch.tensor(numbers[name]).view(3, 1, 1) for name in ("mean", "std"))
    return pixels.div_(255).sub_(mean).div_(std)


class Augmentation:
    """Random transforms of training images, each image with random numbers of its own.

    The random numbers come from torch's global generator, which every fit seeds.

    Args:
        specs: the transforms as plain values, in the order they are applied.
        size: height and width of the images, which no transform may change.

    >>> mirror = Augmentation([{"class_path": "RandomHorizontalFlip", "init_args": {"p": 1}}], size=2)
    >>> mirror(torch.tensor([[[[1] * 3, [2] * 3]] * 2], dtype=torch.uint8))[0, 0, :, 0]
    tensor([2, 1], dtype=torch.uint8)
    """

    def __init__(self, specs: Sequence[Any], size: int) -> None:
        self.specs, self.size = [_plain(spec) for spec in specs], size
        self._transforms: list[Callable[[Tensor], Any]] = [_build(spec) for spec in self.specs]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for _ in range(_TRIALS):
                self._transform(torch.zeros(3, size, size, dtype=torch.uint8))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the plain values alone; another process builds the transforms itself."""
        return type(self), (self.specs, self.size)

    def __call__(self, images: Tensor) -> Tensor:
        """Transform every image of a batch, uint8 (B, H, W, 3)."""
        changed = [self._transform(image.permute(2, 0, 1)) for image in images]
        return torch.stack(changed).permute(0, 2, 3, 1).contiguous()

    def _transform(self, image: Tensor) -> Tensor:
        for spec, transform in zip(self.specs, self._transforms, strict=True):
            try:
                image = transform(image)
            except Exception as error:
                raise InputError(
                    f"Expected a transform of single images, uint8 (3, H, W), in {_AUGMENT} but {_name(spec)} fails on "
                    f"one: {without_stop(error)}."
                ) from error
            found = (image.dtype, tuple(image.shape)) if isinstance(image, Tensor) else type(image).__name__
            if found != (torch.uint8, (3, self.size, self.size)):
                raise InputError(
                    f"Expected transforms in {_AUGMENT} that keep type and size of an image, uint8 (3, {self.size}, "
                    f"{self.size}), but {_name(spec)} makes it {found}. Use --data.size to resize and "
                    "--data.normalize to normalise."
                )
        return image


def _plain(value: Any) -> Any:
    """Return a copy of plain values, tuples as lists; raise an `InputError` for anything else, which no file holds."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise InputError(
        f"Expected {_AUGMENT} to be plain values, so that a config can hold them, but got {value!r}. Name the class: "
        f"{{'class_path': '{type(value).__module__}.{type(value).__qualname__}', 'init_args': {{...}}}}."
    )


def _name(spec: Any) -> str:
    return spec if isinstance(spec, str) else str(spec["class_path"])


def _build(spec: Any) -> Any:
    """Build a transform from its plain values, and those that are among its arguments."""
    known = isinstance(spec, str) or (isinstance(spec, dict) and "class_path" in spec)
    if not known or (isinstance(spec, dict) and set(spec) - {"class_path", "init_args"}):
        raise InputError(
            f"Expected {_AUGMENT} to be a list of class names, or class_path with init_args, but got {spec!r}."
        )
    arguments = (spec.get("init_args") or {}) if isinstance(spec, dict) else {}
    require(isinstance(arguments, dict), f"{_AUGMENT} {_name(spec)}", "given its init_args by name", arguments)
    path = _name(spec) if "." in _name(spec) else f"{_TRANSFORMS}.{_name(spec)}"
    try:
        part = Part(path, **arguments)
    except InputError as error:
        raise InputError(f"{_AUGMENT}: {error}") from error
    part.check(_AUGMENT, nn.Module)
    if part.name in _WHOLE_BATCHES and part.class_path.startswith("torchvision."):
        raise InputError(
            f"Expected {_AUGMENT} to name transforms of single images but {part.name} mixes the images and the labels "
            "of a batch, and targets here are of one class and one pseudo-domain."
        )
    kind: Any = part.load()
    hints = get_type_hints(kind.__init__) if kind.__module__.startswith("torchvision.") else {}
    try:
        return kind(**{name: _argument(value, hints.get(name)) for name, value in arguments.items()})
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"Expected {_AUGMENT} to have usable transforms but {_name(spec)} is not: {error}.") from error


def _argument(value: Any, hint: Any) -> Any:
    """Return an argument: nested transforms are built, and the word for a member of an enumeration becomes it."""
    if isinstance(value, dict) and "class_path" in value:
        return _build(value)
    if isinstance(value, list):
        return [_argument(item, None) for item in value]
    kinds = [part for part in (hint, *get_args(hint)) if isinstance(part, type) and issubclass(part, Enum)]
    if isinstance(value, str) and kinds:
        words = [member.value for member in kinds[0]]
        require_choice(f"{_AUGMENT} {kinds[0].__name__}", value, words)
        return kinds[0](value)
    return value
