"""One silent Lightning Trainer for each fit and each evaluation."""

from __future__ import annotations

import copy
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator

from jdfl_lightning.core.errors import InputError, require, require_types
from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.settings import setting

Precision = Literal[
    "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "32", "64", "16", "bf16"
]  # fmt: skip
_PRECISIONS = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}
REFUSED = {
    "max_epochs": "use --epochs",
    "min_epochs": "use --epochs",
    "min_steps": "use --epochs",
    "max_time": "a fit that ends by the clock cannot be repeated; use --epochs or --trainer.max_steps",
    "logger": "use --logger; a run has one logger, at the server",
    "enable_checkpointing": "a run saves itself; use --checkpoint",
    "enable_progress_bar": "a run shows its own progress",
    "enable_model_summary": "a fit shows nothing",
    "log_every_n_steps": "a run logs rounds, not steps",
    "strategy": "a client trains on one device",
    "num_nodes": "a client trains on one device; use --backend RayBackend for several machines",
    "sync_batchnorm": "a client trains on one device",
    "use_distributed_sampler": "a client trains on one device",
    "limit_val_batches": "a fit has no validation; use --evaluate_every",
    "val_check_interval": "a fit has no validation; use --evaluate_every",
    "check_val_every_n_epoch": "a fit has no validation; use --evaluate_every",
    "num_sanity_val_steps": "a fit has no validation; use --evaluate_every",
    "limit_test_batches": "every evaluation uses all held-out images; use --evaluate_every",
    "limit_predict_batches": "a fit predicts nothing",
    "overfit_batches": "use --trainer.limit_train_batches",
    "reload_dataloaders_every_n_epochs": "a client's images do not change in a fit",
    "default_root_dir": "use --run_dir",
    "profiler": "profile the command itself, as in python -m cProfile -m jdfl_lightning fit",
    "inference_mode": "evaluations always use it",
    "plugins": "use --trainer.precision",
    "barebones": "fits are as bare as their algorithm allows",
    "model_registry": "a run saves itself; use --checkpoint",
    "benchmark": "it would make the bits of a GPU depend on timings",
    "enable_autolog_hparams": "use --logger",
}
"""Options of Lightning's Trainer that a fit does not have, and what to use instead."""

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning")


@dataclass(frozen=True)
class TrainerOptions:
    """Options of Lightning's Trainer that the user sets; the run sets the rest (epochs, logger, bars, checkpoints)."""

    accelerator: str = setting("auto", role="place")
    """Lightning's accelerator: auto, cpu, gpu, mps."""
    devices: int | str = setting(1, role="place")
    """The device that clients train on: 1 for any, or the index of a GPU as "[0]"."""
    precision: Precision = setting("32-true", phase_1=True, in_paper=False)
    """Lightning's precision; 32, 64, 16 and bf16 are short for 32-true, 64-true, 16-mixed and bf16-mixed."""
    gradient_clip_val: float | None = setting(None, phase_1=True, in_paper=False)
    """Clip the gradients at this value, after an algorithm has corrected them; null for no clipping."""
    gradient_clip_algorithm: Literal["norm", "value"] = setting("norm", phase_1=True, in_paper=False)
    """Clip the norm of all gradients together, or the value of each."""
    accumulate_grad_batches: int = setting(1, phase_1=True, in_paper=False)
    """Batches whose gradients are summed for one step of the optimizer."""
    limit_train_batches: int | float | None = setting(None, phase_1=True, in_paper=False)
    """Batches of an epoch: a number, or a share as 0.5; null for all."""
    max_steps: int = setting(-1, in_paper=False)
    """End a fit after this many steps, even within an epoch; -1 for no limit. Phase 1 has no such limit."""
    callbacks: list[Part] = setting(factory=list, phase_1=True, in_paper=False)
    """Lightning callbacks of every fit, each built anew: a list of class_path and init_args."""
    deterministic: bool = setting(False)
    """Ask torch for deterministic kernels on a GPU; on the CPU runs are reproducible either way."""
    detect_anomaly: bool = setting(False, role="output")
    """Find the operation that made a gradient NaN; slow."""
    fast_dev_run: bool = setting(False, phase_1=True, in_paper=False)
    """A quick trial of everything: every fit is one batch, and the run one round."""

    def __post_init__(self) -> None:
        require_types(self, "--trainer.")
        full = _PRECISIONS.get(self.precision, self.precision)
        object.__setattr__(self, "precision", full)  # one name for a precision, to compare settings
        limit = self.limit_train_batches
        sound = limit is None or (limit > 0 if type(limit) is int else 0 < limit <= 1)
        require(sound, "--trainer.limit_train_batches", "a positive number, or a share of at most 1.0", limit)
        accumulated = self.accumulate_grad_batches
        require(accumulated > 0, "--trainer.accumulate_grad_batches", "positive", accumulated)
        require(self.max_steps == -1 or self.max_steps > 0, "--trainer.max_steps", "positive, or -1", self.max_steps)
        clip = self.gradient_clip_val
        require(clip is None or clip > 0, "--trainer.gradient_clip_val", "positive", clip)
        for part in self.callbacks:
            part.check("--trainer.callbacks", pl.Callback)

    def __hash__(self) -> int:
        return hash(repr(self))

    @cached_property
    def are_plain(self) -> bool:
        """Whether all of them are at their defaults but for the place, and the place is a CPU."""
        return self == TrainerOptions(accelerator=self.accelerator, devices=self.devices) and self._on_cpu

    @property
    def _on_cpu(self) -> bool:
        return isinstance(unused_trainer(self).accelerator, CPUAccelerator)

    @property
    def memory_format(self) -> torch.memory_format:
        """The layout of images and networks: channels_last, but on a CPU with bf16-mixed, where the default is faster.

        It follows from settings that a run saves, so that a resumed run has the same.
        """
        return torch.contiguous_format if self.precision == "bf16-mixed" and self._on_cpu else torch.channels_last

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of floating-point weights after a fit; None if it is unchanged."""
        return {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}.get(self.precision)


class _OwnSignals(pl.Callback):
    """Restores the SIGTERM handler: Lightning's would end a fit midway."""

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the handler here, as Lightning replaces it after ``on_fit_start``."""
        if self._handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)

    on_test_start = on_train_start


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's messages and warnings inside the block, and let Ctrl-C raise."""
    handler, loggers = signal.getsignal(signal.SIGINT), [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    except SystemExit as leaving:  # Lightning would exit the process and ignore every further Ctrl-C
        if not isinstance(leaving.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_ISA = "ONEDNN_MAX_CPU_ISA"
"""Environment variable that limits the instructions of oneDNN, torch's matrix library on Intel CPUs."""


def survives_half_precision() -> bool:
    """Return whether products in half precision work on this CPU, if need be without its matrix unit (AMX).

    Some virtual machines announce AMX but kill a process that uses it. A child process tests this. If it is killed,
    oneDNN is set to work without AMX, which has an effect only before its first computation.
    """
    if os.name != "posix" or _computes():
        return True
    os.environ.setdefault(_ISA, "AVX512_CORE_FP16")
    return _computes()


def _computes() -> bool:
    """Return whether a child process survives a product in half precision."""
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)
            half = torch.ones(32, 1024, dtype=torch.bfloat16)
            _ = half @ half.T
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def check_trainer(options: TrainerOptions) -> None:
    """Raise an `InputError` if Lightning does not accept the options on this machine."""
    try:
        trainer = unused_trainer(options)  # nothing is trained with it
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        raise InputError(f"Expected --trainer to have options that work on this machine but: {error}") from error
    torch.use_deterministic_algorithms(options.deterministic)  # else that of an earlier run stays
    if "16" in options.precision and options._on_cpu and not survives_half_precision():
        raise InputError(
            f"Expected --trainer.precision to work on this CPU but {options.precision} ends the process: set the "
            f"variable {_ISA} to AVX512_CORE_FP16 before Python starts, or choose 32-true."
        )
    require(trainer.num_devices == 1, "--trainer.devices", "one device, as a client trains on one,", options.devices)


def silent_trainer(
    options: TrainerOptions, max_epochs: int = 1, callbacks: Sequence[pl.Callback] = (), max_steps: int = -1
) -> pl.Trainer:
    """Return a Trainer that logs, saves and shows nothing; use it inside `quiet`.

    Args:
        options: the user's options; those that belong to training alone do not matter in an evaluation.
        max_epochs: passes through the data.
        callbacks: the run's own; they are called before the user's.
        max_steps: end after this many steps; -1 for no limit.
    """
    trainer = copy.deepcopy(unused_trainer(options))
    torch.use_deterministic_algorithms(options.deterministic)  # a global setting, made by each new Trainer
    trainer.fit_loop.max_epochs = max_epochs
    trainer.fit_loop.epoch_loop.max_steps = max_steps
    trainer.callbacks.extend([_OwnSignals(), *callbacks])  # type: ignore[attr-defined]
    return trainer


@cache
@quiet()
def unused_trainer(options: TrainerOptions) -> pl.Trainer:
    """Return a Trainer to copy; building one takes ten times as long, as it searches all packages for callbacks."""
    return pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        gradient_clip_val=options.gradient_clip_val,
        gradient_clip_algorithm=options.gradient_clip_algorithm if options.gradient_clip_val else None,
        accumulate_grad_batches=options.accumulate_grad_batches,
        limit_train_batches=1 if options.fast_dev_run else options.limit_train_batches,
        deterministic=options.deterministic,
        detect_anomaly=options.detect_anomaly,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
