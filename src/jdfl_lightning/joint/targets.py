"""Target rules: how a sample's target mass is distributed over the M pseudo-domains of its class.

Every rule is a table of M x M weights and a way to choose a row of it: the sample's own domain (graded, hard) or a
domain drawn anew for each sample (random). A rule therefore gives weights over domains (B, M), and the loss never
has to build a dense target of M x C entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from jdfl_lightning.core.errors import InputError

Matrix = Tensor | Sequence[Sequence[float]]
"""Rows of numbers; as lists they can be written in a YAML file."""


def _check_range(name: str, value: float, low: float, high: float, low_open: bool = False) -> None:
    if not (low < value if low_open else low <= value) or not value <= high:
        interval = f"{'(' if low_open else '['}{low}, {high}]"
        raise InputError(f"Expected argument `{name}` to be in {interval} but got {value}.")


def _check_count(num_domains: int) -> None:
    if num_domains < 1:
        raise InputError(f"Expected argument `num_domains` to be at least 1 but got {num_domains}.")


def _check_rows(table: Tensor) -> None:
    """Raise an `InputError` that names the first row that is not a distribution, up to rounding."""
    rounding = torch.finfo(table.dtype).eps if table.is_floating_point() else 0.0
    exact = table.double()
    sound = (exact >= 0).all(dim=1) & ((exact.sum(dim=1) - 1).abs() <= 1e-4 + table.shape[1] * rounding)
    if not sound.all():
        number = int(sound.logical_not().nonzero()[0])
        row = exact[number]
        raise InputError(
            f"Expected every row of argument `table` to be 0 or more and to sum to 1 but row {number} sums to "
            f"{float(row.sum()):.6g} and its smallest entry is {float(row.min()):.6g}."
        )


class TargetRule(nn.Module):
    """A table of weights over domains, and the choice of its row.

    Args:
        table: (M, M); row d is the distribution over domains for a sample of domain d. Rows sum to 1. Or (C, M, M), a
            table for each class.
        draw: choose a row at random for each sample instead of the sample's own domain.

    >>> TargetRule(torch.eye(2))(torch.tensor([1, 0, 1]))
    tensor([[0., 1.],
            [1., 0.],
            [0., 1.]])
    """

    table: Tensor
    looks_at_outputs: ClassVar[bool] = False
    """Whether the targets, or what is learned with them, depend on the model's output: then there are `weigh` and
    `learn`."""

    def __init__(self, table: Matrix, draw: bool = False) -> None:
        super().__init__()
        table = torch.as_tensor(table)
        if table.ndim not in (2, 3) or table.shape[-2] != table.shape[-1] or table.numel() < 1:
            raise InputError(f"Expected argument `table` to be square but got shape {tuple(table.shape)}.")
        _check_rows(table.flatten(0, -2))
        self.register_buffer("table", table.to(torch.get_default_dtype()))
        self.draw = draw

    @property
    def num_domains(self) -> int:
        """M."""
        return self.table.shape[-1]

    @property
    def needs_domains(self) -> bool:
        """Whether the targets depend on a sample's domain."""
        return self.num_domains > 1 and not self.draw

    def forward(
        self,
        domains: Tensor,
        generator: torch.Generator | None = None,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return weights over domains (B, M) for samples of the given domains (B,).

        Args:
            domains: the pseudo-domain of each sample, 0-based.
            generator: CPU generator of the drawn rows; torch's global one if not given.
            logits: joint logits (B, M*C) without gradient, for rules that depend on the model's output.
            labels: class labels (B,), for rules that depend on them.
        """
        if not self.looks_at_outputs:
            return self.rows(domains, generator, labels)
        if logits is None or labels is None:
            raise ValueError("Expected arguments `logits` and `labels`, on which the targets depend, but got None.")
        weights, found = self.weigh(self.rows(domains, generator, labels), logits.detach(), labels)
        self.learn(found, labels)
        return weights

    def rows(self, domains: Tensor, generator: torch.Generator | None = None, labels: Tensor | None = None) -> Tensor:
        """Return the rows of the table (B, M) for samples of the given domains; the arguments are those of a call."""
        if self.draw:
            drawn = torch.randint(self.num_domains, domains.shape, generator=generator)
            domains = drawn.to(self.table.device)
        if self.table.ndim == 2:
            return self.table[domains]
        if labels is None:
            raise ValueError("Expected argument `labels`, as the table differs between classes, but got None.")
        return self.table[labels, domains]

    def weigh(self, rows: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights over domains (B, M) from the samples' rows, and what is learned from each sample (B, ...).

        It depends on nothing else that differs between the clients of a round, so that it may get the samples of many.
        """
        raise NotImplementedError

    def learn(self, found: Tensor, labels: Tensor) -> None:
        """Add up what `weigh` found in some samples of this client."""
        raise NotImplementedError

    @property
    def can_be_shared(self) -> bool:
        """Whether a call takes rows of the table, as this class does, and then is `weigh` and `learn` and no more.

        Then many clients are served at once.
        """
        return type(self).forward is TargetRule.forward and type(self).rows is TargetRule.rows


class PlainTargets(TargetRule):
    """The baseline: one domain, ordinary class labels.

    >>> PlainTargets()(torch.tensor([0, 0]))
    tensor([[1.],
            [1.]])
    """

    def __init__(self) -> None:
        super().__init__(torch.ones(1, 1))

    def forward(
        self,
        domains: Tensor,
        generator: torch.Generator | None = None,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return ones (B, 1): with a single output for each class the domain does not matter."""
        return self.table.expand(domains.shape[0], 1)


class HardTargets(TargetRule):
    """All mass on the sample's own domain: the paper's expanded-head ablation.

    Args:
        num_domains: M.
    """

    def __init__(self, num_domains: int) -> None:
        _check_count(num_domains)
        super().__init__(torch.eye(num_domains))


class RandomTargets(TargetRule):
    r"""Mass :math:`\phi` on a domain drawn for each sample and epoch, :math:`(1-\phi)/(M-1)` on each other one.

    Args:
        num_domains: M.
        phi: mass on the drawn domain, in [0, 1].

    >>> RandomTargets(num_domains=3, phi=0.5).table
    tensor([[0.5000, 0.2500, 0.2500],
            [0.2500, 0.5000, 0.2500],
            [0.2500, 0.2500, 0.5000]])
    """

    def __init__(self, num_domains: int, phi: float = 1.0) -> None:
        _check_count(num_domains)
        _check_range("phi", phi, 0, 1)
        table = torch.ones(1, 1)
        if num_domains > 1:
            table = torch.full((num_domains, num_domains), (1 - phi) / (num_domains - 1)).fill_diagonal_(phi)
        super().__init__(table, draw=True)


def default_alpha(num_domains: int) -> float:
    """Return the paper's main probability: 0.55 for up to 5 pseudo-domains, 0.45 for more."""
    return 0.55 if num_domains <= 5 else 0.45


def graded_table(similarities: Tensor, alpha: float, tau: float) -> Tensor:
    r"""Turn similarities of domains (M, M) into graded weights (M, M).

    Row d has :math:`\alpha` on d and :math:`(1-\alpha)\,\mathrm{softmax}_{d' \neq d}(s_{d,d'}/\tau)` elsewhere;
    a single domain gets everything.

    >>> graded_table(torch.tensor([[1.0, 0.9], [0.9, 1.0]]), alpha=0.7, tau=0.1)
    tensor([[0.7000, 0.3000],
            [0.3000, 0.7000]])
    """
    _check_range("alpha", alpha, 0, 1, low_open=True)
    if similarities.shape[0] == 1:
        return torch.ones(1, 1)
    return with_own(transfer_weights(similarities, tau), alpha)


def transfer_weights(similarities: Tensor, tau: float) -> Tensor:
    r"""Return :math:`\mathrm{softmax}_{d' \neq d}(s_{d,d'}/\tau)` for every domain d of at least two, as (M, M).

    >>> transfer_weights(torch.tensor([[1.0, 0.9], [0.9, 1.0]]), tau=0.1)
    tensor([[0., 1.],
            [1., 0.]], dtype=torch.float64)
    """
    _check_range("tau", tau, 0, float("inf"), low_open=True)
    own = torch.eye(similarities.shape[0], dtype=torch.bool)
    # in double precision and relative to the largest: at a small tau nothing overflows, and the rows sum to 1
    others = similarities.double().masked_fill(own, -torch.inf)
    return ((others - others.amax(dim=1, keepdim=True)) / tau).softmax(dim=1)


def with_own(weights: Tensor, alpha: float) -> Tensor:
    r"""Return target weights (..., M, M): :math:`\alpha` on the own domain, the rest shared by the transfer weights."""
    own = torch.eye(weights.shape[-1], dtype=torch.bool)
    return ((1 - alpha) * weights).masked_fill(own, alpha).to(torch.get_default_dtype())


def cosine_similarities(centroids: Tensor) -> Tensor:
    """Return the cosine similarity of every pair of centroids (M, D) as (M, M); a zero centroid is similar to none."""
    exact = centroids.double()
    lengths = exact.norm(dim=1, keepdim=True)
    unit = exact / lengths.masked_fill(lengths == 0, 1.0)
    similarities: Tensor = unit @ unit.T
    return similarities


class GradedTargets(TargetRule):
    r"""Mass :math:`\alpha` on the sample's own domain, the rest shared with similar domains (graded invariance).

    Args:
        centroids: (M, D), the centroids of the pseudo-domains.
        alpha: mass on the own domain, in (0, 1]; the paper's 0.55 (M <= 5) or 0.45 if not given.
        tau: temperature of the softmax over cosine similarities, above 0.

    >>> GradedTargets(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]), tau=1.0).table
    tensor([[0.5500, 0.2250, 0.2250],
            [0.1210, 0.5500, 0.3290],
            [0.1210, 0.3290, 0.5500]])
    """

    def __init__(self, centroids: Matrix, alpha: float | None = None, tau: float = 0.1) -> None:
        centroids = torch.as_tensor(centroids)
        if centroids.ndim != 2:
            raise ValueError(f"Expected argument `centroids` to have shape (M, D) but got {tuple(centroids.shape)}.")
        alpha = default_alpha(centroids.shape[0]) if alpha is None else alpha
        super().__init__(graded_table(cosine_similarities(centroids), alpha, tau))


def dense_targets(weights: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return the full target (B, M*C) of weights over domains (B, M) and class labels (B,).

    >>> dense_targets(torch.tensor([[0.7, 0.3]]), torch.tensor([0]), num_classes=2)
    tensor([[0.7000, 0.0000, 0.3000, 0.0000]])
    """
    return (weights.unsqueeze(2) * one_hot(labels, num_classes).unsqueeze(1)).flatten(1)
