"""Making, locking, reading and deleting a run folder."""

from __future__ import annotations

import io
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from jdfl_lightning.core.errors import InputError, StorageError
from jdfl_lightning.core.files import is_aside, read_settings, refuse_links, write_whole
from jdfl_lightning.core.system import locked
from jdfl_lightning.storage import names
from jdfl_lightning.storage.checkpoint import CHECKPOINTS, CLIENTS
from jdfl_lightning.storage.details import Stop, read_stop
from jdfl_lightning.storage.discoveries import Summary, read_as
from jdfl_lightning.storage.metrics import read_rows
from jdfl_lightning.storage.names import FigureFormat, Selection, Which
from jdfl_lightning.storage.trust import CONFIG, saved_settings

DPI = 130
"""Resolution of figures."""
_OWN_FOLDERS = {CHECKPOINTS, CLIENTS, "wandb", "csv", "tensorboard"}
"""Folders that a run makes: its checkpoints, its clients' states, and those of the loggers."""
_OWN_FILES = {CONFIG, "best.safetensors", "last.safetensors", names.METRICS, names.DATA, names.STOPPED, names.NETWORK}
_OWN_FILES |= {names.EVALUATION, names.CONFUSION, names.CLIENT_ROWS, names.DISCOVERY, names.VECTORS, names.DIAGNOSIS}
_OWN_FILES |= {names.FEDERATION}
_OWN_PICTURES = {"curves", "discovery", "confusion", "targets", "diagnosis"}
_PICTURE_ENDS = {".png", ".pdf", ".svg"}


def make_run_folder(run_dir: str | None, name: str) -> Path:
    """Make the folder of a run, by default a new one in ``runs``; a folder that is not empty is refused."""
    folder = Path(run_dir) if run_dir else Path(names.RUNS) / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    if (
        run_dir
        and folder.exists()
        and (not folder.is_dir() or any(not is_aside(file.name) for file in folder.iterdir()))
    ):
        raise InputError(f"Expected --run_dir to be new or empty but {folder} exists: choose another, or remove it.")
    try:
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=bool(run_dir))
                return folder
            except FileExistsError:  # two runs in one second
                folder = folder.with_name(f"{folder.name}-again")
    except OSError as error:
        raise InputError(f"Expected --run_dir to be writable but got {folder}: {error}.") from error


def require_own_files(folder: Path) -> None:
    """Raise an `InputError` if a file or folder of a run is a symbolic link."""
    refuse_links(folder, (CHECKPOINTS, CLIENTS))


def save_figure(figure: Figure, file: Path, formats: Sequence[FigureFormat] = ()) -> None:
    """Write a figure as PNG, and in other formats beside it: the same figure gives the same bytes.

    Args:
        figure: the figure.
        file: the file, which ends in ``.png``.
        formats: the other formats.
    """
    dates: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    for kind in ("png", *formats):
        out = io.BytesIO()
        # fonts that can be edited and that journals take; names that do not depend on the time
        with rc_context({"pdf.fonttype": 42, "svg.hashsalt": file.stem}):
            figure.savefig(out, format=kind, dpi=DPI, metadata=dates.get(kind))
        write_whole(file.with_suffix(f".{kind}"), out.getvalue())


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Keep a second process from writing to a run; raise an `InputError` if another process holds the lock."""
    with locked(folder, wait=False) as alone:
        if not alone:
            raise InputError(
                f"Expected a run that is not in use but another process is writing {folder}: wait for it to end."
            )
        yield


def is_locked(folder: Path) -> bool:
    """Return whether another process writes a run folder; False where the system has no locks."""
    with locked(folder, wait=False) as alone:
        return not alone


@dataclass(frozen=True, repr=False)
class SavedRun:
    """The contents of a run folder."""

    folder: Path
    config: dict[str, Any]
    """The complete settings."""
    rows: list[dict[str, float]]
    """``metrics.csv``, a row for each round."""
    discovery: dict[str, Any] | None
    """``discovery.json``; None for the baseline."""
    stop: Stop | None = None
    """``stopped.json``; None if no callback ended the run."""

    def __repr__(self) -> str:
        """Show only which run it is: its contents would fill pages."""
        return (
            f"{type(self).__name__}({self.folder}, {len(self.rows)} rounds, best test/acc {self.best['test/acc']:.4f})"
        )

    @property
    def domains(self) -> list[str]:
        """Names of the domains."""
        return [name.removeprefix(names.DOMAIN_PREFIX) for name in self.rows[0] if name.startswith(names.DOMAIN_PREFIX)]

    @property
    def best(self) -> dict[str, float]:
        """The row of the best round: the first with the highest accuracy, on the images that `select` names.

        The last row in a run that keeps no best weights.
        """
        return self.last if self.select == "last" else self.best_on(self.select)

    def best_on(self, part: str) -> dict[str, float]:
        """Return the first row with the highest accuracy on a part: test or val."""
        column = f"{part}/acc"
        return max(self.rows, key=lambda row: -1.0 if math.isnan(row[column]) else row[column])

    @property
    def select(self) -> Selection:
        """How the best round is picked: by validation images, by test images (the paper), or not at all."""
        if not self.keeps_best:
            return "last"
        return "val" if "val/acc" in self.rows[0] else "test"

    @property
    def unseen(self) -> list[str]:
        """Names of the domains that no client has."""
        return [name.removeprefix(names.UNSEEN_PREFIX) for name in self.rows[0] if name.startswith(names.UNSEEN_PREFIX)]

    @property
    def last(self) -> dict[str, float]:
        """The row of the last round."""
        return self.rows[-1]

    @property
    def keeps_best(self) -> bool:
        """Whether the weights of the best round are saved: not in a private run, nor with ``select: last``."""
        return not all(math.isnan(row.get("test/acc_best", 0.0)) for row in self.rows)

    @property
    def ends(self) -> dict[Which, dict[str, float]]:
        """The rows whose weights are saved."""
        return {"best": self.best, "last": self.last} if self.keeps_best else {"last": self.last}


def read_run(folder: Path) -> SavedRun:
    """Read a run folder; an error names what is missing or damaged."""
    try:
        require_own_files(folder)
        config = read_settings(folder / CONFIG)
        (folder / names.METRICS).stat()  # must exist
        rows = [{name: float(value) for name, value in row.items()} for row in read_rows(folder)]
        discovery = read_as(folder, Summary) if (folder / names.DISCOVERY).exists() else None
        stop = read_stop(folder)
    except FileNotFoundError as error:
        raise InputError(f"Expected a run folder but {folder} has no {Path(error.filename).name}.") from error
    except InputError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"Expected a run folder but {folder} cannot be read: {error}.") from error
    if not rows:
        raise InputError(f"Expected a run with a finished round but {folder} has none.")
    if missing := {"round", "test/acc", "test/acc_worst", "train/loss"} - set(rows[0]):
        raise InputError(f"Expected a run folder but {folder / names.METRICS} has no column {missing.pop()}.")
    return SavedRun(folder, config, rows, discovery, stop)


def remove_runs(folders: Sequence[Path]) -> None:
    """Delete run folders with all that is in them; none is deleted if one of them is not a run, or is in use.

    Args:
        folders: the run folders themselves, not folders of runs.
    """
    with ExitStack() as locks:
        for folder in folders:
            check_removable(folder)
            locks.enter_context(lock_run(folder))
        for folder in folders:
            try:
                shutil.rmtree(folder)  # removes links, and does not follow them
            except OSError as error:
                raise StorageError(f"Expected to delete {folder} but: {error.strerror or error}.") from error


def check_removable(folder: Path) -> None:
    """Raise an `InputError` unless a folder is that of a run and holds nothing that a run does not write."""
    if folder.is_symlink():
        raise InputError(f"Expected a run folder but {folder} is a link: give the folder itself.")
    if Path.cwd().is_relative_to(folder.resolve()):  # its files could be deleted, and it could not
        raise InputError(
            f"Expected a run folder elsewhere but the working folder is in {folder}: change to another one first. "
            "Nothing was deleted."
        )
    if not (folder / CONFIG).is_file():
        raise InputError(f"Expected a run folder but {folder} has no {CONFIG}: nothing was deleted.")
    settings = saved_settings(folder)
    if missing := {"algorithm", "data", "supervision", "rounds"} - set(settings):
        raise InputError(f"Expected the settings of a run but {folder / CONFIG} has no {min(missing)}.")
    for entry in sorted(folder.iterdir()):
        if not _is_ours(entry):
            raise InputError(
                f"Expected a folder with the files of a run alone but {folder} has {entry.name}: move it elsewhere, "
                "or delete the folder yourself. Nothing was deleted."
            )


def _is_ours(entry: Path) -> bool:
    """Return whether a run writes a file or folder of this name."""
    if entry.is_dir() and not entry.is_symlink():
        return entry.name in _OWN_FOLDERS
    picture = entry.stem in _OWN_PICTURES and entry.suffix in _PICTURE_ENDS
    return entry.name in _OWN_FILES or picture or is_aside(entry.name)
