"""Curves on Weights & Biases: one run for the whole federation. The only file that imports wandb."""

from __future__ import annotations

import netrc
import os
import socket
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from lightning.pytorch.loggers import Logger

from jdfl_lightning.core.errors import InputError, Note

if TYPE_CHECKING:
    import wandb


class WandbRounds(Logger):
    """Logs a federation to Weights & Biases with the round as x-axis.

    With no account or no network the run goes on offline, and one line says how to sync it later.

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
        super().__init__()
        self.project, self.entity, self._name, self.group = project, entity, name, group
        self.tags, self.offline = tags, offline
        self._run: wandb.Run | None = None

    @property
    def name(self) -> str | None:
        """Name of the run."""
        return self._name

    @property
    def version(self) -> str | None:
        """W&B's id of the run."""
        return None if self._run is None else self._run.id

    def start(self, folder: Path, default_name: str, run_id: str | None = None) -> None:
        """Open the W&B run, or go on with one; its files go into the folder."""
        import wandb

        settings = wandb.setup().settings
        mode = os.environ.get("WANDB_MODE")
        reason = None
        if mode is None:
            reason = "it was asked for" if self.offline else _why_offline(str(settings.base_url), settings.api_key)
            mode = "offline" if reason else "online"
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self._name or default_name,
            id=run_id,
            resume="allow" if run_id else None,
            group=self.group,
            tags=self.tags,
            dir=str(folder.absolute()),  # W&B's service may have another working folder
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")
        if reason:
            sync = Path(self._run.settings.sync_dir)
            warnings.warn(f"W&B is offline, as {reason}; later: wandb sync {sync}", Note, stacklevel=2)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers of a round; the round travels in the payload, never as W&B's own step."""
        if self._run is not None:
            self._run.log(dict(metrics) if step is None else {**metrics, "round": step})

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Log the config."""
        if self._run is not None:
            self._run.config.update(params if isinstance(params, dict) else vars(params), allow_val_change=True)

    def log_image(self, key: str, images: list[str], step: int | None = None) -> None:
        """Log picture files."""
        import wandb

        if self._run is not None:
            self._run.log({key: [wandb.Image(image) for image in images]})

    def log_table(self, key: str, columns: Sequence[str], data: Sequence[Sequence[object]]) -> None:
        """Log a table."""
        import wandb

        if self._run is not None:
            self._run.log({key: wandb.Table(columns=list(columns), data=[list(row) for row in data])})

    def finalize(self, status: str) -> None:
        """Close the run."""
        if self._run is not None:
            self._run.finish(exit_code=0 if status == "success" else 1)
            self._run = None


def _why_offline(base_url: str, api_key: str | None) -> str | None:
    """Return why W&B cannot be reached, or nothing if it can."""
    address = urlparse(base_url)
    host = address.hostname or ""
    known = api_key or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    if not known:
        try:
            known = bool(netrc.netrc(os.environ.get("NETRC")).authenticators(host))  # type: ignore[assignment]
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
    """Return a logger's class and the id of its run, by which that is found again; none if there is none."""
    return None if logger is None or logger.version is None else f"{_class_path(logger)} {logger.version}"


def _class_path(logger: Logger) -> str:
    return f"{type(logger).__module__}.{type(logger).__qualname__}"


def open_logger(logger: Logger | bool, folder: Path, name: str, run: str | None = None) -> Logger | None:
    """Return the run's logger, ready to log: none, W&B (for ``true``), or a Lightning logger of the user's.

    Args:
        logger: the setting.
        folder: the run folder.
        name: a readable name of the run.
        run: the `logger_run` that is continued, if the logger is still of that class.
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
    return logger


def log_picture(logger: Logger | None, key: str, file: Path) -> None:
    """Log a picture file, if the logger takes pictures."""
    if logger is not None and hasattr(logger, "log_image"):
        logger.log_image(key, [str(file)])


def in_group(logger: WandbRounds | Logger | bool, group: str, name: str) -> WandbRounds | Logger | bool:
    """Return a logger whose W&B run belongs to a group and has a readable name, unless it has others already.

    >>> wandb_logger = in_group(True, "suite-pacs", "pacs-fedavg-base-seed0")
    >>> wandb_logger.group, wandb_logger.name
    ('suite-pacs', 'pacs-fedavg-base-seed0')
    """
    if logger is True:
        logger = WandbRounds()
    if isinstance(logger, WandbRounds):
        logger.group = logger.group or group
        logger._name = logger._name or name
    return logger


def upload_report(
    folder: Path,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    pictures: Sequence[Path],
    like: WandbRounds | None = None,
) -> None:
    """Put a report's table and pictures on Weights & Biases, as a run named ``report``.

    Args:
        folder: the report's folder, where W&B's own files go.
        columns: names of the table's columns.
        rows: the table.
        pictures: picture files; each is logged under its name.
        like: a logger whose project, entity and group it shares.
    """
    like = like or WandbRounds()
    logger = WandbRounds(like.project, like.entity, "report", like.group, like.tags, like.offline)
    try:
        logger.start(folder, "report")
    except Exception as error:  # wandb's own, pydantic's, or the operating system's
        raise InputError(f"Expected --wandb to start but Weights & Biases refused: {error}") from error
    logger.log_table("report", columns, rows)
    for picture in pictures:
        log_picture(logger, picture.stem, picture)
    logger.finalize("success")
