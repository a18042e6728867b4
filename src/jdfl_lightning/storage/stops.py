"""``stopped.json``: a run that a callback ended before its last round."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from jdfl_lightning.core.errors import StorageError, plain
from jdfl_lightning.core.files import checked, read_json, write_whole
from jdfl_lightning.storage.metrics import last_round
from jdfl_lightning.storage.names import STOPPED, Count, Text


@dataclass(frozen=True)
class Stop:
    """After which round a run was stopped, by which callback and why."""

    round: Count
    callback: Text
    reason: Text

    def __str__(self) -> str:
        """Return who stopped the run, and why, as one line."""
        return plain(f"{self.callback}: {self.reason}")


def save_stop(folder: Path, stop: Stop) -> None:
    """Mark a run as finished after a round; called when all else is written."""
    write_whole(folder / STOPPED, json.dumps(asdict(stop)).encode())


def read_stop(folder: Path) -> Stop | None:
    """Read how a run was stopped; None if it was not, or if it has gone on since."""
    if not (folder / STOPPED).exists():
        return None
    try:
        stop = checked(Stop, read_json(folder / STOPPED))
    except (OSError, ValueError) as error:
        raise StorageError(f"Expected why the run stopped but {folder / STOPPED} cannot be read: {error}.") from error
    return stop if stop.round == last_round(folder) else None
