"""Use of a finished run: evaluate its weights again, predict the classes of new images."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor

from jdfl_lightning.client.evaluation import evaluate as evaluate_models
from jdfl_lightning.client.features import why_no_features
from jdfl_lightning.client.fit import Workspace, initial_backbone
from jdfl_lightning.config import parse_experiment, usable_settings
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.tensors import misfit
from jdfl_lightning.data.folder import IMAGE_SUFFIXES
from jdfl_lightning.joint import Score, predict_class, split_index
from jdfl_lightning.report.markup import csv_cell
from jdfl_lightning.report.run import frame
from jdfl_lightning.server.phase1 import prepare
from jdfl_lightning.storage.folder import SavedRun, read_run
from jdfl_lightning.storage.names import Which
from jdfl_lightning.storage.weights import load_model
from jdfl_lightning.studies.model import AnyImage, ManyImages, TrainedModel, load_folder, load_saved, separate
from jdfl_lightning.ui.display import Display, progress_display

if TYPE_CHECKING:
    import pandas as pd

_BATCH = 64
_CELLS = ["image", "class", "probability", "pseudo_domain"]


def folder_of(run: SavedRun | str | Path) -> Path:
    """Return the folder of a run that is given as an object or by its folder."""
    return run.folder if isinstance(run, SavedRun) else Path(run)


def evaluate(
    run: SavedRun | str | Path,
    score: Score | None = None,
    data_root: str | Path | None = None,
    trust: bool = False,
    progress: bool | Display = True,
) -> pd.DataFrame:
    """Evaluate the saved weights of a run again, on the held-out images of its data set.

    Args:
        run: the run, or its folder.
        score: how a class is predicted; as in the run if not given.
        data_root: folder of the images, if they have moved since the run.
        trust: import whatever classes the run folder names, even if you did not make it here.
        progress: whether progress is shown.

    Returns:
        A row for each kind of weights, best and last: the round and its accuracies, named as in ``metrics.csv``.
    """
    with progress_display(progress) as display:
        return frame(tested(folder_of(run), score, data_root, trust, display)[1], "weights")


def tested(
    folder: Path, score: Score | None, data_root: str | Path | None, trust: bool, display: Display
) -> tuple[Workspace, list[dict[str, Any]]]:
    """Evaluate the weights that a run keeps, best and last, again; the arguments are those of `evaluate`.

    Returns:
        The data and the module; and for each kind of weights, the round and its accuracies.
    """
    found = read_run(folder)
    others = [] if data_root is None else [f"--data.root={data_root}"]
    others += [] if score is None else [f"--score={score}"]
    settings = usable_settings(folder, trust)
    saved = {name: value for name, value in settings.items() if name not in ("logger", "backend")}
    experiment = parse_experiment("evaluate", others, saved)
    models = {which: load_model(folder, which) for which in found.ends}
    backbone = initial_backbone(experiment, pretrained=False)  # the run's weights are saved
    if why_no_features(experiment) is None:
        load_saved(backbone, next(iter(models.values())))
    workspace = prepare(experiment, display, backbone)
    classes, rows = list(experiment.data.class_names), []
    for which, model in models.items():
        known = model.header.class_names
        if known != classes:
            raise InputError(
                f"Expected the images of the run but the {which} weights of {folder} know the classes "
                f"{', '.join(known)} and --data.root has {', '.join(classes)}."
            )
        outputs = model.weights.get("head.weight")
        num_domains = 1 if outputs is None or outputs.ndim == 0 else max(1, len(outputs) // len(known))
        weights, buffers = workspace.initial(num_domains)
        if problem := misfit(model.weights, weights) or misfit(model.buffers, buffers | workspace.network):
            raise InputError(f"Expected the {which} weights of {folder} to be a {experiment.backbone}'s but {problem}.")
    if missing := set(found.domains) ^ set(experiment.data.domain_names):
        raise InputError(f"Expected the domains of the run in --data.root but these differ: {', '.join(missing)}.")
    for which, model in models.items():
        buffers = {name: tensor for name, tensor in model.buffers.items() if name not in workspace.network}
        scores = evaluate_models(workspace, {which: model.weights}, buffers).scores[which]
        rows.append({"weights": which, "round": int(found.ends[which]["round"])} | scores.as_metrics())
    return workspace, rows


def predict(
    run: SavedRun | TrainedModel | str | Path,
    images: ManyImages,
    which: Which | None = None,
    score: Score | None = None,
    trust: bool = False,
) -> pd.DataFrame:
    """Predict the classes of images with the network of a run.

    Args:
        run: the run, or its folder; or an exported model (`from_pretrained`), or its folder.
        images: files, folders of files, images of Pillow, or uint8 arrays or tensors; one or several.
        which: the weights to use, ``"best"`` or ``"last"``; the best if not given, or the last if no best is kept.
        score: how a class is predicted, ``"max"`` or ``"sum"``; as in the run if not given.
        trust: import whatever classes the run folder names, even if you did not make it here.

    Returns:
        A row for each image: ``image`` (its file, or its number), ``class``, ``probability`` of the class (the joint
        probabilities summed over the pseudo-domains) and ``pseudo_domain``, the one whose output is the largest.
    """
    model = run if isinstance(run, TrainedModel) else load_folder(folder_of(run), which, trust)
    found: list[AnyImage] = []
    for image in separate(images):
        found += list_images([Path(image)]) if isinstance(image, (str, Path)) else [image]
    return frame(list(predictions(model, found, score=score)))


def list_images(paths: Sequence[Path]) -> list[Path]:
    """Return the images named, and those in the folders named; an error names a path that does not exist."""
    images: list[Path] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"Expected an image or a folder of images but there is no {path}.")
        images += sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES) if path.is_dir() else [path]
    if not images:
        raise InputError(f"Expected images but found none in {', '.join(map(str, paths))}.")
    return images


def predictions(
    model: TrainedModel,
    images: Sequence[AnyImage],
    unreadable: list[str] | None = None,
    score: Score | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a prediction for each image: a row of what `predict` returns.

    Args:
        model: the network of a run.
        images: the images.
        unreadable: collects the errors of images that cannot be read; if not given, the first one is raised.
        score: how a class is predicted; as in the run if not given.
    """
    head = model.head
    for start in range(0, len(images), _BATCH):
        names: list[Path | int] = []
        inputs: list[Tensor] = []
        for number, image in enumerate(images[start : start + _BATCH], start=start):
            try:
                inputs.append(model.prepare(image))
                names.append(Path(image) if isinstance(image, (str, Path)) else number)
            except InputError as error:
                if unreadable is None:
                    raise
                unreadable.append(str(error))
        if not names:
            continue
        with torch.inference_mode():
            logits = model.logits(torch.cat(inputs))
            classes = predict_class(logits, head.num_classes, score or head.score)
            probabilities = head.class_probabilities(logits).gather(1, classes.unsqueeze(1)).squeeze(1)
            domains, _ = split_index(logits.argmax(dim=1), head.num_classes)
        labels = [model.class_names[number] for number in classes.tolist()]
        for cells in zip(names, labels, probabilities.tolist(), domains.tolist(), strict=True):
            yield dict(zip(_CELLS, cells, strict=True))


def write_predictions(predictions: Iterable[dict[str, Any]], out: TextIO) -> None:
    """Write predictions as CSV: image, class, probability, pseudo_domain."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CELLS)
    for image, label, probability, domain in map(dict.values, predictions):
        writer.writerow([csv_cell(image), csv_cell(label), f"{probability:.4f}", domain])
