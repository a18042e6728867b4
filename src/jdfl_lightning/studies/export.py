"""The model of a run as a file for others: ONNX, torch, Lightning, or a folder for a model hub."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import lightning
import torch
from safetensors.torch import save
from torch import Tensor, nn

from jdfl_lightning.client.module import JointModule
from jdfl_lightning.core.errors import InputError, StorageError, require_choice, without_stop
from jdfl_lightning.core.files import write_whole
from jdfl_lightning.core.tensors import snapshot
from jdfl_lightning.data.transforms import to_input
from jdfl_lightning.joint import TargetRule
from jdfl_lightning.models import own_arguments
from jdfl_lightning.report.markup import render
from jdfl_lightning.storage.folder import SavedRun, read_run
from jdfl_lightning.storage.names import DOMAIN_PREFIX, Which
from jdfl_lightning.storage.weights import ModelHeader, SavedModel, kept_weights, load_model
from jdfl_lightning.studies.inference import folder_of
from jdfl_lightning.studies.model import HUB_CONFIG, HUB_WEIGHTS, LIBRARY, TrainedModel, load_to_use

Format = Literal["onnx", "torch", "lightning", "hub"]
"""onnx: for ONNX Runtime. torch: a program of torch.export. lightning: a checkpoint of JointModule. hub: a folder."""
_NAMES = {"onnx": "model.onnx", "torch": "model.pt2", "lightning": "model.ckpt", "hub": "model"}
OUTPUTS = ("label", "probabilities", "pseudo_domain")
"""Names of what an exported network gives."""
_TRIAL = 3
"""Images in the batch that an export is made and checked with."""
_CLOSE = 1e-4
"""Largest difference of a probability between torch and ONNX Runtime."""
_SHOWN = (
    *("seed_everything", "rounds", "client_fraction", "epochs", "batch_size", "lr", "momentum", "weight_decay"),
    *("num_domains", "head_init"),
)
"""Settings that are listed, where a run has them."""
_DATA = ("num_clients", "test_fraction", "val_fraction", "unseen", "domain_mix", "label_skew", "drop_duplicates")


class Classifier(nn.Module):
    """A network with its preprocessing: uint8 images (B, size, size, 3) -> label, class probabilities, pseudo-domain.

    Args:
        model: the network of a run.
    """

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the predicted class (B,), the probabilities of all classes (B, C) and the pseudo-domain (B,)."""
        head, logits = self.model.head, self.model.logits(to_input(images, self.model.normalize))
        domains = logits.argmax(dim=1) // head.num_classes  # `split_index` looks at values, which no export can
        return head.predict(logits), head.class_probabilities(logits), domains


def export(
    run: SavedRun | str | Path,
    format: Format = "torch",
    output: str | Path | None = None,
    which: Which | None = None,
    trust: bool = False,
) -> Path:
    """Write the network of a run for use elsewhere, with its preprocessing and the names of its classes.

    `onnx` and `torch` take uint8 images (B, size, size, 3), already resized, and give the predicted class, the
    probabilities of all classes and the pseudo-domain.

    Args:
        run: the run, or its folder.
        format: ``"onnx"``, which is checked in ONNX Runtime; ``"torch"``, a program of torch.export, which needs torch
            alone; ``"lightning"``, a checkpoint of `JointModule`; ``"hub"``, a folder of safetensors, ``config.json``
            and a model card, which `from_pretrained` reads.
        output: the file, or the folder; one named after the format in the working folder if not given.
        which: the weights, ``"best"`` or ``"last"``; the best if not given, or the last if no best is kept.
        trust: import whatever classes the run folder names, even if you did not make it here.

    Returns:
        The file, or the folder.
    """
    require_choice("--format", format, get_args(Format))
    folder = folder_of(run)
    found, kept = read_run(folder), which or kept_weights(folder)
    place = Path(_NAMES[format] if output is None else output)
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise InputError(f"Expected --output to be new but {place} exists: choose another, or remove it.")
    model, saved = load_to_use(folder, kept, trust), load_model(folder, kept)
    backbone, arguments = saved.header.backbone, saved.header.backbone_args
    local = own_arguments(backbone, arguments).keys() - {"freeze", "hidden"}  # files of weights, the cache
    used = {name: value for name, value in arguments.items() if name not in local}
    header = replace(saved.header, backbone_args=used, network="")
    if format == "hub":
        _write_hub(place, replace(saved, header=header), found, kept)
        return place
    writers = {"onnx": _onnx, "torch": _torch, "lightning": _lightning}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what exporters say of themselves
        content = writers[format](model, header)
    write_whole(place, content)
    return place


def _about(header: ModelHeader) -> dict[str, str]:
    """Return what a user of an exported file has to know, as texts."""
    values = asdict(header)
    names = ("class_names", "size", "resize", "normalize", "score", "round", "scores", "backbone")
    return {name: json.dumps(values[name]) for name in names}


def _trial(model: TrainedModel, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (_TRIAL, model.size, model.size, 3), dtype=torch.uint8, generator=generator)


def _torch(model: TrainedModel, header: ModelHeader) -> bytes:
    out = io.BytesIO()
    program = _exported(model, torch.export.export)
    torch.export.save(program, out, extra_files={f"{name}.json": text for name, text in _about(header).items()})
    return out.getvalue()


def _exported(model: TrainedModel, make: Callable[..., Any], **options: Any) -> Any:
    """Return what an exporter of torch makes of a network, for batches of any number of images."""
    dynamic = ({0: torch.export.Dim("batch", min=1)},)
    try:
        with torch.no_grad():
            return make(Classifier(model).cpu(), (_trial(model),), dynamic_shapes=dynamic, **options)
    except InputError:
        raise
    except Exception as error:  # networks fail in many ways
        reason = without_stop(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
        raise InputError(
            f"Expected a network that torch can export but {type(model.backbone).__name__}: {reason}."
        ) from error


def _onnx(model: TrainedModel, header: ModelHeader) -> bytes:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch.onnx needs it
    except ImportError as error:
        raise InputError(
            "Expected onnx to be installed for --format onnx: pip install 'jdfl-lightning[onnx]'."
        ) from error
    names = {"input_names": ["images"], "output_names": list(OUTPUTS)}
    proto = _exported(model, torch.onnx.export, dynamo=True, verbose=False, **names).model_proto
    onnx.helper.set_model_props(proto, _about(header))
    content: bytes = proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    classifier = Classifier(model)
    for seed in range(2):
        images = _trial(model, seed)
        with torch.no_grad():
            expected = classifier(images)[1]
        found = torch.from_numpy(session.run([OUTPUTS[1]], {"images": images.numpy()})[0])
        if not torch.allclose(found, expected, rtol=0, atol=_CLOSE):
            raise InputError(
                f"Expected the exported network to give the probabilities of torch but they differ by up to "
                f"{float((found - expected).abs().max()):.2g} in ONNX Runtime."
            )
    return content


def _lightning(model: TrainedModel, header: ModelHeader) -> bytes:
    head = model.head
    if model.module is not None:
        raise InputError(
            f"Expected a network of backbone and head for --format lightning but {type(model.module).__name__} has its "
            "own forward: use another format."
        )
    targets = TargetRule(torch.eye(head.num_domains)) if head.num_domains > 1 else None
    module = JointModule(model.backbone, head.in_features, head.num_classes, targets, score=head.score)
    module.head.load_state_dict(head.state_dict())
    checkpoint: dict[str, Any] = {
        "state_dict": module.state_dict(),
        "hyper_parameters": dict(module.hparams),
        "pytorch-lightning_version": lightning.__version__,
        "epoch": 0,
        "global_step": 0,
        "jdfl": asdict(header),
    }
    module.on_save_checkpoint(checkpoint)
    out = io.BytesIO()
    torch.save(checkpoint, out)
    return out.getvalue()


def _write_hub(folder: Path, saved: SavedModel, run: SavedRun, which: Which) -> None:
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
    about = {"library": LIBRARY, "version": version(LIBRARY), **asdict(saved.header)}
    about.pop("network")
    write_whole(folder / HUB_WEIGHTS, save(snapshot(saved.weights | saved.buffers), {"format": "pt"}))
    write_whole(folder / "README.md", _card(saved.header, run, which).encode())
    write_whole(folder / HUB_CONFIG, json.dumps(about, indent=2).encode())


def _card(header: ModelHeader, run: SavedRun, which: Which) -> str:
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
    protocol = [("data", name), *((key, arguments[key]) for key in _DATA if key in arguments)]
    protocol += [("algorithm", algorithm), ("supervision", supervision)]
    protocol += [(key, config[key]) for key in _SHOWN if config.get(key) is not None]
    domains = {key.removeprefix(DOMAIN_PREFIX): row[key] for key in row if key.startswith(DOMAIN_PREFIX)}
    accuracies = {"all domains": row["test/acc"], "the worst domain": row["test/acc_worst"]} | domains
    return render(
        "card.md",
        header=header,
        data=name,
        num_domains=None if run.discovery is None else run.discovery["num_domains"],
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
