"""Online: graded targets whose transfer weights are learned for each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from jdfl_lightning.core.errors import require
from jdfl_lightning.core.messages import UNKNOWN
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import (
    TargetRule,
    cosine_similarities,
    default_alpha,
    of_class,
    predict_class,
    transfer_weights,
    with_own,
)
from jdfl_lightning.supervision.base import SUM_TOLERANCE, ClientSums, RoundInfo, known_rows
from jdfl_lightning.supervision.graded import Graded


class OnlineTargets(TargetRule):
    """A table for each class, which sums the joint probabilities of the samples that the model classifies correctly.

    Args:
        table: target weights (C, M, M); for class c, row d is for samples of domain d.
    """

    looks_at_outputs: ClassVar[bool] = True

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        self.sums = torch.zeros(table.shape[0], table.shape[2], dtype=torch.float64)
        """For each class, p(m, c|x) summed over its correctly classified samples (C, M)."""
        self.counts = torch.zeros(table.shape[0], dtype=torch.float64)
        """Their numbers (C,)."""
        self.seen = 0
        """Number of all samples so far."""

    def weigh(self, rows: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows, and p(m, c|x) with a 1 (B, M + 1) where the class is right, else zeros."""
        p = logits.softmax(dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))
        own = of_class(p, labels, self.num_domains)
        right = predict_class(logits, len(self.counts)) == labels
        return rows, torch.cat([own, torch.ones_like(own[:, :1])], dim=1).masked_fill(~right.unsqueeze(1), 0.0)

    def learn(self, found: Tensor, labels: Tensor) -> None:
        """Sum up the probabilities and count the right ones, by class."""
        classes, exact = labels.cpu(), found.cpu().double()
        self.sums.index_add_(0, classes, exact[:, :-1])
        self.counts.index_add_(0, classes, exact[:, -1])
        self.seen += len(labels)


@dataclass(frozen=True)
class Online(Graded):
    """Mass alpha on the own pseudo-domain d, the rest by weights w_dc that are learned for each class c.

    They begin as graded's. After a round, w_dcm <- (1 - rho) w_dcm + rho s_dcm: s_dcm is the sum of the joint
    probability p(m, c|x) over the samples of d and c that the round's clients classified correctly while they trained,
    normalised over m != d; without such a sample they stay.
    """

    rho: float = 0.5
    """Share of a round's probabilities in the new weights, in [0, 1]; with 0 the targets are graded's."""

    short: ClassVar[str] = "online"
    colour: ClassVar[str] = "#56b4e9"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.rho <= 1, "--supervision.rho", "between 0 and 1", self.rho)

    def init(self, centroids: Tensor, num_classes: int) -> Tensors:
        """Begin with graded's weights for every class; with rho 0 or a single pseudo-domain nothing is learned."""
        if self.rho == 0 or len(centroids) == 1:
            return {}
        start = transfer_weights(cosine_similarities(centroids), self.tau)
        return {"table": start.repeat(num_classes, 1, 1), "start": start}

    def broadcast(self, record: Tensors, info: RoundInfo) -> Tensors:
        """Send the targets of every class, or graded's table if nothing is learned."""
        if not record:
            return super().broadcast(record, info)
        alpha = default_alpha(len(info.centroids)) if self.alpha is None else self.alpha
        return {"table": with_own(record["table"], alpha)}

    def rule(self, sent: Tensors, domain: int) -> TargetRule:
        """Return the targets of a fit; without a known pseudo-domain they are even."""
        table = sent["table"]
        return super().rule(sent, domain) if table.ndim == 2 else OnlineTargets(known_rows(table, domain))

    def collect(self, rule: TargetRule) -> Tensors:
        """Send sums and counts, each divided by the number of samples seen: how many epochs there were is no matter."""
        if not isinstance(rule, OnlineTargets):
            return {}
        return {"sums": rule.sums / max(rule.seen, 1), "counts": rule.counts / max(rule.seen, 1)}

    def upload_form(self, sent: Tensors, num_classes: int) -> Tensors:
        """C x M sums and C counts."""
        table = sent["table"]
        if table.ndim == 2:
            return {}
        sums = table.new_empty(num_classes, table.shape[2], dtype=torch.float64)
        return {"sums": sums, "counts": sums[:, 0]}

    def reason_unusable(self, sums: Tensors) -> str | None:
        """Probabilities are 0 or more, those of a sample sum to at most 1, and the counts are shares of all samples."""
        total, counts = sums["sums"].sum(dim=1), sums["counts"]
        possible = (sums["sums"] >= 0).all() and (total <= counts * (1 + SUM_TOLERANCE)).all()
        if possible and float(counts.sum()) <= 1 + SUM_TOLERANCE:
            return None
        return "its sums of probabilities are not those of as many samples as it counts"

    def update(self, record: Tensors, answers: Sequence[ClientSums]) -> Tensors:
        """Move the weights of every pseudo-domain and class that has correctly classified samples."""
        if not record:
            return record
        old, start = record["table"], record["start"]
        sums = torch.zeros_like(old)
        for answer in answers:
            if answer.domain != UNKNOWN:
                sums[:, answer.domain] += answer.num_examples * answer.sums["sums"]
        sums.masked_fill_(torch.eye(old.shape[-1], dtype=torch.bool), 0.0)
        total = sums.sum(dim=2, keepdim=True)
        found = sums / total.masked_fill(total == 0, 1.0)
        return {"table": torch.where(total > 0, torch.lerp(old, found, self.rho), old), "start": start}
