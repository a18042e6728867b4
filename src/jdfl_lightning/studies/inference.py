"""Use of a finished run: test its weights again, predict the classes of new images."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from jdfl_lightning.client.evaluation import Scores, evaluate
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import InputError, without_stop
from jdfl_lightning.core.tensors import misfit
from jdfl_lightning.data.cache import decode
from jdfl_lightning.data.folder import IMAGE_SUFFIXES
from jdfl_lightning.data.loader import to_input
from jdfl_lightning.joint import Score, class_probabilities, predict_class, split_index
from jdfl_lightning.models import build_backbone
from jdfl_lightning.report.markup import csv_cell
from jdfl_lightning.server.preparation import prepare
from jdfl_lightning.storage.folder import read_run
from jdfl_lightning.storage.names import Which
from jdfl_lightning.storage.trust import known_backbone, own_settings, require_known
from jdfl_lightning.storage.weights import SavedModel, load_model
from jdfl_lightning.ui.display import Display

_BATCH = 64


def load_to_use(folder: Path, which: Which, trust: bool) -> SavedModel:
    """Read a run's model for use; raise an `InputError` if that would import an unknown package.

    Args:
        folder: the run folder.
        which: best or last.
        trust: whether the user trusts the folder, whoever made it.
    """
    model = load_model(folder, which)
    backbone = model.header.backbone
    vouched = trust or own_settings(folder).get("backbone") == backbone
    require_known(folder, [] if vouched or known_backbone(backbone) else [backbone])
    return model


def test_run(experiment: Experiment, folder: Path, display: Display) -> dict[Which, Scores]:
    """Evaluate the weights that a run keeps, best and last, on the held-out images of its experiment."""
    models = {which: load_model(folder, which) for which in read_run(folder).ends}
    workspace = prepare(experiment, display)
    for which, model in models.items():
        known = model.header.class_names
        if known != list(experiment.data.class_names):
            raise InputError(
                f"Expected the images of the run but the {which} weights of {folder} know the classes "
                f"{', '.join(known)} and --data.root has {', '.join(experiment.data.class_names)}."
            )
        outputs = model.weights.get("head.weight")
        num_domains = 1 if outputs is None or outputs.ndim == 0 else max(1, len(outputs) // len(known))
        weights, buffers = workspace.initial(num_domains)
        if problem := misfit(model.weights, weights) or misfit(model.buffers, buffers):
            raise InputError(f"Expected the {which} weights of {folder} to be a {experiment.backbone}'s but {problem}.")
    return {which: evaluate(workspace, {which: m.weights}, m.buffers).scores[which] for which, m in models.items()}


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for an image."""

    image: Path
    label: str
    probability: float
    """Probability of the class: the joint probabilities summed over the pseudo-domains."""
    domain: int
    """The pseudo-domain whose output is the largest."""


def list_images(paths: Sequence[Path]) -> list[Path]:
    """Return the images named, and those in the folders named; an error names a path that does not exist."""
    images: list[Path] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"Expected an image or a folder of images but there is no {path}.")
        below = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES) if path.is_dir() else [path]
        images += below
    if not images:
        raise InputError(f"Expected images but found none in {', '.join(map(str, paths))}.")
    return images


def predict(
    model: SavedModel, images: Sequence[Path], unreadable: list[str] | None = None, score: Score | None = None
) -> Iterator[Prediction]:
    """Yield a prediction for each image.

    Args:
        model: the model of a run.
        images: the image files.
        unreadable: collects the errors of images that cannot be read; if not given, the first one is raised.
        score: how a class is predicted; as in the run if not given.
    """
    about = model.header
    num_classes = len(about.class_names)
    backbone = build_backbone(about.backbone, about.size).eval()
    head = {name: tensor.float() for name, tensor in _of(model, "head.").items()}
    try:
        backbone.load_state_dict({n.removeprefix("backbone."): t for n, t in _of(model, "backbone.").items()})
        if head["head.weight"].ndim != 2 or len(head["head.weight"]) % num_classes or not len(head["head.weight"]):
            raise ValueError(f"its head has no multiple of {num_classes} outputs")
    except (RuntimeError, KeyError, ValueError) as error:
        raise InputError(
            f"Expected the weights of a {about.backbone} but they are of something else: {without_stop(error)}."
        ) from error
    for start in range(0, len(images), _BATCH):
        paths, pixels = [], []
        for path in images[start : start + _BATCH]:
            try:
                pixels.append(decode(path, about.size))
                paths.append(path)
            except InputError as error:
                if unreadable is None:
                    raise
                unreadable.append(str(error))
        if not paths:
            continue
        with torch.inference_mode():
            features = backbone(to_input(torch.from_numpy(np.stack(pixels))))
            logits = torch.nn.functional.linear(features, head["head.weight"], head["head.bias"])
            classes = predict_class(logits, num_classes, score or about.score)
            probabilities = class_probabilities(logits, num_classes).gather(1, classes.unsqueeze(1)).squeeze(1)
            domains, _ = split_index(logits.argmax(dim=1), num_classes)
        for path, label, probability, domain in zip(
            paths, classes.tolist(), probabilities.tolist(), domains.tolist(), strict=True
        ):
            yield Prediction(path, about.class_names[label], probability, domain)


def _of(model: SavedModel, prefix: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in (model.weights | model.buffers).items() if name.startswith(prefix)}


def write_predictions(predictions: Iterator[Prediction], out: TextIO) -> None:
    """Write predictions as CSV: image, class, probability, pseudo_domain."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["image", "class", "probability", "pseudo_domain"])
    for item in predictions:
        writer.writerow([csv_cell(item.image), csv_cell(item.label), f"{item.probability:.4f}", item.domain])
