"""KL divergence between soft joint targets and the model's joint distribution."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from jdfl_lightning.core.errors import require_choice
from jdfl_lightning.joint.head import of_class

Reduction = Literal["mean", "sum", "none"]


def soft_target_kl(logits: Tensor, targets: Tensor, labels: Tensor | None = None) -> Tensor:
    r"""Return :math:`\mathrm{KL}(t \,\|\, \mathrm{softmax}(\ell)) = \sum_j t_j (\log t_j - \log p_j)` for each sample.

    Args:
        logits: joint logits (B, M*C).
        targets: dense targets (B, M*C); or, with ``labels``, weights over domains (B, M).
        labels: class labels (B,). With them the dense target is never built; value and gradient are the same.

    Returns:
        One value for each sample (B,), in single precision if logits are in half. Entries of zero mass contribute
        nothing, even where a logit is -inf.

    >>> logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    >>> soft_target_kl(logits, torch.tensor([[0.7, 0.3]]), torch.tensor([0]))
    tensor([0.1293])
    >>> soft_target_kl(logits, torch.tensor([[0.7, 0.0, 0.3, 0.0]]))
    tensor([0.1293])
    """
    log_p = logits.log_softmax(dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))
    targets = targets.to(torch.promote_types(targets.dtype, torch.float32))
    if labels is not None:
        log_p = of_class(log_p, labels, targets.shape[1])
    elif targets.shape != logits.shape:
        raise ValueError(f"Expected dense targets of shape {tuple(logits.shape)} but got {tuple(targets.shape)}.")
    # 0 * -inf would be NaN: where there is no mass, log p does not matter
    cross = targets * log_p.masked_fill(targets == 0, 0.0)
    return (torch.xlogy(targets, targets) - cross).sum(dim=1)


def class_kl(logits: Tensor, labels: Tensor) -> Tensor:
    """Return `soft_target_kl` of targets with all mass on the class: the same bits, and gradients, in fewer operations.

    >>> logits = torch.tensor([[2.0, 0.0]])
    >>> class_kl(logits, torch.tensor([0])), soft_target_kl(logits, torch.tensor([[1.0]]), torch.tensor([0]))
    (tensor([0.1269]), tensor([0.1269]))
    """
    log_p = logits.log_softmax(dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return 0.0 - log_p.gather(1, labels.view(-1, 1)).squeeze(1)


class SoftTargetKLLoss(nn.Module):
    """`soft_target_kl` as a module; a one-hot target gives the cross-entropy.

    Args:
        reduction: ``"mean"`` over the batch, ``"sum"``, or ``"none"``.

    >>> loss = SoftTargetKLLoss()
    >>> loss(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0]]), torch.tensor([0]))
    tensor(0.1269)
    """

    def __init__(self, reduction: Reduction = "mean") -> None:
        super().__init__()
        require_choice("argument `reduction`", reduction, get_args(Reduction))
        self.reduction: Reduction = reduction

    def forward(self, logits: Tensor, targets: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the reduced divergence; the arguments are those of `soft_target_kl`."""
        values = soft_target_kl(logits, targets, labels)
        if self.reduction == "none":
            return values
        return values.mean() if self.reduction == "mean" else values.sum()
