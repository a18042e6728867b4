"""Balance: no pseudo-domain of the head shall serve a class alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jdfl_lightning.core.errors import require
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import of_class
from jdfl_lightning.regularizers.base import Regularizer, Step, Term
from jdfl_lightning.supervision.base import SUM_TOLERANCE, ClientSums


def domain_shares(logits: Tensor, labels: Tensor, num_domains: int) -> Tensor:
    r"""Return :math:`\mathrm{softmax}_m\,\ell_{m,c}`, how much each domain serves a sample of class c, (B, M).

    >>> domain_shares(torch.tensor([[2.0, 0.0, 1.0, -1.0]]), torch.tensor([0]), num_domains=2)
    tensor([[0.7311, 0.2689]])
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    return of_class(logits, labels, num_domains).softmax(dim=1, dtype=precise)


class BalanceTerm(Term):
    r""":math:`M \sum_m \bar u_{c,m}\,\bar r_m`, with the use :math:`\bar u` constant; 1 where the use is even.

    Args:
        weight: factor of the term.
        use: (C, M), how much each domain has served each class; rows sum to 1.
    """

    use: Tensor

    def __init__(self, weight: float, use: Tensor) -> None:
        super().__init__(weight)
        self.register_buffer("use", use.to(torch.get_default_dtype()), persistent=False)
        self.sums = torch.zeros(use.shape, dtype=torch.float64)
        """The shares, summed by class over all samples so far."""

    def value(self, step: Step) -> Tensor:
        """Return the mean over the batch."""
        num_domains = self.use.shape[1]
        shares = domain_shares(step.logits, step.labels, num_domains)
        self.sums.index_add_(0, step.labels.cpu(), shares.detach().cpu().double())
        return num_domains * (self.use[step.labels].to(shares.dtype) * shares).sum(dim=1).mean()

    def collect(self) -> Tensors:
        """Return the sums, divided by the number of samples."""
        return {"sums": self.sums / self.sums.sum().clamp_min(1.0)}


@dataclass(frozen=True)
class Balance(Regularizer):
    """Lowers the outputs of pseudo-domains that serve a class more than others do, over all clients.

    The server keeps a moving average of the use of every pseudo-domain by every class. A client alone has one
    pseudo-domain, so balance within a batch would undo the targets.
    """

    rate: float = 0.5
    """Share of a round's use in the moving average, in (0, 1]; a class that no client of the round has stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.rate <= 1, "--regularizers.rate", "above 0 and at most 1", self.rate)

    def init(self, num_domains: int, num_classes: int, num_features: int) -> Tensors:
        """Begin with even use, for which the term is constant."""
        return {"use": torch.full((num_classes, num_domains), 1 / num_domains, dtype=torch.float64)}

    def term(self, sent: Tensors) -> Term:
        """Return the term for one fit."""
        return BalanceTerm(self.weight, sent["use"])

    def upload_form(self, sent: Tensors, num_classes: int) -> Tensors:
        """C x M sums."""
        return {"sums": sent["use"]}

    def reason_unusable(self, sums: Tensors) -> str | None:
        """Shares are 0 or more and sum to 1 over all of a client's samples."""
        shares = sums["sums"]
        possible = bool((shares >= 0).all()) and abs(float(shares.sum()) - 1) <= SUM_TOLERANCE
        return None if possible else "its use of pseudo-domains does not sum to 1"

    def update(self, record: Tensors, answers: Sequence[ClientSums]) -> Tensors:
        """Move the average of every class that was trained on."""
        old = record["use"]
        sums = torch.zeros_like(old)
        for answer in answers:
            sums += answer.num_examples * answer.sums["sums"]
        total = sums.sum(dim=1, keepdim=True)
        return {"use": torch.where(total > 0, torch.lerp(old, sums / total.clamp_min(1e-300), self.rate), old)}
