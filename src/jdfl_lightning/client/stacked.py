"""The clients of a stack, their batches, their losses and their corrections of gradients."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from jdfl_lightning.algorithms import LocalUpdate
from jdfl_lightning.client.fit import LocalFit
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.data.loader import BatchLoader
from jdfl_lightning.joint.loss import soft_target_kl
from jdfl_lightning.regularizers import Step


@dataclass
class StackedClient:
    """A client of the stack; it stands in for Trainer and module where an algorithm's hooks expect them."""

    fit: LocalFit
    params: Tensors
    """Views of its part of the stack, with gradients that are views too."""
    module: JointModule
    accumulate_grad_batches: int = 1
    optimizers: tuple[()] = ()

    @property
    def train_dataloader(self) -> BatchLoader:
        """The client's batches."""
        return self.fit.loader

    @cached_property
    def backbone(self) -> nn.Module:
        """The network below the head, as it was before the fit; a hook on it is not called."""
        own = copy.copy(self.module.backbone)
        if self.module.private:
            own = copy.deepcopy(own)
            tensors = {**self.fit.weights, **self.fit.buffers}
            below = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}
            own.load_state_dict({name: below[name] for name in own.state_dict()})
        own._forward_pre_hooks = OrderedDict()
        return own

    @property
    def private(self) -> frozenset[str]:
        """Names of what the client keeps."""
        return self.module.private

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the client's own parameters."""
        yield from self.params.items()

    def has(self, hook: str, beyond: type[pl.Callback] = pl.Callback) -> bool:
        """Return whether the algorithm has a hook of its own, other than that of a base class."""
        return getattr(type(self.fit.update), hook) is not getattr(beyond, hook)

    def hook(self, name: str, *details: Any, module: pl.LightningModule | None = None) -> None:
        """Call a hook of the algorithm."""
        getattr(self.fit.update, name)(cast(Any, self), cast(Any, module or self), *details)


class BatchPlan:
    """Which images are in which batch of a stack's fits, drawn before the first step.

    All batches get the same length: shorter ones are filled up with an image of the client's own.

    Args:
        fits: the clients' fits, those with the most steps first.
    """

    def __init__(self, fits: Sequence[LocalFit]) -> None:
        self.loaders = [fit.loader for fit in fits]
        sizes = pad_sequence([torch.tensor(fit.loader.sizes() * fit.epochs) for fit in fits], batch_first=True)
        self._present = torch.arange(int(sizes.max())) < sizes.unsqueeze(2)  # (K, steps, B)
        self.present = self._present.transpose(0, 1)
        """Whether a place holds a sample (steps, K, B)."""
        self.sizes = sizes.T.contiguous()
        """The samples in each batch (steps, K); 0 after a client's last."""
        passes = [torch.cat([fit.loader.shuffled() for _ in range(fit.epochs)]) for fit in fits]
        self.places = self.spread(passes)
        """Which of the N images (steps, K, B)."""

    def spread(self, values: Sequence[Tensor]) -> Tensor:
        """Put each client's values, one for each sample in the order of its steps, into their places (steps, K, B)."""
        spread = torch.stack([own[0] for own in values]).view(-1, 1, 1).expand(self._present.shape).clone()
        spread[self._present] = torch.cat(list(values))
        return spread.transpose(0, 1).contiguous()

    def take(self, step: int, clients: Sequence[StackedClient]) -> StackedBatches:
        """Return the batches of a step, of the clients that still train."""
        places, sizes = self.places[step, : len(clients)], self.sizes[step, : len(clients)]
        if type(self.loaders[0]) is BatchLoader:  # all at once: loaders differ only in their order
            inputs, labels, _ = self.loaders[0].take(places.flatten())
            inputs, labels = inputs.unflatten(0, places.shape), labels.view(places.shape)
        else:
            each = [client.fit.loader.take(own) for client, own in zip(clients, places, strict=True)]
            inputs, labels = (torch.stack([batch[part] for batch in each]) for part in (0, 1))
        return StackedBatches(clients, step, inputs, labels, sizes, self.present[step, : len(clients)])


@dataclass(frozen=True)
class StackedBatches:
    """The batches of one step."""

    clients: Sequence[StackedClient]
    step: int
    inputs: Tensor
    """(K, B, ...)."""
    labels: Tensor
    """(K, B)."""
    sizes: Tensor
    """The samples of each (K,)."""
    present: Tensor
    """Whether a place holds a sample (K, B)."""

    @cached_property
    def counts(self) -> list[int]:
        """The samples of each."""
        counts: list[int] = self.sizes.tolist()
        return counts

    def of(self, place: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch of one client, as its loader gives it."""
        labels = self.labels[place, : self.counts[place]]
        domains = torch.full_like(labels, cast(int, self.clients[place].fit.loader.domains))
        return self.inputs[place, : self.counts[place]], labels, domains


class StackedTargets:
    """The targets of a stack's clients: for all at once where their rules allow it, else for one after the other.

    The rules of a round's clients are of one class and differ in their tables alone.

    Args:
        fits: the clients' fits.
        plan: their batches.
    """

    def __init__(self, fits: Sequence[LocalFit], plan: BatchPlan) -> None:
        self._plan = plan
        self._rules = [fit.targets for fit in fits if fit.targets is not None]
        kinds = {(type(rule), rule.draw, rule.table.shape, rule.can_be_shared) for rule in self._rules}
        self._shared = len(kinds) <= 1 and all(rule.can_be_shared for rule in self._rules)
        self._found: Tensor | None = None
        if not self._rules or not self._shared:
            return
        self._tables = torch.stack([rule.table for rule in self._rules])
        self._domains = torch.tensor([fit.loader.domains for fit in fits]).view(1, -1, 1)
        if self._rules[0].draw:  # the numbers that the rules would draw step by step
            drawn = [
                torch.randint(rule.num_domains, (count,), generator=fit.generator)
                for rule, fit, count in zip(self._rules, fits, plan.sizes.sum(dim=0).tolist(), strict=True)
            ]
            self._domains = plan.spread(drawn)

    def weights(self, batches: StackedBatches, logits: Tensor) -> Tensor:
        """Return weights over pseudo-domains (K, B, M) for logits (K, B, M*C); a place without a sample has none."""
        labels, present, size = batches.labels, batches.present.unsqueeze(2), len(batches.clients)
        if not self._rules:
            return present.to(logits.dtype)
        if not self._shared:
            return self._one_by_one(batches, logits)
        domains = self._domains[batches.step % len(self._domains), :size].expand(labels.shape)
        own = torch.arange(size).unsqueeze(1)
        rows = self._tables[own, domains] if self._tables.ndim == 3 else self._tables[own, labels, domains]
        if self._rules[0].looks_at_outputs:
            flat, found = self._rules[0].weigh(rows.flatten(0, 1), logits.flatten(0, 1), labels.flatten())
            rows = flat.unflatten(0, labels.shape)
            if self._found is None:
                self._found = found.new_empty(*self._plan.places.shape, *found.shape[1:])
                self._labels = torch.empty_like(self._plan.places)
            self._found[batches.step, :size] = found.unflatten(0, labels.shape)
            self._labels[batches.step, :size] = labels
        return rows.masked_fill(~present, 0.0)

    def _one_by_one(self, batches: StackedBatches, logits: Tensor) -> Tensor:
        weights = logits.new_zeros(*batches.labels.shape, self._rules[0].num_domains)
        for place, (client, rule) in enumerate(zip(batches.clients, self._rules, strict=False)):
            _, labels, domains = batches.of(place)
            weights[place, : len(labels)] = rule(domains, client.fit.generator, logits[place, : len(labels)], labels)
        return weights

    def finish(self) -> None:
        """Give to each rule what it learns from its own client's samples."""
        if self._found is not None:
            for place, rule in enumerate(self._rules):
                own = self._plan.present[:, place]
                rule.learn(self._found[:, place][own], self._labels[:, place][own])


def stacked_losses(
    module: JointModule, batches: StackedBatches, targets: StackedTargets, features: Tensor, logits: Tensor
) -> Tensor:
    """Return the loss of every client's batch (K,), as `JointModule.training_step` computes it.

    What a regularizer adds, and what most algorithms change, is computed for one client after the other.
    """
    labels, clients = batches.labels, batches.clients
    weights = targets.weights(batches, logits.detach())
    each = soft_target_kl(logits.flatten(0, 1), weights.flatten(0, 1), labels.flatten()).view(labels.shape)
    losses = each.sum(dim=1) / batches.sizes  # a place without a sample has no mass and no loss
    updates = [client.fit.update for client in clients]
    kinds: set[Any] = {type(update) for update in updates}
    owners = {_owner_of_loss(kind) for kind in kinds}
    if owners != {LocalUpdate}:
        one = owners.pop() if len(owners) == 1 else LocalUpdate
        together = one.losses if "losses" in vars(one) else LocalUpdate.losses
        losses = together(updates, losses, features, labels, batches.present)
    if not clients[0].fit.terms:
        return losses
    found = []
    for place, (client, loss, size) in enumerate(zip(clients, losses.unbind(), batches.counts, strict=True)):
        own, given, answers = logits[place, :size], features[place, :size], labels[place, :size]
        for term in client.fit.terms.values():
            loss = loss + term(Step(module.head, own, given, answers, weights[place, :size]))
        found.append(loss)
    return torch.stack(found)


@cache
def _owner_of_loss(kind: Any) -> Any:
    """Return the class that changes the loss: `kind` or the first of its bases with a `loss` or `losses` of its own."""
    return next(base for base in kind.__mro__ if {"loss", "losses"} & vars(base).keys())


class StackedCorrection:
    """What `LocalUpdate.correct` does, for all clients of a stack at once.

    Args:
        updates: the clients' sides of the algorithm.
        values: the stacked parameters that are sent.
        together: one for all of them, after `begin`; None if each has begun by itself.
    """

    def __init__(self, updates: Sequence[LocalUpdate], values: Tensors, together: LocalUpdate | None = None) -> None:
        lists = [[update.anchors for update in updates], [update.shift for update in updates]]
        each = [list(map(torch.stack, zip(*own, strict=True))) for own in lists]
        anchors, shifts = each if together is None else (together.anchors, together.shift)
        self._anchors, self._shifts = (dict(zip(values, found, strict=bool(found))) for found in (anchors, shifts))
        self._strengths = torch.tensor([update.strength for update in updates], dtype=torch.float64)

    def apply(self, name: str, gradient: Tensor, value: Tensor) -> Tensor:
        """Return the gradients of a parameter with the corrections of the clients that still train."""
        if name in self._anchors:
            strengths = self._strengths[: len(value)].to(value.dtype).view(-1, *[1] * (value.ndim - 1))
            gradient = (value - self._anchors[name][: len(value)]).mul_(strengths).add_(gradient)
        if name in self._shifts:
            gradient = gradient + self._shifts[name][: len(value)]  # a new one: two parameters may share theirs
        return gradient
