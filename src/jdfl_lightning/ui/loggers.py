"""Loggers: one logs the whole federation, to W&B, CSV or TensorBoard. The only file that imports wandb."""

from __future__ import annotations

import netrc
import os
import re
import socket
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from urllib.parse import urlparse

from lightning.pytorch import loggers as lightning_loggers
from lightning.pytorch.loggers import Logger, WandbLogger

from jdfl_lightning.core.errors import InputError, did_you_mean, notify, without_stop


class WandbRounds(WandbLogger):
    """Lightning's `WandbLogger` for a federation: the round is the x-axis, and the folder is the run's.

    Without an account or network the run is logged offline, and one line says how to sync it later.

    Args:
        project: the W&B project.
        entity: the W&B user or team; null for your default one.
        name: name of the run; null for data set, algorithm, supervision and seed.
        group: W&B group, for runs that belong together.
        tags: W&B tags.
        offline: do not try to reach W&B.
    """

    def __init__(
        self,
        project: str = "jdfl-lightning",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        offline: bool = False,
    ) -> None:
        super().__init__(name=name, project=project, offline=offline, entity=entity, group=group, tags=tags)
        self.entity, self.group, self.tags = entity, group, tags
        self.project, self.offline = project, offline
        self.address: str | None = None
        """Where the run can be watched, while it is open and online."""
        self._wandb_init.pop("anonymous", None)  # which W&B warns of, even if it is not set

    @property
    def name(self) -> str | None:
        """Name of the run; Lightning's own is that of the project."""
        return self._name

    def start(self, folder: Path, default_name: str, run_id: str | None = None) -> None:
        """Open a new W&B run or resume one; its files go into the folder."""
        import wandb

        known = wandb.setup().settings
        mode = os.environ.get("WANDB_MODE")
        reason = None
        if mode is None:
            reason = "it was asked for" if self.offline else _why_offline(str(known.base_url), known.api_key)
            mode = "offline" if reason else "online"
        run = wandb.init(
            **self._wandb_init
            | {
                "name": self.name or default_name,
                "id": run_id,
                "resume": "allow" if run_id else None,
                "dir": str(folder.absolute()),  # W&B's service may have another working folder
                "mode": mode,
                "settings": wandb.Settings(silent=True, console="off"),
            }
        )
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        self._experiment = run
        self.address = run.url if mode == "online" else None
        if reason:
            sync = Path(run.settings.sync_dir)
            notify(f"W&B is offline, as {reason}; later: wandb sync {sync}")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers of a round; the round is logged as a metric, never as W&B's own step."""
        super().log_metrics(metrics if step is None else {**metrics, "round": step})

    def finalize(self, status: str) -> None:
        """Close the run."""
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None


class _InRunFolder(Logger):
    """Logs into the folder of the run unless another one is given."""

    def __init__(self, save_dir: str | None, name: str, version: str | None, **options: object) -> None:
        self._arguments = save_dir, name, version, options
        self.start(None)

    def start(self, folder: Path | None) -> None:
        """Log into the folder of a run from now on."""
        save_dir, name, version, options = self._arguments
        super().__init__(save_dir or folder or "", name, version, **options)  # type: ignore[call-arg]

    def finalize(self, status: str) -> None:
        """Write the rest; forget the run, so that the logger can be used for another."""
        super().finalize(status)
        self.start(None)


class CSVLogger(_InRunFolder, lightning_loggers.CSVLogger):
    """Lightning's `CSVLogger`, into the folder of the run unless another one is given.

    Args:
        save_dir: folder of the logs; null for that of the run.
        name: subfolder of it.
        version: subfolder of that; null for a new one.
    """

    def __init__(self, save_dir: str | None = None, name: str = "csv", version: str | None = None) -> None:
        super().__init__(save_dir, name, version, flush_logs_every_n_steps=1)


class TensorBoardLogger(_InRunFolder, lightning_loggers.TensorBoardLogger):
    """Lightning's `TensorBoardLogger`, into the folder of the run unless another one is given.

    Args:
        save_dir: folder of the logs; null for that of the run.
        name: subfolder of it.
        version: subfolder of that; null for a new one.
    """

    def __init__(self, save_dir: str | None = None, name: str = "tensorboard", version: str | None = None) -> None:
        super().__init__(save_dir, name, version, default_hp_metric=False)


def _why_offline(base_url: str, api_key: str | None) -> str | None:
    """Return why W&B cannot be reached, or None if it can."""
    address = urlparse(base_url)
    host = address.hostname or ""
    known: object = api_key or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    if not known:
        try:
            known = bool(netrc.netrc(os.environ.get("NETRC")).authenticators(host))
        except (OSError, netrc.NetrcParseError):
            known = None
    if not known:
        return "no account is set up (wandb login)"
    try:
        with socket.create_connection((host, address.port or (80 if address.scheme == "http" else 443)), timeout=5):
            return None
    except OSError as error:
        return f"{host} cannot be reached ({error})"


def logger_run(logger: Logger | None) -> str | None:
    """Return a logger's class and the id of its run, to resume it; None if there is none."""
    return None if logger is None or logger.version is None else f"{_class_path(logger)} {logger.version}"


def _class_path(logger: Logger) -> str:
    return f"{type(logger).__module__}.{type(logger).__qualname__}"


def open_logger(logger: Logger | bool, folder: Path, name: str, run: str | None = None) -> Logger | None:
    """Return the run's logger, ready to log: None, W&B (for ``true``), or the user's Lightning logger.

    Args:
        logger: the setting.
        folder: the run folder.
        name: a readable name of the run.
        run: the `logger_run` to resume, if the logger is still of that class.
    """
    if logger is False:
        return None
    if logger is True:
        logger = WandbRounds()
    if isinstance(logger, WandbRounds):
        kind, _, run_id = (run or "").rpartition(" ")
        try:
            logger.start(folder, name, run_id if kind == _class_path(logger) else None)
        except Exception as error:  # wandb's own, pydantic's, or the operating system's
            raise InputError(f"Expected --logger to start but Weights & Biases refused: {error}") from error
    elif isinstance(logger, _InRunFolder):
        logger.start(folder)
    return logger


def explain_logger(message: str) -> str:
    """Reword a parser's error about the setting `logger`; return any other as it is.

    Args:
        message: the error; one about loggers lists the classes that are allowed, with the reason why none will do.

    >>> explain_logger("Subtypes: WandbRounds, CSVLogger. Given value: CSVLoger").partition(" but ")[2]
    "got 'CSVLoger'. Did you mean 'CSVLogger'?"
    """
    if WandbRounds.__name__ not in message:
        return message
    if problem := re.search(r"class_path '(?:[\w.]*\.)?(\w+)':\s+(.*)", message):
        kind, reason = problem[1], problem[2].strip()
        if option := re.search(r"Option '(\w+)' is not accepted", reason):
            return f"Expected an option of {kind} but it has no --logger.{option[1]}."
        if missing := re.search(r"arguments are required: (.*)", reason):
            options = ", ".join(f"--logger.{name}" for name in missing[1].split(", "))
            return f"Expected {options} to be given, as {kind} needs it."
        return f"Expected --logger to be a logger that works here but {kind} does not: {without_stop(reason)}."
    value = re.search(r"Given value: (.*)", message)
    given = value[1].strip() if value else ""
    names = ["WandbRounds", *(name for name in lightning_loggers.__all__ if name != "Logger")]
    return (
        f"Expected --logger to be true, false, one of {', '.join(names)} or the import path of a Lightning logger but "
        f"got {given!r}.{did_you_mean(given, names)}"
    )


def log_picture(logger: Logger | None, key: str, file: Path) -> None:
    """Log a picture file, if the logger supports pictures."""
    if logger is not None and hasattr(logger, "log_image"):
        logger.log_image(key, [str(file)])


def log_rows(logger: Logger | None, key: str, rows: Sequence[Mapping[str, object]], step: int) -> None:
    """Log a table: as one if the logger supports tables, else its numbers, as ``key/row/column``."""
    if logger is None or not rows:
        return
    if hasattr(logger, "log_table"):
        logger.log_table(key, list(rows[0]), [list(row.values()) for row in rows])
        return
    numbers = {
        f"{key}/{number}/{name}": value
        for number, row in enumerate(rows)
        for name, value in row.items()
        if isinstance(value, (int, float))
    }
    logger.log_metrics(numbers, step=step)


def in_group(logger: WandbRounds | Logger | bool, group: str, name: str) -> WandbRounds | Logger | bool:
    """Return a logger of its own for a run of a suite; a W&B run belongs to a group and has a readable name.

    >>> wandb_logger = in_group(True, "suite-pacs", "pacs-fedavg-base-seed0")
    >>> wandb_logger.group, wandb_logger.name
    ('suite-pacs', 'pacs-fedavg-base-seed0')
    """
    if logger is True:
        logger = WandbRounds()
    if isinstance(logger, WandbRounds):
        own = logger.project, logger.entity, logger.name or name, logger.group or group, logger.tags, logger.offline
        return WandbRounds(*own)  # to copy it would start a W&B run
    return copy(logger)
