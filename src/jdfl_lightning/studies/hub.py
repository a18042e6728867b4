"""A model as a folder for a model hub: safetensors, ``config.json`` and a card; and how it is read back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from jdfl_lightning.core.errors import InputError, StorageError
from jdfl_lightning.core.files import checked, read_small, refuse_links, require_regular, write_whole
from jdfl_lightning.core.tensors import snapshot
from jdfl_lightning.models import own_arguments
from jdfl_lightning.report.markup import render
from jdfl_lightning.storage.folder import SavedRun
from jdfl_lightning.storage.names import DOMAIN_PREFIX, Which
from jdfl_lightning.storage.trust import CONFIG
from jdfl_lightning.storage.weights import ModelHeader, SavedModel
from jdfl_lightning.studies.model import TrainedModel, build_saved, load_to_use, require_safe

_CONFIG, _WEIGHTS, _CARD = "config.json", "model.safetensors", "README.md"
_LIBRARY = "jdfl-lightning"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SHOWN = (
    *("seed_everything", "rounds", "client_fraction", "epochs", "batch_size", "lr", "momentum", "weight_decay"),
    *("num_domains", "head_init"),
)
"""Settings that are listed, where a run has them."""
_DATA = ("num_clients", "test_fraction", "val_fraction", "unseen", "domain_mix", "label_skew", "drop_duplicates")


def plain_header(header: ModelHeader) -> ModelHeader:
    """Return the description of a model without what is of no use elsewhere: files of weights, the cache."""
    own = own_arguments(header.backbone, header.backbone_args)
    arguments = {n: v for n, v in header.backbone_args.items() if n not in own or n in ("freeze", "hidden")}
    return replace(header, backbone_args=arguments, network="")


def write_hub(folder: Path, saved: SavedModel, run: SavedRun, which: Which) -> None:
    """Write a model to a new or empty folder.

    Args:
        folder: the folder.
        saved: all of its tensors, and its description.
        run: the run that it comes from, for the card.
        which: which of the run's weights it has.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"Expected to write {folder} but: {error.strerror or error}.") from error
    about = {"library": _LIBRARY, "version": version(_LIBRARY), **asdict(saved.header)}
    about.pop("network")
    write_whole(folder / _WEIGHTS, save(snapshot(saved.weights | saved.buffers), {"format": "pt"}))
    write_whole(folder / _CARD, model_card(saved.header, run, which).encode())
    write_whole(folder / _CONFIG, json.dumps(about, indent=2).encode())


def from_pretrained(source: str | Path, trust: bool = False, preprocess: bool = True) -> TrainedModel:
    """Read a model that ``export --format hub`` wrote; nothing in it is executed.

    Args:
        source: the folder; or, if there is none of this name, the id of a model on the Hugging Face hub, which needs
            the package huggingface_hub.
        trust: import whatever classes it names, and use whatever arguments it gives them.
        preprocess: whether the network takes files, images of Pillow, and uint8 arrays or tensors; else it takes float
            (B, 3, size, size), normalised as in training.
    """
    folder = Path(source)
    if folder.exists():
        refuse_links(folder, ())
    else:
        folder = _fetched(str(source))
    try:
        about = json.loads(read_small(folder / _CONFIG).decode())
        if not isinstance(about, dict) or about.get("library") != _LIBRARY:
            raise ValueError(f"it is not of {_LIBRARY}")
        header = checked(ModelHeader, {key: value for key, value in about.items() if key not in ("library", "version")})
        require_regular(folder / _WEIGHTS)
        tensors = load_file(folder / _WEIGHTS)
    except FileNotFoundError as error:
        raise InputError(f"Expected an exported model but {folder} has no {Path(error.filename).name}.") from error
    except Exception as error:  # whatever others have written
        raise InputError(f"Expected an exported model but {folder} cannot be read: {error}.") from error
    require_safe(folder, header, vouched=trust)
    return build_saved(SavedModel(tensors, {}, header), preprocess)


def _fetched(name: str) -> Path:
    """Fetch a model from the Hugging Face hub."""
    if not _HUB_ID.fullmatch(name):
        raise InputError(f"Expected a folder of an exported model, or the id of one on the hub, but got {name!r}.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InputError(
            f"Expected a folder but there is no {name}, and huggingface_hub is not installed to look for it on the hub."
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=[_CONFIG, _WEIGHTS]))
    except Exception as error:  # no network, no such model, no permission
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"Expected a folder, or a model on the hub, but {name} is neither: {reason}") from error


def load_folder(folder: Path, which: Which | None = None, trust: bool = False) -> TrainedModel:
    """Build the network of a run folder, or of an exported model's folder.

    Args:
        folder: the folder.
        which: best or last weights of a run; None for the best, or the last if the run keeps no best.
        trust: whether the user trusts the folder, whoever made it.
    """
    if not folder.is_dir():
        raise InputError(f"Expected a run folder but there is no folder {folder}.")
    if (folder / CONFIG).exists() or not (folder / _CONFIG).is_file():
        return load_to_use(folder, which, trust)
    if which is not None:
        raise InputError(f"Expected --weights to be left out, as {folder} is an exported model, but got {which}.")
    return from_pretrained(folder, trust, preprocess=False)


def model_card(header: ModelHeader, run: SavedRun, which: Which) -> str:
    """Return the card as Markdown, with the front matter that model hubs read.

    Args:
        header: description of the model.
        run: the run that it comes from.
        which: which of the run's weights it has.
    """
    config, row = run.config, run.ends[which]
    data = config.get("data", {})
    arguments = data.get("init_args", {}) if isinstance(data, dict) else {}
    name, algorithm, supervision = (_class(config.get(key)) for key in ("data", "algorithm", "supervision"))
    found = run.discovery
    protocol = [("data", name), *((key, arguments[key]) for key in _DATA if key in arguments)]
    protocol += [("algorithm", algorithm), ("supervision", supervision)]
    protocol += [(key, config[key]) for key in _SHOWN if config.get(key) is not None]
    domains = {key.removeprefix(DOMAIN_PREFIX): row[key] for key in row if key.startswith(DOMAIN_PREFIX)}
    accuracies = {"all domains": row["test/acc"], "the worst domain": row["test/acc_worst"]} | domains
    return render(
        "card.md",
        header=header,
        data=name,
        num_domains=None if found is None else found["num_domains"],
        protocol=protocol,
        round=int(row["round"]),
        rounds=len(run.rows),
        accuracies={key: "-" if math.isnan(value) else f"{100 * value:.2f} %" for key, value in accuracies.items()},
        limits=list(_limits(header, run, which)),
    )


def _limits(header: ModelHeader, run: SavedRun, which: Which) -> Iterable[str]:
    if which == "best" and run.select == "test":
        yield "The round was picked by these same held-out images, so that the accuracy is flattered."
    yield "One run, with one seed: other seeds give other numbers."
    yield "Other domains and other things were not tested: the network names one of its classes for any image."
    yield "Clients were simulated, or held by sites of one federation; what they hold decides what the network knows."
    epsilon = next((value for key, value in run.last.items() if key.endswith("epsilon")), None)
    if epsilon is not None and math.isfinite(epsilon):
        yield f"Client-level differential privacy with epsilon {epsilon:.3g}."
    else:
        yield "No differential privacy: weights may reveal something of the training images."
    if header.backbone != "PaperCNN":
        yield f"The network {header.backbone} may have been pretrained: its weights have terms of their own."


def _class(value: Any) -> str:
    """Return the name of a class of the settings."""
    return str(value.get("class_path", "")).rpartition(".")[2] if isinstance(value, dict) else str(value)
