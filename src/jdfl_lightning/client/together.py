"""One client side of an algorithm for all clients of a stack, where its formulas allow it."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from jdfl_lightning.algorithms import LocalUpdate
from jdfl_lightning.core.tensors import Record, Tensors, stack_rows


def stacked_update(updates: Sequence[LocalUpdate]) -> LocalUpdate | None:
    """Return one update that begins and reports for all clients; None if their class does not say that it can.

    Nor can it if a client's update has another model or another record of the server than the others, or if clients
    change gradients or losses by methods of their own, which use what `begin` has left in each.

    Args:
        updates: the clients' own, before their fits.
    """
    first, kind = updates[0], type(updates[0])
    forms = {
        frozenset(
            (group, name, own.shape, own.dtype) for group, named in update.state.items() for name, own in named.items()
        )
        for update in updates
    }
    sent = {(type(update), id(update.task.weights), id(update.task.server)) for update in updates}
    changed = [name for name in ("correct", "loss", "losses") if getattr(kind, name) is not getattr(LocalUpdate, name)]
    if len(forms) > 1 or len(sent) > 1 or changed or not vars(kind).get("stacks", False):
        return None
    together = copy.copy(first)
    together.state = {
        group: {name: stack_rows([update.state[group][name] for update in updates]) for name in named}
        for group, named in first.state.items()
    }
    together.weight = torch.tensor([update.weight for update in updates], dtype=torch.float64)
    return together


def report_together(update: LocalUpdate, weights: Tensors, own: Sequence[LocalUpdate]) -> list[tuple[Record, Record]]:
    """Return the reports of all clients.

    Args:
        update: that of `stacked_update`, after `begin`.
        weights: the trained parameters that are sent, stacked.
        own: the clients' own, which have counted the steps.
    """
    for name, value in weights.items():
        sums = torch.tensor([client.lr_sums[name] for client in own], dtype=value.dtype)
        update.lr_sums[name] = sums.view(-1, *[1] * (value.ndim - 1))
    upload, state = update.report(weights)
    return list(zip(rows_of(upload, len(own)), rows_of(state, len(own)), strict=True))


def rows_of(record: Record, size: int) -> list[Record]:
    """Return the records of all clients, without copies."""
    found: list[Record] = [{group: {} for group in record} for _ in range(size)]
    for group, tensors in record.items():
        for name, stacked in tensors.items():
            for own, row in zip(found, stacked.unbind(), strict=True):
                own[group][name] = row
    return found
