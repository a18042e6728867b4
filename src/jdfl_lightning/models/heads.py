"""Find the last layer of torchvision's and timm's classifiers, and replace it by a joint head."""

from __future__ import annotations

from torch import nn

from jdfl_lightning.core.errors import InputError
from jdfl_lightning.joint.head import JointHead, Score

HEADS = ("fc", "classifier", "heads", "head")
"""Names of the parts of torchvision's classifiers that end in the last layer."""


def find_head(model: nn.Module) -> str:
    """Return the name of a classifier's last layer, which is linear.

    It is what timm's ``get_classifier`` gives, or the end of torchvision's ``fc``, ``classifier`` or ``heads``.

    >>> find_head(nn.ModuleDict({"features": nn.Flatten(), "classifier": nn.Sequential(nn.Dropout(), nn.Linear(4, 2))}))
    'classifier.1'
    """
    ask = getattr(model, "get_classifier", None)
    top = ask() if callable(ask) else next((getattr(model, name) for name in HEADS if hasattr(model, name)), None)
    if isinstance(top, nn.Module):
        *_, last = top.modules()
        if isinstance(last, nn.Linear):
            names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
            return names[last]
    raise InputError(
        f"Expected a classifier with a linear head but found none in {type(model).__name__}: it is looked for as "
        f"timm's get_classifier and as {', '.join(HEADS)}. `replace_head` also takes its name, as `head`."
    )


def exchange(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Replace the submodule `name` by `layer`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def replace_head(
    model: nn.Module, num_classes: int, num_domains: int, head: str | None = None, score: Score = "max"
) -> nn.Module:
    """Replace a classifier's last layer by a new `JointHead`.

    It works for torchvision's and timm's classifiers that end in a linear layer; timm itself is not needed. Auxiliary
    classifiers (Inception, GoogLeNet) stay as they are.

    Args:
        model: the classifier, which is changed in place. The new head has the old one's device and type.
        num_classes: C, whatever number of classes the old head had.
        num_domains: M.
        head: name of the linear layer to replace, for other models.
        score: how the head's `class_scores` and `predict` combine the M logits of a class.

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
    exchange(model, name, new.to(old.weight).train(old.training))
    if isinstance(getattr(model, "num_classes", None), int):  # in timm this is the number of outputs
        model.num_classes = new.out_features  # type: ignore[assignment]
    return model
