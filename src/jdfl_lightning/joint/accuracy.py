"""Class-only accuracy of joint predictions, overall and domain by domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor
from torchmetrics import Metric

from jdfl_lightning.core.errors import require_choice
from jdfl_lightning.joint.head import Score, predict_class, split_index

if TYPE_CHECKING:
    from torchmetrics.utilities.plot import _AX_TYPE, _PLOT_OUT_TYPE

Values = Tensor | dict[str, Tensor] | Sequence[Tensor] | Sequence[dict[str, Tensor]]
"""Values of a metric: a number or numbers by name, or a list of these."""


def joint_correct(preds: Tensor, target: Tensor, num_classes: int, score: Score = "max") -> Tensor:
    """Return for each sample whether the class of its joint prediction is the true one.

    Args:
        preds: joint logits (B, M*C), or joint indices (B,).
        target: class labels (B,).
        num_classes: C.
        score: how logits become class scores.

    >>> joint_correct(torch.tensor([17, 3]), torch.tensor([3, 4]), num_classes=7)
    tensor([ True, False])
    """
    if preds.ndim == target.ndim + 1:
        classes = predict_class(preds, num_classes, score)
    elif preds.shape == target.shape and not preds.is_floating_point():
        _, classes = split_index(preds, num_classes)
    else:
        raise ValueError(
            "Expected argument `preds` to hold joint logits (B, M*C) or integer joint indices (B,) but got "
            f"{preds.dtype} of shape {tuple(preds.shape)} for targets of shape {tuple(target.shape)}."
        )
    return classes == target


class _CountingAccuracy(Metric):
    """Counts (correct, seen) in one state.

    The state's name contains the arguments: in a `MetricCollection`, metrics whose states have the same names and,
    after the first batch, the same values are merged into one.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    plot_lower_bound: float = 0.0
    plot_upper_bound: float = 1.0

    def __init__(self, num_classes: int, score: Score, shape: tuple[int, ...], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_classes < 1:
            raise ValueError(f"Expected argument `num_classes` to be at least 1 but got {num_classes}.")
        require_choice("argument `score`", score, get_args(Score))
        self.num_classes = num_classes
        self.score: Score = score
        self._state = f"{type(self).__name__}_{num_classes}_{score}"
        self.add_state(self._state, default=torch.zeros(2, *shape, dtype=torch.long), dist_reduce_fx="sum")

    @property
    def counts(self) -> Tensor:
        """The numbers of correct and of all samples: (2,), or (2, domains)."""
        counts = getattr(self, self._state)
        assert isinstance(counts, Tensor)
        return counts

    def _count(self, correct: Tensor, seen: Tensor) -> None:
        # a new tensor: one reset in inference mode cannot be changed in place outside of it
        setattr(self, self._state, self.counts + torch.stack([correct, seen]))

    def plot(self, val: Values | None = None, ax: _AX_TYPE | None = None) -> _PLOT_OUT_TYPE:
        """Plot one or several values, as torchmetrics' own metrics do.

        Args:
            val: a value of ``forward`` or ``compute``, or a list of them; the current ``compute()`` if not given.
            ax: matplotlib's axes to draw on; a new figure if not given.

        Returns:
            The figure and its axes.
        """
        return self._plot(val, ax)


class JointAccuracy(_CountingAccuracy):
    r"""Class-only accuracy: a joint prediction is correct if its class is, whatever its domain.

    As input to ``update`` the metric takes ``preds``, joint logits (B, M*C) or joint indices (B,), and ``target``,
    class labels (B,). ``compute`` gives a scalar. With M = 1 it is ordinary accuracy.

    Args:
        num_classes: C.
        score: how logits become class scores, ``"max"`` (the paper) or ``"sum"``.
        kwargs: torchmetrics' own arguments of a `Metric`.

    >>> metric = JointAccuracy(num_classes=2)
    >>> metric(torch.tensor([[2.0, 0.0, 1.0, 4.0], [3.0, 0.0, 1.0, 2.0]]), torch.tensor([1, 1]))
    tensor(0.5000)
    """

    def __init__(self, num_classes: int, score: Score = "max", **kwargs: Any) -> None:
        super().__init__(num_classes, score, (), **kwargs)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count a batch."""
        correct = joint_correct(preds, target, self.num_classes, self.score)
        self._count(correct.sum(), torch.tensor(correct.numel(), device=correct.device))

    def compute(self) -> Tensor:
        """Return the share of correct predictions."""
        correct, seen = self.counts.float()
        accuracy: Tensor = correct / seen
        return accuracy


class DomainAccuracy(_CountingAccuracy):
    """Class-only accuracy for each domain, of the worst domain, and their spread (best minus worst).

    As input to ``update`` the metric takes ``preds`` and ``target`` as `JointAccuracy` does, and ``domains`` (B,).
    ``compute`` gives a dict: ``overall``, ``worst``, ``spread`` and one entry for each domain. A domain without a
    sample is NaN and left out of worst and spread.

    Args:
        num_classes: C.
        domains: the domains' names, or their number.
        score: how logits become class scores, ``"max"`` (the paper) or ``"sum"``.
        kwargs: torchmetrics' own arguments of a `Metric`.

    >>> metric = DomainAccuracy(num_classes=2, domains=["photo", "sketch"])
    >>> scores = metric(torch.tensor([0, 3, 1]), torch.tensor([0, 1, 0]), domains=torch.tensor([0, 0, 1]))
    >>> {name: round(score.item(), 3) for name, score in scores.items()}
    {'overall': 0.667, 'worst': 0.0, 'spread': 1.0, 'photo': 1.0, 'sketch': 0.0}
    """

    def __init__(self, num_classes: int, domains: Sequence[str] | int, score: Score = "max", **kwargs: Any) -> None:
        names = [str(d) for d in range(domains)] if isinstance(domains, int) else list(domains)
        clash = {"overall", "worst", "spread"} & set(names)
        if not names or len(set(names)) < len(names) or clash:
            raise ValueError(
                "Expected argument `domains` to be distinct names other than 'overall', 'worst' and 'spread' "
                f"but got {domains!r}."
            )
        super().__init__(num_classes, score, (len(names),), **kwargs)
        self.names = names

    def update(self, preds: Tensor, target: Tensor, domains: Tensor) -> None:
        """Count a batch."""
        correct = joint_correct(preds, target, self.num_classes, self.score)
        size = len(self.names)
        if domains.numel() and not 0 <= int(domains.min()) <= int(domains.max()) < size:
            raise ValueError(f"Expected argument `domains` to hold values from 0 to {size - 1} but got {domains}.")
        self._count(torch.bincount(domains[correct], minlength=size), torch.bincount(domains, minlength=size))

    def compute(self) -> dict[str, Tensor]:
        """Return the accuracies by name."""
        correct, seen = self.counts.float()
        each = correct / seen  # 0 / 0 is NaN: this domain has not been seen
        known = each[seen > 0]
        nothing = torch.full_like(each[0], torch.nan)
        worst, best = (known.min(), known.max()) if known.numel() else (nothing, nothing)
        summary = {"overall": correct.sum() / seen.sum(), "worst": worst, "spread": best - worst}
        return summary | dict(zip(self.names, each.unbind(), strict=True))
