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
from functools import cache
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator

from jdfl_lightning.core.errors import InputError, require, require_types
from jdfl_lightning.core.settings import setting

_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning")


@dataclass(frozen=True)
class TrainerOptions:
    """Options of Lightning's Trainer that the user sets; the run sets the rest (epochs, logger, bars, checkpoints)."""

    accelerator: str = setting("auto", role="place")
    """Lightning's accelerator: auto, cpu, gpu, mps."""
    devices: int | str = setting(1, role="place")
    """The device that clients train on: 1 for any, or the index of a GPU as "[0]"."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"] = setting(
        "32-true", phase_1=True, in_paper=False
    )
    """Lightning's precision."""
    gradient_clip_val: float | None = setting(None, phase_1=True, in_paper=False)
    """Clip the norm of the gradients at this value, after an algorithm has corrected them; null for no clipping."""
    deterministic: bool = setting(False)
    """Ask torch for deterministic kernels on a GPU; on the CPU runs are reproducible either way."""

    def __post_init__(self) -> None:
        require_types(self, "--trainer.")

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of floating-point weights after a fit; None if it is unchanged."""
        return {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}.get(self.precision)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise: Lightning would exit the process and ignore every further Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from None


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
    """Silence Lightning's messages and warnings inside the block."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            with interruptible():
                yield
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
        with quiet():
            trainer = silent_trainer(options)
    except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
        raise InputError(f"Expected --trainer to have options that work on this machine but: {error}") from error
    on_cpu, half = isinstance(trainer.accelerator, CPUAccelerator), "16" in options.precision
    if half and on_cpu and not survives_half_precision():
        raise InputError(
            f"Expected --trainer.precision to work on this CPU but {options.precision} ends the process: set the "
            f"variable {_ISA} to AVX512_CORE_FP16 before Python starts, or choose 32-true."
        )
    require(trainer.num_devices == 1, "--trainer.devices", "one device, as a client trains on one,", options.devices)


def silent_trainer(options: TrainerOptions, max_epochs: int = 1, callbacks: Sequence[pl.Callback] = ()) -> pl.Trainer:
    """Return a Trainer that logs, saves and shows nothing; use it inside `quiet`."""
    trainer = copy.deepcopy(_unused_trainer(options))
    torch.use_deterministic_algorithms(options.deterministic)  # a global setting, made by each new Trainer
    trainer.fit_loop.max_epochs = max_epochs
    trainer.callbacks.extend([_OwnSignals(), *callbacks])  # type: ignore[attr-defined]
    return trainer


@cache
def _unused_trainer(options: TrainerOptions) -> pl.Trainer:
    """Return a Trainer to copy; building one takes ten times as long, as it searches all packages for callbacks."""
    return pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        gradient_clip_val=options.gradient_clip_val,
        deterministic=options.deterministic,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
