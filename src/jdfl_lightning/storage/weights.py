"""The saved weights of a run, best and last."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval, Len

from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.files import checked
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.data.transforms import Normalize, Resize, checked_normalize
from jdfl_lightning.joint import Score
from jdfl_lightning.storage.checkpoint import load_record, save_record
from jdfl_lightning.storage.folder import require_own_files
from jdfl_lightning.storage.names import Count, Text, Which


@dataclass(frozen=True)
class ModelHeader:
    """Description of saved weights."""

    backbone: Annotated[str, Len(1, 300)]
    size: Annotated[int, Interval(ge=1, le=10_000)]
    """Height and width of the images."""
    class_names: Annotated[list[Text], Len(1, 1_000_000)]
    score: Score = "max"
    """How classes were scored in the evaluation."""
    round: Count = 0
    """The round of the weights."""
    scores: dict[Text, float] = field(default_factory=dict)
    """Accuracies, by their names in ``metrics.csv``; empty if the round was not evaluated."""
    backbone_args: dict[Text, Any] = field(default_factory=dict)
    """Further arguments of the backbone."""
    normalize: Normalize = "unit"
    """How pixels became the network's input."""
    resize: Resize = "squash"
    """How images became squares."""
    model: dict[Text, Any] | None = None
    """The class that turns images into logits, as class_path and init_args; null for the head of the backbone's
    features."""

    def __post_init__(self) -> None:
        checked_normalize(self.normalize)


@dataclass(frozen=True)
class SavedModel:
    """A model with all that is needed to use it."""

    weights: Tensors
    buffers: Tensors
    header: ModelHeader

    def save(self, folder: Path, which: Which) -> None:
        """Write the model as the run's best or last one."""
        record = {"weights": self.weights, "buffers": self.buffers}
        save_record(folder / f"{which}.safetensors", record, asdict(self.header))


def kept_weights(folder: Path) -> Which:
    """Return which of a run's weights to use: the best, or the last if it keeps no best."""
    files = {which: folder / f"{which}.safetensors" for which in ("best", "last")}
    return "last" if files["last"].exists() and not files["best"].exists() else "best"


def load_model(folder: Path, which: Which) -> SavedModel:
    """Read a run's best or last model."""
    require_own_files(folder)
    file = folder / f"{which}.safetensors"
    if which == "best" and kept_weights(folder) == "last":
        raise InputError(
            f"Expected the best weights of a run but {folder} has only its last, as a private run or one with "
            "--select last does: use --weights last."
        )
    record, about = load_record(file)
    try:
        return SavedModel(record["weights"], record.get("buffers", {}), checked(ModelHeader, about))
    except (KeyError, ValueError) as error:
        raise InputError(f"Expected the weights of a run but {file} is something else: {error}.") from error
