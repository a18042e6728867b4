"""The joint head: M x C logits, one for each (pseudo-domain, class), and how they give a class."""

from __future__ import annotations

from typing import Literal, get_args, overload

import torch
from torch import Tensor, nn

from jdfl_lightning.core.errors import InputError, require_choice

Score = Literal["max", "sum"]
"""How a class is scored: by the largest of its M logits (the paper), or by the sum of its M joint probabilities."""

_SCORES = get_args(Score)
Init = Literal["fresh", "tile"]
"""Weights of an expanded head: newly initialised (the paper), or those of the old head for every domain."""


def _check_score(score: Score) -> None:
    require_choice("argument `score`", score, _SCORES)


def _check_from(name: str, value: int | Tensor, low: int, high: int | None = None) -> None:
    """Raise an `InputError` unless an integer, or all of a tensor, is at least `low` and below `high`."""
    values = value if isinstance(value, Tensor) else torch.tensor(value)
    if not values.numel():
        return
    if int(values.min()) < low or (high is not None and int(values.max()) >= high):
        expected = f"at least {low}" if high is None else f"from {low} to {high - 1}"
        raise InputError(f"Expected argument `{name}` to be {expected} but got {value}.")


@overload
def joint_index(domain: int, label: int, num_classes: int) -> int: ...
@overload
def joint_index(domain: Tensor, label: Tensor, num_classes: int) -> Tensor: ...
def joint_index(domain: int | Tensor, label: int | Tensor, num_classes: int) -> int | Tensor:
    r"""Return the joint index :math:`j = d \cdot C + c`, counted from 0.

    >>> joint_index(2, 3, num_classes=7)
    17
    """
    _check_from("domain", domain, 0)
    _check_from("label", label, 0, num_classes)
    return domain * num_classes + label


def split_index(index: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return (domain, class) of joint indices: the inverse of `joint_index`.

    >>> split_index(torch.tensor([17]), num_classes=7)
    (tensor([2]), tensor([3]))
    """
    _check_from("index", index, 0)
    return index // num_classes, index % num_classes


def per_domain(logits: Tensor, num_classes: int) -> Tensor:
    """View joint logits (..., M*C) as (..., M, C)."""
    if num_classes < 1 or logits.shape[-1] % num_classes:
        raise ValueError(
            f"Expected the last dimension of `logits` to be a multiple of num_classes={num_classes} "
            f"but got shape {tuple(logits.shape)}."
        )
    split: Tensor = logits.unflatten(-1, (-1, num_classes))
    return split


def of_class(values: Tensor, labels: Tensor, num_domains: int) -> Tensor:
    """Return the M values (B, M) of each sample's class, from values of all outputs (B, M*C).

    >>> of_class(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([1]), num_domains=2)
    tensor([[2., 4.]])
    """
    if values.shape[1] % num_domains:
        raise ValueError(
            f"Expected `logits` with a multiple of M={num_domains} columns but got shape {tuple(values.shape)}."
        )
    index = labels.view(-1, 1, 1).expand(-1, num_domains, 1)
    return per_domain(values, values.shape[1] // num_domains).gather(2, index).squeeze(2)


def class_scores(logits: Tensor, num_classes: int, score: Score = "max") -> Tensor:
    r"""Return a score for each class: :math:`s_c = \max_d \ell_{d,c}`, or :math:`\log \sum_d e^{\ell_{d,c}}`.

    Args:
        logits: joint logits (..., M*C).
        num_classes: C.
        score: ``"max"``, the paper's rule, or ``"sum"``, whose softmax is the sum of joint probabilities.

    Returns:
        Scores (..., C), whose largest is the predicted class.

    Three logits of class 1 that are each a little below the one of class 0 outweigh it together:

    >>> logits = torch.tensor([2.0, 1.5, -9.0, 1.5, -9.0, 1.5])
    >>> class_scores(logits, num_classes=2), class_scores(logits, num_classes=2, score="sum")
    (tensor([2.0000, 1.5000]), tensor([2.0000, 2.5986]))
    """
    _check_score(score)
    split = per_domain(logits, num_classes)
    return split.amax(dim=-2) if score == "max" else split.logsumexp(dim=-2)


def class_probabilities(logits: Tensor, num_classes: int) -> Tensor:
    """Return class probabilities: joint probabilities summed over the domains.

    >>> class_probabilities(torch.zeros(6), num_classes=3)
    tensor([0.3333, 0.3333, 0.3333])
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))  # in half precision they would not sum to 1
    return class_scores(exact, num_classes, "sum").softmax(dim=-1)


def predict_class(logits: Tensor, num_classes: int, score: Score = "max") -> Tensor:
    """Return the class with the highest score.

    >>> predict_class(torch.tensor([[2.0, 0.0, 1.0, 4.0]]), num_classes=2)
    tensor([1])
    """
    return class_scores(logits, num_classes, score).argmax(dim=-1)


class ClassScores(nn.Module):
    """`class_scores` as a layer: after a joint head it gives an ordinary classifier of C outputs.

    Args:
        num_classes: C.
        score: how the M logits of a class become its score.

    >>> classifier = nn.Sequential(JointHead(128, num_classes=7, num_domains=4), ClassScores(7))
    >>> classifier(torch.randn(2, 128)).shape
    torch.Size([2, 7])
    """

    def __init__(self, num_classes: int, score: Score = "max") -> None:
        super().__init__()
        _check_score(score)
        self.num_classes = num_classes
        self.score: Score = score

    def forward(self, logits: Tensor) -> Tensor:
        """Return scores (..., C) of joint logits (..., M*C)."""
        return class_scores(logits, self.num_classes, self.score)

    def extra_repr(self) -> str:
        """Show C and the rule."""
        return f"num_classes={self.num_classes}, score={self.score!r}"


class JointHead(nn.Linear):
    r"""A linear layer with one output for each (domain, class) pair.

    The class score is the maximum over the M outputs of a class, a piecewise-linear function of the features;
    with ``num_domains=1`` it is an ordinary linear classifier.

    Args:
        in_features: size of the feature vector.
        num_classes: C.
        num_domains: M.
        bias: whether the layer has a bias.
        score: how `class_scores` and `predict` combine the M logits of a class.

    >>> head = JointHead(128, num_classes=7, num_domains=4)
    >>> logits = head(torch.randn(2, 128))
    >>> logits.shape, head.class_scores(logits).shape, head.predict(logits).shape
    (torch.Size([2, 28]), torch.Size([2, 7]), torch.Size([2]))
    """

    def __init__(
        self, in_features: int, num_classes: int, num_domains: int = 1, bias: bool = True, score: Score = "max"
    ) -> None:
        for name, value in (("in_features", in_features), ("num_classes", num_classes), ("num_domains", num_domains)):
            if value < 1:
                raise InputError(f"Expected argument `{name}` to be at least 1 but got {value}.")
        _check_score(score)
        super().__init__(in_features, num_domains * num_classes, bias=bias)
        self.num_classes = num_classes
        self.num_domains = num_domains
        self.score: Score = score

    def class_scores(self, logits: Tensor) -> Tensor:
        """Return scores (..., C) of joint logits (..., M*C)."""
        return class_scores(logits, self.num_classes, self.score)

    def class_probabilities(self, logits: Tensor) -> Tensor:
        """Return class probabilities (..., C): joint probabilities summed over the domains."""
        return class_probabilities(logits, self.num_classes)

    def predict(self, logits: Tensor) -> Tensor:
        """Return the predicted class (...) of joint logits (..., M*C)."""
        return predict_class(logits, self.num_classes, self.score)

    def extra_repr(self) -> str:
        """Show C and M instead of their product."""
        return f"in_features={self.in_features}, num_classes={self.num_classes}, num_domains={self.num_domains}"

    @classmethod
    def expand(cls, linear: nn.Linear, num_domains: int, init: Init = "fresh") -> JointHead:
        """Expand a classifier of C outputs to M x C.

        Args:
            linear: the classifier; its outputs are the C classes.
            num_domains: M.
            init: ``"fresh"`` draws new weights (the paper); ``"tile"`` repeats the old ones for every domain, so
                that the predictions are those of the old head.

        >>> old = nn.Linear(8, 3)
        >>> new, x = JointHead.expand(old, num_domains=2, init="tile"), torch.randn(5, 8)
        >>> torch.equal(new.predict(new(x)), old(x).argmax(-1))
        True
        """
        require_choice("argument `init`", init, get_args(Init))
        if isinstance(linear, JointHead) and linear.num_domains > 1:
            raise ValueError(f"Expected a head of one domain but got one of {linear.num_domains}.")
        score = linear.score if isinstance(linear, JointHead) else "max"
        head = cls(linear.in_features, linear.out_features, num_domains, linear.bias is not None, score)
        head.to(linear.weight)
        if init == "tile":
            with torch.no_grad():
                head.weight.copy_(linear.weight.repeat(num_domains, 1))
                if linear.bias is not None:
                    head.bias.copy_(linear.bias.repeat(num_domains))
        return head
