"""Backbones, the paper's CNN first, and other people's networks: their heads and the layers that discovery looks at."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch

import torch
from torch import Tensor, nn

from jdfl_lightning.errors import InputError
from jdfl_lightning.joint.head import JointHead, Score


def _block(inputs: int, outputs: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(groups, outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(groups, outputs),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2, 2),
    )


class PaperCNN(nn.Module):
    """The paper's lightweight CNN up to its features: three conv blocks with GroupNorm, then fc1 and fc2.

    The head (the paper's fc3) is a `JointHead` on the 128 features. The paper leaves open what stands between the
    fully connected layers; a ReLU follows fc1 and fc2.

    Args:
        size: height and width of the images, a multiple of 8.

    >>> PaperCNN(size=32)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 128])
    """

    def __init__(self, size: int = 112) -> None:
        super().__init__()
        if size < 8 or size % 8:
            raise InputError(
                f"Expected the image size to be a multiple of 8 but got {size}: PaperCNN halves it three times."
            )
        self.size = size
        self.block1 = _block(3, 32, groups=8)
        self.block2 = _block(32, 64, groups=16)
        self.block3 = _block(64, 128, groups=16)
        self.fc1 = nn.Linear(128 * (size // 8) ** 2, 256)
        self.fc2 = nn.Linear(256, 128)

    def forward(self, images: Tensor) -> Tensor:
        """Return features (B, 128) of images (B, 3, size, size)."""
        maps = self.block3(self.block2(self.block1(images)))
        features: Tensor = self.fc2(self.fc1(maps.flatten(1)).relu_()).relu_()
        return features


_HEADS = ("fc", "classifier", "heads", "head")
"""Where torchvision's classifiers have their last layer: as the last part of one of these."""


def find_head(model: nn.Module) -> str:
    """Return the name of a classifier's last layer, which is linear.

    It is what timm's ``get_classifier`` gives, or the end of torchvision's ``fc``, ``classifier`` or ``heads``.

    >>> find_head(nn.ModuleDict({"features": nn.Flatten(), "classifier": nn.Sequential(nn.Dropout(), nn.Linear(4, 2))}))
    'classifier.1'
    """
    ask = getattr(model, "get_classifier", None)
    top = ask() if callable(ask) else next((getattr(model, name) for name in _HEADS if hasattr(model, name)), None)
    if isinstance(top, nn.Module):
        *_, last = top.modules()
        if isinstance(last, nn.Linear):
            names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
            return names[last]
    raise InputError(
        f"Expected a classifier with a linear head but found none in {type(model).__name__}: it is looked for as "
        f"timm's get_classifier and as {', '.join(_HEADS)}. `replace_head` also takes its name, as `head`."
    )


def _exchange(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def replace_head(
    model: nn.Module, num_classes: int, num_domains: int, head: str | None = None, score: Score = "max"
) -> nn.Module:
    """Put a new `JointHead` in the place of a classifier's last layer.

    It works for torchvision's and timm's classifiers that end in a linear layer; timm itself is not needed. Auxiliary
    classifiers (Inception, GoogLeNet) stay as they are.

    Args:
        model: the classifier, which is changed in place. The new head has the old one's device and type.
        num_classes: C, whatever number of classes the old head had.
        num_domains: M.
        head: name of the linear layer to replace, for other models.
        score: how the head's `class_scores` and `predict` join the M logits of a class.

    Returns:
        The model, which now gives joint logits (B, M*C).

    >>> from torchvision.models import resnet18
    >>> replace_head(resnet18(), num_classes=7, num_domains=4).fc
    JointHead(in_features=512, num_classes=7, num_domains=4)
    """
    name = find_head(model) if head is None else head
    try:
        old = model.get_submodule(name)
    except AttributeError as error:
        raise InputError(
            f"Expected argument `head` to name a part of {type(model).__name__} but got {head!r}."
        ) from error
    if not isinstance(old, nn.Linear):
        raise InputError(f"Expected argument `head` to name a linear layer but {head!r} is a {type(old).__name__}.")
    new = JointHead(old.in_features, num_classes, num_domains, old.bias is not None, score)
    _exchange(model, name, new.to(old.weight).train(old.training))
    if isinstance(getattr(model, "num_classes", None), int):  # what timm calls so is the number of outputs
        model.num_classes = new.out_features  # type: ignore[assignment]
    return model


def build_backbone(name: str, size: int) -> nn.Module:
    """Build a backbone by name.

    Args:
        name: ``PaperCNN``; a torchvision classifier (``resnet18``), randomly initialised and without its head; or
            the import path of a class or function that takes the image size and returns a module (``mine.net``).
        size: height and width of the images.

    >>> type(build_backbone("PaperCNN", 32)).__name__
    'PaperCNN'
    """
    if name == "PaperCNN":
        return PaperCNN(size)
    if "." in name:
        path, _, attribute = name.rpartition(".")
        try:
            backbone = getattr(importlib.import_module(path), attribute)(size)
        except Exception as error:  # whatever the user's own code raises
            raise InputError(f"Expected --backbone to build a module but {name}({size}) failed: {error}.") from error
        if not isinstance(backbone, nn.Module):
            raise InputError(f"Expected --backbone to build a module but {name} gave {type(backbone).__name__}.")
        return backbone
    import torchvision
    from torchvision.models import get_model, list_models

    if name not in list_models(module=torchvision.models):  # classifiers alone: others load weights from the net
        raise InputError(
            f"Expected --backbone to be PaperCNN, one of torchvision's models (such as resnet18) or an import path "
            f"but got {name!r}."
        )
    model: nn.Module = get_model(name, weights=None)
    _exchange(model, find_head(model), nn.Identity())
    return model


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode for the block; every part gets its own mode back."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def num_features(backbone: nn.Module, size: int) -> int:
    """Return the length of the feature vector, found by passing one empty image through."""
    try:
        with torch.no_grad(), eval_mode(backbone):
            features = backbone(torch.zeros(1, 3, size, size))
    except Exception as error:  # every network has its own way to refuse a size
        raise InputError(
            f"Expected the backbone {type(backbone).__name__} to take images of {size} px (--data.size) but: {error}"
        ) from error
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise InputError(
            f"Expected the backbone {type(backbone).__name__} to give features of shape (B, F) but got "
            f"{tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__}."
        )
    return features.shape[1]


def conv_blocks(backbone: nn.Module) -> list[str]:
    """Return the names of the backbone's outermost parts that hold a convolution, first to last.

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
"""The paper's subsets of layers, by the number of last conv blocks that join the head."""


def select_parameters(module: nn.Module, layers: str | list[str]) -> list[str]:
    """Return the names of the parameters that discovery looks at.

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
