"""The interface of a supervision: a server side and a client side, both stateless.

Hyper-parameters are in the object. Everything that is learned is in named tensors that are passed in and returned, so
that a run can be resumed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from jdfl_lightning.core.errors import require_types
from jdfl_lightning.core.messages import UNKNOWN
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.joint import TargetRule

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment

SUM_TOLERANCE = 1e-5
"""Tolerance for sums of probabilities that clients computed in single precision."""


@dataclass(frozen=True)
class RoundInfo:
    """What the server knows about a round when it prepares what clients are sent."""

    number: int
    """1 to T."""
    rounds: int
    """T."""
    centroids: Tensor
    """(M, D), the centroids of the pseudo-domains; newcomers may have moved them. (1, 0) without discovery."""


@dataclass(frozen=True)
class ClientSums:
    """What one client of a round sent for a learned part."""

    domain: int
    """The client's pseudo-domain, or `UNKNOWN`."""
    num_examples: int
    """n_i, its number of training images."""
    sums: Tensors


class Learned:
    """A part of the loss that may have a record at the server, learned from sums that clients send.

    By default there is nothing to learn: the record is empty, and clients send nothing.
    """

    @property
    def sends(self) -> bool:
        """Whether clients may send sums: whether the class declares any."""
        return type(self).upload_form is not Learned.upload_form

    def broadcast(self, record: Tensors, info: RoundInfo) -> Tensors:
        """Server: return what the round's clients are sent."""
        return record

    def upload_form(self, sent: Tensors, num_classes: int) -> Tensors:
        """Server: declare what a client sends back: names, shapes and types; an answer with anything else is refused.

        Args:
            sent: what clients were sent, as tensors without values (device ``meta``); the form may be such tensors too.
            num_classes: C.
        """
        return {}

    def reason_unusable(self, sums: Tensors) -> str | None:
        """Server: return why sums of the declared form and finite values are impossible; None if they are not."""
        return None

    def update(self, record: Tensors, answers: Sequence[ClientSums]) -> Tensors:
        """Server: return the record after a round, from what its clients sent, in the order of their ids."""
        return record

    def metrics(self, record: Tensors) -> dict[str, float]:
        """Server: return numbers to log after a round, by name."""
        return {}


@dataclass(frozen=True)
class Supervision(Learned, ABC):
    """How the target mass of a sample is distributed over the M pseudo-domains of its class."""

    short: ClassVar[str] = ""
    """Short name on the command line and in tables; the class's name if it has none."""
    colour: ClassVar[str] = ""
    """Colour in figures, such as ``#0072b2``; chosen by the figure if not given."""
    needs_discovery: ClassVar[bool] = True
    """Whether it has pseudo-domains; else the head has C outputs and there is no Phase 1."""
    needs_own_domain: ClassVar[bool] = True
    """Whether targets depend on the client's own pseudo-domain; else a newcomer needs none."""

    def __post_init__(self) -> None:
        require_types(self, "--supervision.")

    @property
    def name(self) -> str:
        """Short name, or the name of the class."""
        return self.short or type(self).__name__

    @property
    def has_schedule(self) -> bool:
        """Whether a round depends on the total number of rounds, so that a run cannot be extended."""
        return False

    def check_settings(self, experiment: Experiment) -> None:
        """Raise an `InputError` if a run's settings do not work with this supervision; called when they are made."""

    def init(self, centroids: Tensor, num_classes: int) -> Tensors:
        """Server: return the record before the first round.

        With ``table`` and ``start``, what the server learns and what it began with, (..., M, M), `metrics` logs how
        the table changes and the run draws it.

        Args:
            centroids: (M, D), the centroids of the pseudo-domains.
            num_classes: C.
        """
        return {}

    @abstractmethod
    def table(self, centroids: Tensor) -> Tensor:
        """Server: return weights over pseudo-domains (M, M); row d is for samples of pseudo-domain d and sums to 1.

        Args:
            centroids: (M, D), the centroids of the pseudo-domains.
        """

    def broadcast(self, record: Tensors, info: RoundInfo) -> Tensors:
        """Server: return what the round's clients are sent: the table."""
        return {"table": self.table(info.centroids)}

    def rule(self, sent: Tensors, domain: int) -> TargetRule:
        """Client: return the target rule of a fit; without a known pseudo-domain the mass is spread evenly over all.

        Args:
            sent: what the server sent.
            domain: the client's pseudo-domain, or `UNKNOWN`.
        """
        table = sent["table"]
        return TargetRule(known_rows(table, domain))

    def collect(self, rule: TargetRule) -> Tensors:
        """Client: return what is sent to the server after a fit, as declared by `upload_form`."""
        return {}

    def metrics(self, record: Tensors) -> dict[str, float]:
        """Server: return entropy and movement of the rows of a learned table, in the mean and of the lowest row.

        The entropy is in nats. A row has moved by the mass that is elsewhere than at the start, from 0 to 1.
        """
        if not {"table", "start"} <= set(record):
            return {}
        table, start = record["table"].double(), record["start"].double()
        entropies = torch.special.entr(table).sum(dim=-1)
        moved = (table - start).abs().sum(dim=-1) / 2
        return {
            "targets/entropy": float(entropies.mean()),
            "targets/entropy_lowest": float(entropies.min()),
            "targets/moved": float(moved.mean()),
        }


def known_rows(table: Tensor, domain: int) -> Tensor:
    """Return the table for a client's pseudo-domain; even weights if it is `UNKNOWN`."""
    return torch.full_like(table, 1 / table.shape[-1]) if domain == UNKNOWN else table
