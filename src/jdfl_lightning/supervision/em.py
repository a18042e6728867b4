"""EM: targets that follow the model's own responsibilities, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from jdfl_lightning.core.errors import require
from jdfl_lightning.core.messages import UNKNOWN
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import TargetRule, of_class
from jdfl_lightning.joint.targets import Matrix
from jdfl_lightning.supervision.base import SUM_TOLERANCE, ClientSums, RoundInfo, known_rows
from jdfl_lightning.supervision.graded import Graded
from jdfl_lightning.supervision.uniform import Uniform


def responsibilities(prior: Tensor, logits: Tensor, labels: Tensor, beta: float = 1.0) -> Tensor:
    r"""Return :math:`r_m = \mathrm{softmax}_m(\log \pi_m + \beta\,\ell_{m,c})` for samples of class c.

    Args:
        prior: :math:`\pi`, weights over domains (B, M).
        logits: joint logits (B, M*C).
        labels: class labels (B,).
        beta: how much the logits count; with 0 the prior is returned.

    Returns:
        Weights over domains (B, M), at least in single precision. A domain without prior mass gets none.

    >>> logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])  # two domains, two classes
    >>> responsibilities(torch.tensor([[0.5, 0.5]]), logits, torch.tensor([0]))
    tensor([[0.7311, 0.2689]])
    >>> responsibilities(torch.tensor([[0.0, 1.0]]), logits, torch.tensor([0]))
    tensor([[0., 1.]])
    """
    prior = prior.to(torch.promote_types(torch.promote_types(logits.dtype, prior.dtype), torch.float32))
    if beta == 0:
        return prior  # the softmax of its logarithm is the same only up to rounding
    own = of_class(logits, labels, prior.shape[1]).to(prior.dtype).masked_fill(prior == 0, -torch.inf)
    lead = own - own.amax(dim=1, keepdim=True)  # relative to the largest: nothing overflows at a large beta
    return (prior.log() + beta * lead).softmax(dim=1)


class EMTargets(TargetRule):
    r"""Targets :math:`(1-\lambda)\,\pi_d + \lambda\,r`, with r the model's responsibilities for the sample.

    Args:
        table: :math:`\pi` (M, M); row d is for samples of domain d.
        lam: :math:`\lambda`, share of the responsibilities, in [0, 1].
        beta: how much the logits count in them, 0 or more.
        one: put all mass on one domain, drawn from these weights for each sample.

    >>> rule = EMTargets([[0.5, 0.5], [0.5, 0.5]], lam=0.5)
    >>> rule(torch.tensor([0]), logits=torch.tensor([[2.0, 0.0, 1.0, -1.0]]), labels=torch.tensor([0]))
    tensor([[0.6155, 0.3845]])
    """

    looks_at_outputs: ClassVar[bool] = True

    def __init__(self, table: Matrix, lam: float = 0.5, beta: float = 1.0, one: bool = False) -> None:
        super().__init__(table)
        self.lam, self.beta, self.one = lam, beta, one
        self.mass = torch.zeros(self.num_domains, dtype=torch.float64)
        """The responsibilities, summed over all samples so far."""
        self.count = 0

    def forward(
        self,
        domains: Tensor,
        generator: torch.Generator | None = None,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return weights over domains (B, M); `logits` and `labels` are needed."""
        weights = super().forward(domains, generator, logits, labels)
        if not self.one:
            return weights
        drawn = torch.multinomial(weights.cpu(), 1, generator=generator).squeeze(1)
        return one_hot(drawn, self.num_domains).to(weights)

    def weigh(self, rows: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (B, M) and the responsibilities (B, M)."""
        found = responsibilities(rows, logits, labels, self.beta)
        return torch.lerp(rows.to(found.dtype), found, self.lam), found  # exact where lam is 0 or 1, or both are equal

    def learn(self, found: Tensor, labels: Tensor) -> None:
        """Sum up the responsibilities."""
        self.mass += found.sum(dim=0).cpu()
        self.count += len(found)

    @property
    def can_be_shared(self) -> bool:
        """Whether many clients' samples are weighed at once: not if a domain is drawn from each one's weights."""
        return type(self).forward is EMTargets.forward and not self.one


@dataclass(frozen=True)
class EM(Graded):
    """Targets between a fixed table and the model's own responsibilities, as in expectation maximisation.

    A sample's target is (1 - lam_t) pi_d + lam_t r with r_m = softmax_m(log pi_dm + beta l_mc) and lam_t = lam min(1,
    (t - 1) / (warmup T)). With kappa the server learns pi: pi_d <- (kappa T0_d + sum n_i rbar_i) / (kappa + sum n_i)
    over the round's clients of pseudo-domain d, with rbar_i the mean r of client i and T0 the table that it extends.
    """

    extends: Literal["graded", "uniform"] = "graded"
    """The mode that it extends, whose table is pi: graded, with alpha and tau, or uniform."""
    beta: float = 1.0
    """How much the model's logits count in the responsibilities, 0 or more."""
    lam: float = 0.5
    """Share of the responsibilities in the target after the warm-up, in [0, 1]; with 0 it is the mode that it
    extends."""
    warmup: float = 0.2
    """w, share of the rounds over which lam_t rises from 0 to lam, in [0, 1]."""
    kappa: float | None = None
    """How many images the table T0 counts for when the server learns pi, above 0; null for infinitely many: pi is
    fixed and clients send nothing."""
    draw: bool = False
    """Put all mass on one pseudo-domain, drawn from the target for each sample and epoch."""

    short: ClassVar[str] = "em"
    colour: ClassVar[str] = "#d55e00"

    def __post_init__(self) -> None:
        if self.kappa == math.inf:
            object.__setattr__(self, "kappa", None)
        super().__post_init__()
        require(0 <= self.beta < math.inf, "--supervision.beta", "0 or more, and finite", self.beta)
        require(0 <= self.lam <= 1, "--supervision.lam", "between 0 and 1", self.lam)
        require(0 <= self.warmup <= 1, "--supervision.warmup", "between 0 and 1", self.warmup)
        require(self.kappa is None or self.kappa > 0, "--supervision.kappa", "positive", self.kappa)

    @property
    def has_schedule(self) -> bool:
        """Whether lam_t depends on the number of rounds."""
        return self.lam > 0 and self.warmup > 0

    def table(self, centroids: Tensor) -> Tensor:
        """Return T0, the table of the mode that it extends."""
        return super().table(centroids) if self.extends == "graded" else Uniform().table(centroids)

    def strength(self, number: int, rounds: int) -> float:
        """Return lam_t of a round: 0 in the first, rising to lam.

        >>> EM(lam=0.5, warmup=0.4).strength(3, rounds=10)
        0.25
        """
        return self.lam * (min(1.0, (number - 1) / (self.warmup * rounds)) if self.warmup else 1.0)

    def init(self, centroids: Tensor, num_classes: int) -> Tensors:
        """Begin with T0; without kappa, or with lam 0, nothing is learned."""
        if self.kappa is None or self.lam == 0:
            return {}
        start = self.table(centroids).double()
        return {"table": start, "start": start.clone()}

    def broadcast(self, record: Tensors, info: RoundInfo) -> Tensors:
        """Send pi and lam_t; pi is T0 of the centroids as they are now, unless it is learned."""
        table = record["table"].to(torch.get_default_dtype()) if record else self.table(info.centroids)
        lam = torch.tensor([self.strength(info.number, info.rounds)], dtype=torch.float64)
        return {"table": table, "lam": lam}

    def rule(self, sent: Tensors, domain: int) -> TargetRule:
        """Return the targets of a fit; without a known pseudo-domain the prior is even."""
        return EMTargets(known_rows(sent["table"], domain), float(sent["lam"]), self.beta, self.draw)

    def collect(self, rule: TargetRule) -> Tensors:
        """Send the sum of the responsibilities and the number of samples, if the server learns from them."""
        if self.kappa is None or self.lam == 0 or not isinstance(rule, EMTargets):
            return {}
        return {"mass": rule.mass, "count": torch.tensor([rule.count], dtype=torch.float64)}

    def upload_form(self, sent: Tensors, num_classes: int) -> Tensors:
        """M sums and a count."""
        if self.kappa is None or self.lam == 0:
            return {}
        mass = sent["table"].new_empty(sent["table"].shape[0], dtype=torch.float64)
        return {"mass": mass, "count": mass[:1]}

    def reason_unusable(self, sums: Tensors) -> str | None:
        """The responsibilities of a sample are 0 or more and sum to 1."""
        mass, count = sums["mass"], float(sums["count"])
        possible = count > 0 and bool((mass >= 0).all()) and abs(float(mass.sum()) - count) <= SUM_TOLERANCE * count
        return None if possible else "its sums of responsibilities are not those of as many samples as it counts"

    def update(self, record: Tensors, answers: Sequence[ClientSums]) -> Tensors:
        """Mix T0 with the round's mean responsibilities; a row without participants is T0's again."""
        if not record:
            return record
        assert self.kappa is not None
        start = record["start"]
        mass, count = torch.zeros_like(start), torch.zeros_like(start[:, :1])
        for answer in answers:
            if answer.domain != UNKNOWN:
                mass[answer.domain] += answer.num_examples * answer.sums["mass"] / answer.sums["count"]
                count[answer.domain] += answer.num_examples
        return {"table": (self.kappa * start + mass) / (self.kappa + count), "start": start}
