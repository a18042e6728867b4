"""The network of a finished run, or of an exported model, ready to use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import Tensor, nn

from jdfl_lightning.client.fit import build_module
from jdfl_lightning.client.module import SUPPLIED, JointModule
from jdfl_lightning.core.errors import InputError, plain, without_stop
from jdfl_lightning.core.files import checked, read_small, refuse_links, require_regular
from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.tensors import misfit
from jdfl_lightning.data.cache import decode, resized
from jdfl_lightning.data.transforms import Normalize, Resize, to_input
from jdfl_lightning.joint import JointHead
from jdfl_lightning.models import OWN_ARGUMENTS, build_backbone, num_features
from jdfl_lightning.storage.names import Which
from jdfl_lightning.storage.trust import CONFIG, known_backbone, own_settings, require_known
from jdfl_lightning.storage.weights import ModelHeader, SavedModel, kept_weights, load_model

HUB_CONFIG, HUB_WEIGHTS, LIBRARY = "config.json", "model.safetensors", "jdfl-lightning"
"""Files of an exported model's folder, and whose they are."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
AnyImage: TypeAlias = str | Path | Image.Image | np.ndarray | Tensor
"""An image: a file, an image of Pillow, or uint8 values (H, W, 3) or (3, H, W)."""
ManyImages: TypeAlias = AnyImage | Sequence[AnyImage]
"""One image or several; an array or a tensor of four dimensions is several."""


class TrainedModel(nn.Module):
    """The network of a run, in eval mode: images -> joint logits (B, M*C).

    ``model.head`` has the class: ``model.head.predict(logits)``, ``model.head.class_probabilities(logits)``. The output
    of class c and pseudo-domain d is number d * C + c.

    Args:
        backbone: gives features.
        head: the joint head.
        class_names: names of the C classes.
        size: height and width of the images in training.
        preprocess: whether `forward` takes images of any size and prepares them itself; else it takes the network's
            input, float (B, 3, size, size), normalised as in training.
        normalize: how colours were normalised in training.
        resize: how images were resized in training.
        module: turns the network's input into logits, with this backbone and head; not given if they do so alone.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: JointHead,
        class_names: Sequence[str],
        size: int,
        preprocess: bool = False,
        normalize: Normalize = "unit",
        resize: Resize = "squash",
        module: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head
        self.class_names, self.size, self.preprocess = list(class_names), size, preprocess
        self.normalize, self.resize = normalize, resize
        self.module = module
        self.eval()

    def forward(self, images: Tensor | ManyImages) -> Tensor:
        """Return joint logits (B, M*C)."""
        return self.logits(self.prepare(images) if self.preprocess else images)  # type: ignore[arg-type]

    def logits(self, inputs: Tensor) -> Tensor:
        """Return joint logits (B, M*C) of the network's input."""
        logits: Tensor = self.head(self.backbone(inputs)) if self.module is None else self.module(inputs)
        return logits

    def prepare(self, images: ManyImages) -> Tensor:
        """Turn images into the network's input, as it was done in training: upright, RGB, resized, normalised.

        Args:
            images: files, images of Pillow, or uint8 arrays or tensors, channels last or first.
        """
        pixels = np.stack([self._pixels(image) for image in separate(images)])
        return to_input(torch.from_numpy(pixels), self.normalize).to(self.head.weight.device)

    def _pixels(self, image: AnyImage) -> np.ndarray:
        if isinstance(image, (str, Path)):
            return decode(Path(image), self.size, self.resize)
        upright = ImageOps.exif_transpose(image) if isinstance(image, Image.Image) else _as_image(image)
        return resized(upright, self.size, self.resize)


def separate(images: ManyImages) -> list[AnyImage]:
    """Return one image or several as a list."""
    if isinstance(images, (str, Path, Image.Image)) or (isinstance(images, (np.ndarray, Tensor)) and images.ndim == 3):
        return [images]
    found = list(images)
    if not found:
        raise InputError("Expected images but got none.")
    return found


def _as_image(values: np.ndarray | Tensor) -> Image.Image:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim == 3 and array.shape[-1] != 3 and array.shape[0] == 3:
        array = array.transpose(1, 2, 0)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3:
        raise InputError(
            f"Expected images as uint8 values (H, W, 3) or (3, H, W) but got {array.dtype} values {array.shape}."
        )
    return Image.fromarray(np.ascontiguousarray(array))


def load_to_use(
    folder: Path, which: Which | None = None, trust: bool = False, preprocess: bool = False
) -> TrainedModel:
    """Build the network of a run; raise an `InputError` if that would import an unknown package.

    Args:
        folder: the run folder.
        which: best or last weights; None for the best, or the last if the run keeps no best.
        trust: whether the user trusts the folder, whoever made it.
        preprocess: whether the network takes images of any size.
    """
    saved, own = load_model(folder, which or kept_weights(folder)), own_settings(folder)
    header = saved.header
    same = (own.get("backbone"), own.get("backbone_args", {})) == (header.backbone, header.backbone_args)
    require_safe(folder, header, trust or (same and header.model in (None, own.get("model"))))
    return build_saved(saved, preprocess)


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
        about = json.loads(read_small(folder / HUB_CONFIG).decode())
        if not isinstance(about, dict) or about.get("library") != LIBRARY:
            raise ValueError(f"it is not of {LIBRARY}")
        header = checked(ModelHeader, {key: value for key, value in about.items() if key not in ("library", "version")})
        require_regular(folder / HUB_WEIGHTS)
        tensors = load_file(folder / HUB_WEIGHTS)
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
        return Path(snapshot_download(name, allow_patterns=[HUB_CONFIG, HUB_WEIGHTS]))
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
    if not (folder / CONFIG).exists() and not (folder / HUB_CONFIG).is_file():
        raise InputError(f"Expected a run folder but {folder} has no {CONFIG}.")
    if (folder / CONFIG).exists():
        return load_to_use(folder, which, trust)
    if which is not None:
        raise InputError(f"Expected --weights to be left out, as {folder} is an exported model, but got {which}.")
    return from_pretrained(folder, trust, preprocess=False)


def require_safe(folder: Path, header: ModelHeader, vouched: bool) -> None:
    """Raise an `InputError` if building a network would import an unknown package, or give it a stranger's arguments.

    Args:
        folder: where the description is from.
        header: the description.
        vouched: whether the user trusts the folder, or made it.
    """
    backbone, arguments = header.backbone, header.backbone_args
    strangers = [] if known_backbone(backbone) else [backbone]
    strangers += [] if header.model is None else [plain(str(header.model.get("class_path")))]
    require_known(folder, [] if vouched else strangers)
    others = {name: value for name, value in arguments.items() if name not in OWN_ARGUMENTS}
    if not vouched and others:
        raise InputError(
            f"{folder} was not made by you on this machine, or was edited, and gives its backbone arguments: "
            f"{plain(str(others))}. If you trust whoever made it, pass --trust true."
        )


def build_saved(saved: SavedModel, preprocess: bool) -> TrainedModel:
    """Build the network of a saved model; its description must be safe to use."""
    about, num_classes = saved.header, len(saved.header.class_names)
    backbone = build_backbone(about.backbone, about.size, about.backbone_args, pretrained=False)  # its own are saved
    tensors = saved.weights | saved.buffers
    with _of(about):
        part = None
        if about.model is not None:  # the user's subclass
            part = Part(str(about.model["class_path"]), **about.model.get("init_args", {}))
            part.check("--model", JointModule, SUPPLIED)
        outputs, features = tensors["head.weight"].shape
        if outputs % num_classes or not outputs:
            raise ValueError(f"its head has no multiple of {num_classes} outputs")
        width, score = num_features(backbone, about.size), about.score
        module = build_module(part, backbone, in_features=width, num_classes=num_classes, score=score, domains=None)
        module.head = JointHead(features, num_classes, outputs // num_classes, score=score)
        live = module.trainable() | module.statistics()
        if problem := misfit(tensors, live):
            raise ValueError(problem)
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(tensors[name])
    own = None if part is None else module  # else backbone and head are all of it
    look = about.normalize, about.resize
    return TrainedModel(module.backbone, module.head, about.class_names, about.size, preprocess, *look, own)


def load_saved(backbone: nn.Module, saved: SavedModel) -> None:
    """Load the weights of a saved model's backbone; raise an `InputError` if they are of another network."""
    tensors, prefix = saved.weights | saved.buffers, "backbone."
    with _of(saved.header):
        backbone.load_state_dict(
            {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        )


@contextmanager
def _of(header: ModelHeader) -> Iterator[None]:
    """Say in an `InputError` that weights are not of the network that they are described as."""
    try:
        yield
    except (RuntimeError, KeyError, ValueError) as error:
        raise InputError(
            f"Expected the weights of a {header.backbone} but they are of something else: {without_stop(error)}."
        ) from error
