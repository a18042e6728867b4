"""The saved weights of a run, best and last."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Interval, Len

from jdfl_lightning.core.errors import InputError, StorageError
from jdfl_lightning.core.files import checked
from jdfl_lightning.core.tensors import Tensors, misfit
from jdfl_lightning.data.transforms import Normalize, Resize, checked_normalize
from jdfl_lightning.joint import Score
from jdfl_lightning.storage.folder import require_own_files
from jdfl_lightning.storage.names import NETWORK, Count, Text, Which
from jdfl_lightning.storage.records import load_record, save_record, stored_digest


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
    network: Text = ""
    """Checksum of the run's frozen network, which is in a file of its own; empty if all tensors are here."""

    def __post_init__(self) -> None:
        checked_normalize(self.normalize)


@dataclass(frozen=True)
class SavedModel:
    """A model with all that is needed to use it.

    A frozen network is saved once, by `save_network`: it is among the buffers of a model that is read, not of one that
    is saved.
    """

    weights: Tensors
    buffers: Tensors
    header: ModelHeader

    def save(self, folder: Path, which: Which) -> None:
        """Write the model as the run's best or last one."""
        record = {"weights": self.weights, "buffers": self.buffers}
        save_record(folder / f"{which}.safetensors", record, asdict(self.header))


def save_network(folder: Path, network: Tensors, name: str) -> str:
    """Write a run's frozen network, once; if it is there, check that it is the same. Return its checksum.

    Args:
        folder: the run folder.
        network: named tensors; nothing is written if there are none.
        name: the backbone's name.
    """
    if not network:
        return ""
    file = folder / NETWORK
    if not file.exists():
        save_record(file, {"network": network})
    elif (problem := misfit(known := _read_network(file), network)) or any(
        not torch.equal(known[key], tensor) for key, tensor in network.items()
    ):
        raise StorageError(
            f"Expected the weights of {name} (--backbone_args.weights) that the run began with but they differ from "
            f"those in {file}{f': {problem}' if problem else ''}."
        )
    return stored_digest(file)


def _read_network(file: Path) -> Tensors:
    return load_record(file)[0].get("network", {})


def kept_weights(folder: Path) -> Which:
    """Return which of a run's weights to use: the best, or the last if it keeps no best."""
    files = {which: folder / f"{which}.safetensors" for which in ("best", "last")}
    return "last" if files["last"].exists() and not files["best"].exists() else "best"


def load_model(folder: Path, which: Which, network: bool = True) -> SavedModel:
    """Read a run's best or last model.

    Args:
        folder: the run folder.
        which: best or last.
        network: whether a frozen network is read too; the run that saved it has it.
    """
    require_own_files(folder)
    file = folder / f"{which}.safetensors"
    if which == "best" and kept_weights(folder) == "last":
        raise InputError(
            f"Expected the best weights of a run but {folder} has only its last, as a private run or one with "
            "--select last does: use --weights last."
        )
    record, about = load_record(file)
    try:
        model = SavedModel(record["weights"], record.get("buffers", {}), checked(ModelHeader, about))
    except (KeyError, ValueError) as error:
        raise InputError(f"Expected the weights of a run but {file} is something else: {error}.") from error
    if not model.header.network or not network:
        return model
    if not (folder / NETWORK).exists() or stored_digest(folder / NETWORK) != model.header.network:
        raise StorageError(f"Expected the network that {file} was trained on but {folder / NETWORK} is not it.")
    return replace(model, buffers=_read_network(folder / NETWORK) | model.buffers)
