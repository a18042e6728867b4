"""Agreement: the M scorers of a joint head shall agree on the class."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint.head import per_domain
from jdfl_lightning.regularizers.base import Regularizer, Step, Term


def disagreement(logits: Tensor, num_classes: int) -> Tensor:
    r"""Return :math:`\frac1M \sum_m \mathrm{KL}(p_m \,\|\, \bar p)` with :math:`p_m = \mathrm{softmax}_c\,\ell_{m,c}`.

    Args:
        logits: joint logits (B, M*C).
        num_classes: C.

    Returns:
        One value for each sample (B,): 0 where all pseudo-domains agree, at most log min(M, C).

    >>> disagreement(torch.tensor([[1.0, 0.0, 1.0, 0.0], [50.0, 0.0, 0.0, 50.0]]), num_classes=2)
    tensor([0.0000, 0.6931])
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    log_p = per_domain(logits, num_classes).log_softmax(dim=2, dtype=precise)
    # the mean in logarithms too: for M = 1 it is log_p itself, so value and gradient are exactly 0
    log_mean = log_p.logsumexp(dim=1, keepdim=True) - math.log(log_p.shape[1])
    return (log_p.exp() * (log_p - log_mean)).sum(dim=2).mean(dim=1).clamp_min(0.0)


class AgreementTerm(Term):
    """The mean disagreement of a batch."""

    def value(self, step: Step) -> Tensor:
        """Return the mean over the batch."""
        return disagreement(step.logits, step.head.num_classes).mean()


@dataclass(frozen=True)
class Agreement(Regularizer):
    """The mean KL divergence of each pseudo-domain's class probabilities from their mean; nothing is sent."""

    def term(self, sent: Tensors) -> Term:
        """Return the term for one fit."""
        return AgreementTerm(self.weight)
