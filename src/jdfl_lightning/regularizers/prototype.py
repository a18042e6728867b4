"""Prototype: features of a class shall be alike in all pseudo-domains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from jdfl_lightning.core.messages import UNKNOWN
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import JointHead
from jdfl_lightning.models.features import class_features, reason_impossible
from jdfl_lightning.regularizers.base import Regularizer, Step, Term
from jdfl_lightning.supervision.base import ClientSums, RoundInfo


def prototype_distance(features: Tensor, means: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    r"""Return :math:`\|\hat z - \bar P_y\|^2`, the mean over the samples whose class was seen; 0 if there is none.

    Args:
        features: (B, F), normalised here.
        means: prototypes (C, F).
        seen: whether a class has a prototype (C,).
        labels: class labels (B,).

    >>> prototype_distance(torch.tensor([[0.0, 2.0]]), torch.eye(2), torch.tensor([True, True]), torch.tensor([0]))
    tensor(2.)
    """
    known = seen[labels]
    if not known.any():
        return features.new_zeros(())
    # at least in single precision: in half precision the guard against a zero norm would underflow
    precise = torch.promote_types(features.dtype, torch.float32)
    units = normalize(features[known].to(precise), dim=1)
    return (units - means[labels[known]].to(precise)).square().sum(dim=1).mean()


class PrototypeTerm(Term):
    """The mean squared distance of a batch's features to their classes' prototypes.

    Args:
        weight: factor of the term.
        means: prototypes (C, F); none if there is a single pseudo-domain, and the term is 0.
        seen: whether a class has a prototype (C,).
    """

    means: Tensor | None
    seen: Tensor | None

    def __init__(self, weight: float, means: Tensor | None = None, seen: Tensor | None = None) -> None:
        super().__init__(weight)
        self.register_buffer("means", means, persistent=False)
        self.register_buffer("seen", seen, persistent=False)
        self._features: Tensors = {}

    def value(self, step: Step) -> Tensor:
        """Return the mean over the samples whose class was seen."""
        if self.means is None or self.seen is None:
            return step.features.new_zeros(())
        return prototype_distance(step.features, self.means, self.seen, step.labels)

    def finish(self, backbone: nn.Module, head: JointHead, batches: Iterable[Sequence[Tensor]]) -> None:
        """Sum the features of each class with the trained network."""
        if self.means is not None:
            self._features = class_features(backbone, head, batches)

    def collect(self) -> Tensors:
        """Return sums and counts, as FedProc's clients do."""
        return self._features


@dataclass(frozen=True)
class Prototype(Regularizer):
    """Draws a sample's normalised feature to the prototype of its class, the plain mean over the pseudo-domains.

    A pseudo-domain's own prototype is the mean feature of its samples in the last round in which it had some. With a
    single pseudo-domain there is nothing to draw together: the term is 0 and nothing is sent.
    """

    def init(self, num_domains: int, num_classes: int, num_features: int) -> Tensors:
        """Begin without prototypes."""
        if num_domains == 1:
            return {}
        means = torch.zeros(num_domains, num_classes, num_features, dtype=torch.float64)
        return {"means": means, "seen": torch.zeros(num_domains, num_classes, dtype=torch.bool)}

    def broadcast(self, record: Tensors, info: RoundInfo) -> Tensors:
        """Send the mean over the pseudo-domains that have seen a class (C, F), and which classes were seen."""
        if not record:
            return {}
        seen = record["seen"]
        means = record["means"].sum(dim=0) / seen.sum(dim=0).clamp_min(1).unsqueeze(1)
        return {"means": means.to(torch.get_default_dtype()), "seen": seen.any(dim=0)}

    def term(self, sent: Tensors) -> Term:
        """Return the term for one fit."""
        return PrototypeTerm(self.weight, sent.get("means"), sent.get("seen"))

    def upload_form(self, sent: Tensors, num_classes: int) -> Tensors:
        """Sums of normalised features and numbers of samples, for each class."""
        if not sent:
            return {}
        sums = sent["means"].to(torch.float64)
        return {"sums": sums, "counts": sums[:, 0]}

    def reason_unusable(self, sums: Tensors) -> str | None:
        """Features have norm 1."""
        return reason_impossible(sums)

    def update(self, record: Tensors, answers: Sequence[ClientSums]) -> Tensors:
        """Replace the prototypes of every pseudo-domain and class that the round's clients have.

        A client that reports more samples than the server knows of is scaled down to the known number.
        """
        if not record:
            return record
        sums, counts = torch.zeros_like(record["means"]), torch.zeros_like(record["means"][..., 0])
        for answer in answers:
            if answer.domain != UNKNOWN:
                share = min(1.0, answer.num_examples / max(float(answer.sums["counts"].sum()), 1.0))
                sums[answer.domain] += share * answer.sums["sums"]
                counts[answer.domain] += share * answer.sums["counts"]
        present = counts > 0
        means = sums / counts.masked_fill(~present, 1.0).unsqueeze(2)
        return {
            "means": torch.where(present.unsqueeze(2), means, record["means"]),
            "seen": record["seen"] | present,
        }
