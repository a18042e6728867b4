"""The messages between server and client: named tensors and plain numbers, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jdfl_lightning.core.tensors import Record, Tensors, num_bytes

DISCOVERY_ROUND = 0
"""The round of Phase 1; training rounds count from 1."""

SUPERVISION = "supervision"
"""Group of the supervision's tensors in `learned`."""

UNKNOWN = -1
"""The pseudo-domain of a client that has none yet."""

PRIVATE = "private"
"""Group of a client's state with the tensors that it keeps and never sends."""


@dataclass(frozen=True)
class RoundContext:
    """A round's context: what the server side of an algorithm knows besides its record."""

    number: int
    """1 to T."""
    num_clients: int
    """N, participants or not."""
    asked: int
    """Number of clients that were asked in the round, whether they answer or not."""
    seed: int = 0
    """Seed of the whole run; it is public."""
    attempt: int = 0
    """Number of the attempt at this round, from 0."""
    domains: Mapping[int, int] = field(default_factory=dict)
    """The pseudo-domains of the round's clients, `UNKNOWN` for a client without one; empty without Phase 1."""


@dataclass(frozen=True)
class FitTask:
    """The server's request: train from these weights and report."""

    client: int
    """Id of the client, counted from 0."""
    round: int
    """1 to T; `DISCOVERY_ROUND` in Phase 1."""
    seed: int
    """Seed of the whole run; the client derives its own from (seed, round, client)."""
    weights: Tensors
    """Trainable parameters, theta."""
    buffers: Tensors = field(default_factory=dict)
    """The network's other tensors: BatchNorm's statistics, frozen parameters."""
    server: Record = field(default_factory=dict)
    """The algorithm's broadcast."""
    rounds: int = 1
    """T, for algorithms with a schedule."""
    weight: float = 1.0
    """w_i = N n_i / sum(n), or 1 with uniform weighting and in a private run."""
    domain: int = 0
    """The client's pseudo-domain z_i, or `UNKNOWN`."""
    since: int = 0
    """The last round whose state of this client the server accepted; 0 if there is none."""
    attempt: int = 0
    """Number of the attempt, from 0; a new attempt uses new random numbers."""
    every_epoch: bool = False
    """In Phase 1, send the update after every epoch, not only the final vector."""
    learned: Record = field(default_factory=dict)
    """What the supervision and the regularizers send to clients, such as the table of weights over pseudo-domains."""
    personal: bool = False
    """Evaluate the client's own model instead of training."""

    @property
    def where(self) -> tuple[int, ...]:
        """What its randomness depends on besides the seed: round, client and, if it is not the first, the attempt."""
        return (self.round, self.client, *[self.attempt] * (self.attempt > 0))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in this message."""
        parts = {"weights": self.weights, "buffers": self.buffers}
        return sum(num_bytes(record) for record in (parts, self.server, self.learned))


@dataclass(frozen=True)
class FitResult:
    """The client's answer."""

    client: int
    """Id of the client."""
    num_examples: int
    """n_i, images the client trained on."""
    num_steps: int
    """K, optimizer steps really taken."""
    weight: float = 1.0
    """w_i of the task."""
    weights: Tensors = field(default_factory=dict)
    """Trainable parameters after the fit, theta_i; empty in Phase 1."""
    buffers: Tensors = field(default_factory=dict)
    """Buffers after the fit."""
    upload: Record = field(default_factory=dict)
    """What the algorithm sends besides the weights."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Plain numbers to log, such as the mean training loss."""
    keeps_state: bool = False
    """Whether the client keeps a state for its next participation."""
    note: str = ""
    """A note to show to the user."""
    learned: Record = field(default_factory=dict)
    """What the supervision and the regularizers send."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in this message."""
        parts = {"weights": self.weights, "buffers": self.buffers}
        return sum(num_bytes(record) for record in (parts, self.upload, self.learned))


@dataclass(frozen=True)
class FitFailure:
    """Takes the place of the answer of a client that failed."""

    client: int
    """Id of the client."""
    reason: str
    """What happened."""
