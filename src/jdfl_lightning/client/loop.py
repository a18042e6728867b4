"""A training loop without a Trainer, for fits that configure nothing of it: the same bits, sooner.

What `Trainer.fit` does around a fit takes longer than a tiny client's steps. This loop makes the same calls in the same
order, but only those that an algorithm of this package uses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from jdfl_lightning.algorithms import LocalUpdate
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.client.trainer import TrainerOptions

_HOOKS = {
    "on_train_start",
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_exception",
}
"""The hooks of a callback that the loop calls."""


def needs_no_trainer(module: pl.LightningModule, update: LocalUpdate, options: TrainerOptions) -> bool:
    """Return whether `PlainLoop` trains as a Trainer would.

    It does for a `JointModule` itself without a scheduler, for options that are at their defaults on a CPU, and for an
    algorithm whose hooks are those of this package. (Hooks of the user's may look at anything of a Trainer.) A module
    outside of a run logs its loss, for which it needs a Trainer.
    """
    if not options.are_plain or type(module) is not JointModule or module.lr_scheduler is not None:
        return False
    return module.loss_term is not None and has_known_hooks(update)


def has_known_hooks(update: LocalUpdate) -> bool:
    """Return whether all hooks of a callback are this package's own and called by `PlainLoop`."""
    kind: Any = type(update)
    return _has_known_hooks(kind)


@cache
def _has_known_hooks(kind: type[LocalUpdate]) -> bool:
    return all(
        name in _HOOKS and getattr(kind, name).__module__.startswith("jdfl_lightning.")
        for name, hook in vars(pl.Callback).items()
        if callable(hook) and getattr(kind, name) is not hook
    )


_NUMBERS = ("lr", "weight_decay")
_HOOKS_OF_ALL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
"""Where torch has the hooks that a user registers for all optimizers."""


def _takes_plain_steps(optimizer: Optimizer) -> bool:
    """Return whether a step subtracts the gradient times a rate: what torch does around it takes longer than that."""
    if any(getattr(sys.modules[Optimizer.__module__], name, None) for name in _HOOKS_OF_ALL):
        return False
    beyond = ("momentum", "dampening", "nesterov", "maximize", "differentiable", "foreach", "fused")
    return type(optimizer) is SGD and all(
        not any(group[name] for name in beyond) and all(type(group[name]) in (int, float) for name in _NUMBERS)
        for group in optimizer.param_groups
    )


class PlainLoop:
    """Trains a module, and stands in for the Trainer where an algorithm's hooks expect one.

    Args:
        module: the module; its optimizer is that of `configure_optimizers`.
        loader: its training batches.
        update: the algorithm's callback for this fit.
        epochs: passes through the loader.
    """

    accumulate_grad_batches = 1

    def __init__(self, module: JointModule, loader: Iterable[Any], update: LocalUpdate, epochs: int) -> None:
        self.module, self.train_dataloader, self.update = module, loader, update
        self.max_epochs = epochs
        self.optimizers: list[Optimizer] = [module.configure_optimizers()]
        self._trainer = cast(pl.Trainer, self)
        self._rates: dict[str, float] = {}
        """The learning rate of each parameter that is sent."""
        self._is_plain = _takes_plain_steps(self.optimizers[0])

    def fit(self) -> None:
        """Train for all epochs."""
        module, update, trainer = self.module, self.update, self._trainer
        if not module.training:  # to set it takes long, as every layer has it
            module.train()
        try:
            update.on_train_start(trainer, module)
            names = {id(param): name for name, param in module.trainable().items() if name in update.lr_sums}
            groups = self.optimizers[0].param_groups
            self._rates = {names[id(p)]: float(g["lr"]) for g in groups for p in g["params"] if id(p) in names}
            for _ in range(self.max_epochs):
                for number, batch in enumerate(self.train_dataloader):
                    update.on_train_batch_start(trainer, module, batch, number)
                    loss = self._plain_step(batch, number) if self._is_plain else self._step(batch, number)
                    update.on_train_batch_end(trainer, module, {"loss": loss}, batch, number)
                update.on_train_epoch_end(trainer, module)
            update.on_train_end(trainer, module)
            module.finish_terms(self.train_dataloader)
        except BaseException as error:
            update.on_exception(trainer, module, error)
            raise

    def _step(self, batch: Any, number: int) -> Tensor:
        [optimizer] = self.optimizers

        def closure() -> Tensor:
            loss = self.module.training_step(batch, number)
            optimizer.zero_grad()
            loss.backward()
            self.update.on_before_optimizer_step(self._trainer, self.module, optimizer)
            return loss.detach()

        return cast(Tensor, cast(Any, optimizer).step(closure))

    def _plain_step(self, batch: Any, number: int) -> Tensor:
        """Do what `_step` does with SGD without momentum."""
        [optimizer] = self.optimizers
        loss = self.module.training_step(batch, number)
        trained = [(param, group) for group in optimizer.param_groups for param in group["params"]]
        for param, _ in trained:
            param.grad = None
        loss.backward()
        self.update.on_before_optimizer_step(self._trainer, self.module, optimizer)
        with torch.no_grad():
            for param, group in trained:
                if (gradient := param.grad) is not None:
                    decay = group["weight_decay"]
                    gradient = gradient.add(param, alpha=decay) if decay else gradient
                    param.add_(gradient, alpha=-group["lr"])
        self.update.count_step(self._rates)
        return loss.detach()
