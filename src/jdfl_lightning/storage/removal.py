"""Deleting run folders: what is not a run, is in use or holds other files stays."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from jdfl_lightning.core.errors import InputError, StorageError
from jdfl_lightning.core.files import is_aside
from jdfl_lightning.storage.checkpoint import CHECKPOINTS, CLIENTS
from jdfl_lightning.storage.folder import lock_run
from jdfl_lightning.storage.names import (
    CLIENT_ROWS,
    CONFUSION,
    DATA,
    DIAGNOSIS,
    DISCOVERY,
    EVALUATION,
    METRICS,
    NETWORK,
    STOPPED,
    VECTORS,
)
from jdfl_lightning.storage.trust import CONFIG, saved_settings

_OWN_FOLDERS = {CHECKPOINTS, CLIENTS, "wandb", "csv", "tensorboard"}
"""Folders that a run makes: its checkpoints, its clients' states, and those of the loggers."""
_OWN_FILES = {
    CONFIG,
    METRICS,
    DATA,
    EVALUATION,
    CONFUSION,
    CLIENT_ROWS,
    STOPPED,
    DISCOVERY,
    VECTORS,
    DIAGNOSIS,
    NETWORK,
}
_OWN_FILES |= {"best.safetensors", "last.safetensors"}
_OWN_PICTURES = {"curves", "discovery", "confusion", "targets", "diagnosis"}
_PICTURE_ENDS = {".png", ".pdf", ".svg"}


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
