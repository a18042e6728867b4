"""The clients of a stack, their batches and their losses."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from jdfl_lightning.joint import TargetRule
from jdfl_lightning.joint.loss import soft_target_kl
from jdfl_lightning.regularizers import Step


@dataclass
class StackedClient:
    """A client of the stack; it stands in for Trainer and module where an algorithm's hooks expect them."""

    fit: LocalFit
    params: Tensors
    """Views of its part of the stack, with gradients that are views too."""
    module: JointModule
    num_steps: int
    order: Iterator[Tensor]
    """Which images are in each batch of the fit."""
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


@dataclass
class StackedBatches:
    """The next batches of the clients that still train, filled up with zeros to the same length."""

    clients: Sequence[StackedClient]
    inputs: Tensor
    """(K, B, ...)."""
    labels: Tensor
    """(K, B)."""
    sizes: list[int]
    """The samples of each."""

    @classmethod
    def take(cls, clients: Sequence[StackedClient]) -> StackedBatches:
        """Take the next batch of each client."""
        chosen = [next(client.order) for client in clients]
        sizes = [own.shape[0] for own in chosen]
        loader = clients[0].fit.loader
        if type(loader) is BatchLoader and loader.images.is_floating_point():  # features: all at once
            places = pad_sequence(chosen, batch_first=True, padding_value=-1)
            inputs, labels = loader.images[places], loader.labels[places]
            if min(sizes) < max(sizes):
                inputs[places < 0], labels[places < 0] = 0.0, 0
        else:
            batches = [client.fit.loader.take(own) for client, own in zip(clients, chosen, strict=True)]
            inputs, labels = (pad_sequence([batch[part] for batch in batches], batch_first=True) for part in (0, 1))
        return cls(clients, inputs, labels, sizes)

    def of(self, place: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the batch of one client, as its loader gives it."""
        labels = self.labels[place, : self.sizes[place]]
        domains = torch.full_like(labels, cast(int, self.clients[place].fit.loader.domains))
        return self.inputs[place, : self.sizes[place]], labels, domains


def have_plain_losses(fits: Sequence[LocalFit]) -> bool:
    """Return whether all losses are those of tables of targets of one form, unchanged by an algorithm."""
    for fit in fits:
        plain = type(fit.update).loss is LocalUpdate.loss and not fit.terms
        if not plain or (fit.targets is not None and type(fit.targets) is not TargetRule):
            return False
    forms = {None if fit.targets is None else (fit.targets.draw, fit.targets.table.shape) for fit in fits}
    return len(forms) == 1


def losses_together(batches: StackedBatches, logits: Tensor) -> Tensor:
    """Return the mean loss of every client's batch; rows that only fill up a batch have no mass and no loss."""
    weights, labels, sizes = _weights_together(batches), batches.labels, torch.tensor(batches.sizes)
    if min(batches.sizes) < max(batches.sizes):
        weights[torch.arange(labels.shape[1]) >= sizes.unsqueeze(1)] = 0.0
    each = soft_target_kl(logits.flatten(0, 1), weights.flatten(0, 1), labels.flatten()).view(labels.shape)
    return each.sum(dim=1) / sizes


def _weights_together(batches: StackedBatches) -> Tensor:
    """Return the weights over pseudo-domains (K, B, M) that `TargetRule` gives."""
    fits = [client.fit for client in batches.clients]
    rules = [fit.targets for fit in fits if fit.targets is not None]
    if not rules:
        return torch.ones(*batches.labels.shape, 1)
    domains = torch.tensor([fit.loader.domains for fit in fits]).unsqueeze(1).expand(batches.labels.shape)
    if rules[0].draw:
        drawn = [
            torch.randint(rule.num_domains, (size,), generator=fit.generator)
            for rule, fit, size in zip(rules, fits, batches.sizes, strict=True)
        ]
        domains = pad_sequence(drawn, batch_first=True)
    tables, own = torch.stack([rule.table for rule in rules]), torch.arange(len(fits)).unsqueeze(1)
    return tables[own, domains] if tables.ndim == 3 else tables[own, batches.labels, domains]


def losses_one_by_one(module: JointModule, batches: StackedBatches, features: Tensor, logits: Tensor) -> Tensor:
    """Return the loss of every client's batch, as `JointModule.training_step` computes it."""
    losses = []
    for place, (client, all_features, all_logits) in enumerate(
        zip(batches.clients, features.unbind(), logits.unbind(), strict=True)
    ):
        _, labels, domains = batches.of(place)
        own, given = all_logits[: len(labels)], all_features[: len(labels)]
        rule = client.fit.targets if client.fit.targets is not None else module.targets
        weights = rule(domains, client.fit.generator, own.detach(), labels)
        loss = client.fit.update.loss(module.task_loss(own, weights, labels), given, labels)
        for term in client.fit.terms.values():
            loss = loss + term(Step(module.head, own, given, labels, weights))
        losses.append(loss)
    return torch.stack(losses)
