"""What happens to images between decoding and the network: resize, augmentation, normalisation."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

from helpers import contents, experiment, finished, same
from jdfl_lightning import (
    PACS,
    DigitsDomains,
    DomainDataModule,
    ImageFolderDomains,
    LocalBackend,
    OfficeCaltech,
    PoolBackend,
    SiteFolders,
    fit,
)
from jdfl_lightning.cli import main
from jdfl_lightning.config import as_dict, parse_experiment
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.parts import parameters
from jdfl_lightning.data import cache
from jdfl_lightning.data.base import option_defaults
from jdfl_lightning.data.options import DataOptions
from jdfl_lightning.data.transforms import Augmentation, Resize, to_input
from jdfl_lightning.joint import predict_class
from jdfl_lightning.models import build_backbone
from jdfl_lightning.server.resume import fixed_settings
from jdfl_lightning.storage.records import load_record, save_record
from jdfl_lightning.storage.weights import load_model
from jdfl_lightning.studies.inference import predictions
from jdfl_lightning.studies.model import load_to_use

FLIP = {"class_path": "torchvision.transforms.v2.RandomHorizontalFlip", "init_args": {"p": 0.5}}
CHANGE: list[Any] = [FLIP, "RandAugment"]


def digits(**options: Any) -> DigitsDomains:
    return DigitsDomains(size=8, num_clients=4, **options)


# --- normalisation


@pytest.mark.parametrize(
    ("normalize", "mean", "std"),
    [
        ("unit", [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
        ("imagenet", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ({"mean": [0.1, 0.2, 0.3], "std": [1, 2, 3]}, [0.1, 0.2, 0.3], [1, 2, 3]),
    ],
)
def test_normalisation_is_torchvisions(normalize: Any, mean: list[float], std: list[float]) -> None:
    images = torch.randint(0, 256, (5, 4, 4, 3), dtype=torch.uint8)
    chain = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
    found = to_input(images, normalize)
    torch.testing.assert_close(found, chain(images.permute(0, 3, 1, 2)))
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("normalize", "message"),
    [
        ("imagnet", "Did you mean 'imagenet'"),
        (3, "one of 'unit', 'imagenet'"),
        ({"mean": [0, 0, 0]}, "a mean and a std"),
        ({"mean": [0, 0], "std": [1, 1, 1]}, r"--data\.normalize\.mean to be three numbers"),
        ({"mean": "abc", "std": [1, 1, 1]}, r"--data\.normalize\.mean to be three numbers"),
        ({"mean": [0, 0, float("nan")], "std": [1, 1, 1]}, r"--data\.normalize\.mean to be three numbers"),
        ({"mean": [0, 0, 0], "std": [1, 0, 1]}, r"--data\.normalize\.std to be positive"),
    ],
)
def test_normalisation_that_is_none(normalize: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        digits(normalize=normalize)


def test_every_loader_normalises() -> None:
    data = digits(normalize="imagenet")
    data.setup()
    loaders = (data.client_loader(0, 0, 8, torch.Generator()), data.train_dataloader(), data.test_dataloader())
    for loader in loaders:
        batch = next(iter(loader))[0]
        assert batch.max() > 1.5  # white is 2.2 to 2.6


# --- resize


def test_crop_is_the_centre_of_an_image(tmp_path: Path) -> None:
    """A picture of 12 x 4: the left third is red, the middle one green, the right one blue."""
    pixels = np.zeros((4, 12, 3), dtype=np.uint8)
    for third in range(3):
        pixels[:, 4 * third : 4 * third + 4, third] = 255
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    Image.fromarray(pixels).rotate(90, expand=True).save(tmp_path / "tall.png")
    for name in ("wide.png", "tall.png"):
        assert (cache.decode(tmp_path / name, 4, "crop") == np.array([0, 255, 0])).all()
        assert cache.decode(tmp_path / name, 3, "squash").reshape(-1, 3).sum(0).min() > 0
    square = Image.effect_noise((9, 9), 50).convert("RGB")
    square.save(tmp_path / "square.png")
    both = [cache.decode(tmp_path / "square.png", 5, resize) for resize in ("squash", "crop")]
    assert (both[0] == both[1]).all()


def test_the_cache_keeps_them_apart(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / "tree/one" / label).mkdir(parents=True)
        for number in range(4):
            picture = np.zeros((4, 12, 3), dtype=np.uint8)
            picture[:, :4] = 255
            Image.fromarray(picture).save(tmp_path / "tree/one" / label / f"{number}.png")
    found: dict[str, Tensor] = {}
    ways: list[Resize] = ["squash", "crop", "squash", "crop"]
    for resize in ways:
        data = ImageFolderDomains(str(tmp_path / "tree"), size=6, num_clients=1, resize=resize)
        data.setup()
        found.setdefault(resize, data.images)
        assert torch.equal(data.images, found[resize])
    assert found["squash"].max() == 255
    assert found["crop"][:, :, 1:].max() == 0  # the first column lies beside white


def test_a_way_to_resize_that_is_none() -> None:
    with pytest.raises(InputError, match="Did you mean 'crop'"):
        digits(resize="Crop")


# --- augmentation


def test_every_image_has_random_numbers_of_its_own() -> None:
    one = torch.arange(3, dtype=torch.uint8).view(1, 1, 3, 1).expand(1, 3, 3, 3)
    mirrored = Augmentation([FLIP], 3)(one.repeat(64, 1, 1, 1))[:, 0, 0, 0]
    assert set(mirrored.tolist()) == {0, 2}
    assert 16 < int((mirrored == 2).sum()) < 48


def test_augmentation_is_torchvisions_image_by_image() -> None:
    images = torch.randint(0, 256, (6, 8, 8, 3), dtype=torch.uint8)
    nested = {"class_path": "RandomApply", "init_args": {"transforms": [FLIP], "p": 0.9}}
    rotate = {"class_path": "RandomRotation", "init_args": {"degrees": [-30, 30], "interpolation": "bilinear"}}
    augmentation = pickle.loads(pickle.dumps(Augmentation([nested, "RandAugment", rotate], 8)))
    chain = [
        v2.RandomApply([v2.RandomHorizontalFlip(0.5)], 0.9),
        v2.RandAugment(),
        v2.RandomRotation([-30, 30], v2.InterpolationMode.BILINEAR),
    ]
    torch.manual_seed(1)
    expected = torch.stack([v2.Compose(chain)(image.permute(2, 0, 1)) for image in images]).permute(0, 2, 3, 1)
    torch.manual_seed(1)
    assert torch.equal(augmentation(images), expected)


def test_what_is_augmented_and_what_is_not() -> None:
    data = digits(augment=[{"class_path": "RandomHorizontalFlip", "init_args": {"p": 1}}])
    data.setup()

    def first(loader: Any) -> tuple[Tensor, Tensor]:
        return next(iter(loader))[0], to_input(data.images[loader.indices[: len(next(iter(loader))[0])]])

    pixels, _, _ = next(iter(data.client_loader(1, 0, 999, torch.Generator().manual_seed(3))))
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(3))
    raw = to_input(data.images[data.partition.clients[1]][order])
    assert torch.equal(pixels, raw.flip(-1))
    pixels, _, _ = next(iter(data.client_loader(1, 0, 999, torch.Generator().manual_seed(3), augment=False)))
    assert torch.equal(pixels, raw)
    for loader in (data.test_dataloader(), data.val_dataloader()):
        pixels, raw = first(loader)
        assert torch.equal(pixels, raw)
    torch.manual_seed(5)
    pixels, _, _ = next(iter(data.train_dataloader()))
    order = torch.randperm(sum(data.partition.sizes), generator=torch.Generator().manual_seed(5))[:32]
    assert torch.equal(pixels, to_input(data.images[torch.cat(data.partition.clients)[order]]).flip(-1))


@pytest.mark.slow
@pytest.mark.parametrize("supervision", ["random", "base"])
def test_augmented_runs_repeat_to_the_bit_wherever_they_train(supervision: str) -> None:
    """Most images are held out, as they are augmented one by one."""
    settings: dict[str, Any] = {"supervision": supervision, "backbone": "helpers.dropout_net", "batch_size": 24}
    few: Callable[..., DigitsDomains] = partial(digits, test_fraction=0.8)
    for name, backend in (("local", LocalBackend()), ("pool", PoolBackend(workers=2, threads=1))):
        fit(experiment(data=few(augment=CHANGE), run_dir=name, backend=backend, rounds=3, **settings))
    assert same("local", "pool")
    fit(experiment(data=few(augment=CHANGE), run_dir="cut", rounds=1, **settings))
    fit(experiment(data=few(augment=CHANGE), resume="cut", rounds=3, **settings))
    assert same("local", "cut")
    fit(experiment(data=few(), run_dir="plain", rounds=3, **settings))
    assert not same("local", "plain")
    if supervision == "random":  # Phase 1 looks at images as they are
        assert contents("plain")["discovery.json"] == contents("local")["discovery.json"]
        fit(experiment(data=few(augment=["RandAugment"]), run_dir="reused", discovery="plain", rounds=1, **settings))


def test_another_augmentation_is_another_run() -> None:
    fit(experiment(data=digits(augment=CHANGE), run_dir="run", rounds=1, supervision="base"))
    for augment in (None, ["RandAugment"]):
        with pytest.raises(InputError, match=r"--data\.augment"):
            fit(experiment(data=digits(augment=augment), resume="run", rounds=2, supervision="base"))


class Halving(nn.Module):
    """A user's own transform."""

    def __init__(self, by: int = 2) -> None:
        super().__init__()
        self.by = by

    def forward(self, image: Tensor) -> Tensor:
        return image // self.by


class Picky(nn.Module):
    """A transform that changes the size now and then."""

    def forward(self, image: Tensor) -> Tensor:
        return image[:, 1:] if torch.rand(()) < 0.5 else image


def test_a_transform_of_ones_own() -> None:
    spec = {"class_path": f"{__name__}.Halving", "init_args": {"by": 4}}
    assert Augmentation([spec], 2)(torch.full((1, 2, 2, 3), 200, dtype=torch.uint8)).unique().tolist() == [50]
    assert Augmentation([f"{__name__}.Halving"], 2)(torch.full((1, 2, 2, 3), 9, dtype=torch.uint8)).max() == 4


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ("RandAugment", r"--data\.augment to be of type list"),
        (["RandAugmnt"], "Did you mean 'RandAugment'"),
        (["torchvision.transforms.v2.RandAugmnt"], "Did you mean 'RandAugment'"),
        (["no_such_module.Blur"], "no_such_module"),
        (["torchvision.datasets.MNIST"], r"--data\.augment to be a Module but .*MNIST is not"),
        (["os.system"], r"--data\.augment to be a Module but .*system is not"),
        ([v2.RandAugment()], r"plain values.*'class_path': 'torchvision\.transforms\.v2\..*RandAugment'"),
        ([3], "class_path with init_args, but got 3"),
        ([{"class": "RandAugment"}], "class_path with init_args"),
        ([{"class_path": "RandAugment", "magnitude": 3}], "class_path with init_args"),
        ([{"class_path": "RandAugment", "init_args": {"magntude": 3}}], "Did you mean 'magnitude'"),
        ([{"class_path": "RandAugment", "init_args": {"interpolation": "linear"}}], "Did you mean 'bilinear'"),
        ([{"class_path": "RandAugment", "init_args": [3]}], "init_args by name"),
        ([{"class_path": "RandomHorizontalFlip", "init_args": {"p": 2}}], "RandomHorizontalFlip is not"),
        (["RandomCrop"], r"--data\.augment\.size: RandomCrop needs it"),
        ([{"class_path": "RandomCrop", "init_args": {"size": 4}}], "keep type and size.*RandomCrop makes it"),
        (["ToPILImage"], "ToPILImage makes it Image"),
        ([{"class_path": "Normalize", "init_args": {"mean": [0], "std": [1]}}], "Normalize fails on one"),
        ([{"class_path": "MixUp", "init_args": {"num_classes": 10}}], "MixUp mixes the images and the labels"),
        (
            [{"class_path": "RandomChoice", "init_args": {"transforms": [{"class_path": "CutMix"}]}}],
            "CutMix mixes the images and the labels",
        ),
        ([f"{__name__}.Picky"], "Picky makes it"),
    ],
)
def test_transforms_that_are_refused(augment: Any, message: str) -> None:
    state = torch.random.get_rng_state()
    with pytest.raises(InputError, match=message) as caught:
        digits(augment=augment)
    assert "\n" not in str(caught.value)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_building_transforms_leaves_the_random_numbers_alone() -> None:
    state = torch.random.get_rng_state()
    digits(augment=CHANGE)
    assert torch.equal(torch.random.get_rng_state(), state)


# --- where the options are declared


def test_types_and_signature_declare_the_same_options() -> None:
    assert list(DataOptions.__annotations__) == list(option_defaults())
    base = get_type_hints(DomainDataModule.__init__)
    assert get_type_hints(DataOptions) == {name: base[name] for name in option_defaults()}


@pytest.mark.parametrize("kind", [PACS, OfficeCaltech, DigitsDomains, ImageFolderDomains, SiteFolders])
def test_every_data_module_has_every_option(kind: type[DomainDataModule], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["fit", "--data.help", kind.__name__])
    assert left.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in option_defaults():
        assert f"--data.{name} " in shown
    assert "default: squash" in shown
    assert "or crop, its centre" in shown
    assert set(option_defaults()) < set(parameters(kind))


def test_a_config_has_all_options_and_gives_them_back() -> None:
    nested = {"class_path": "RandomApply", "init_args": {"transforms": [FLIP]}}
    data = digits(augment=[*CHANGE, nested], normalize={"mean": (0, 0, 0), "std": (1, 1, 1)}, resize="crop")
    written = as_dict(experiment(data=data, backbone="PaperCNN"))
    assert set(written["data"]["init_args"]) == set(parameters(DigitsDomains))
    again = parse_experiment("fit", [], saved=written).data
    assert repr(again) == repr(data)
    line = ["--data.normalize", "imagenet", "--data.augment", "[RandAugment]", "--data.augment+", "RandomInvert"]
    assert parse_experiment("fit", line).data.augment == ["RandAugment", "RandomInvert"]


def test_a_run_from_before_the_options_can_be_resumed() -> None:
    now = as_dict(experiment())
    before = {**now, "data": {**now["data"], "init_args": {"size": 8, "num_clients": 4, "test_fraction": 0.2}}}
    assert fixed_settings(before) == fixed_settings(now)


class Old(DomainDataModule):
    """A user's data set that knows of no options."""

    domain_names, class_names = ("one",), ("a", "b")

    def __init__(self, size: int = 2, num_clients: int = 1, test_fraction: float = 0.5) -> None:
        super().__init__(size, num_clients, test_fraction)

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        labels = torch.arange(8) % 2
        return torch.zeros(8, 2, 2, 3, dtype=torch.uint8), labels, torch.zeros_like(labels)


class Loose(Old):
    """A user's data set that hands on some of what it is given."""

    def __init__(self, more: int = 1, **options: Any) -> None:
        super().__init__(num_clients=2, **options)
        self.more = more


def test_data_sets_of_ones_own() -> None:
    assert as_dict(Old())["init_args"] == {"size": 2, "num_clients": 1, "test_fraction": 0.5}
    assert as_dict(Loose(3, size=2))["init_args"] == {"more": 3, "size": 2, "test_fraction": 0.5}
    assert (
        parse_experiment("fit", ["--data", f"{__name__}.Loose", "--data.test_fraction", "0.4"]).data.test_fraction
        == 0.4
    )


def test_data_modules_can_be_printed() -> None:
    steps: list[str] = []
    for data in (digits(), Old(), PACS()):
        assert str(data) == repr(data)
    data = digits(augment=["RandAugment"])
    data.progress = lambda what, done, total: steps.append(what)
    shown = "DigitsDomains(size=8, num_clients=4, test_fraction=0.2, augment=['RandAugment'])"
    assert str(data) == shown
    data.setup()
    assert str(data) == f"{data}" == shown


# --- a saved model


def wide_pictures(folder: Path) -> list[Path]:
    folder.mkdir()
    rng = np.random.default_rng(0)
    files = [folder / f"{number}.png" for number in range(12)]
    for file in files:
        Image.fromarray(rng.integers(0, 256, (10, 30, 3), dtype=np.uint8)).save(file)
    return files


def test_a_model_is_used_on_images_as_it_was_trained_on(tmp_path: Path) -> None:
    """The saved model has all that is needed: the same logits as the module of the run on the same pixels."""
    files = wide_pictures(tmp_path / "pictures")
    settings: dict[str, Any] = {"rounds": 1, "supervision": "base", "backbone": "PaperCNN"}
    run = finished("run", data=digits(normalize="imagenet", resize="crop"), **settings)
    model = load_model(run.folder, "last")
    assert (model.header.normalize, model.header.resize) == ("imagenet", "crop")
    pixels = torch.stack([torch.tensor(cache.decode(file, 8, "crop")) for file in files])
    images = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])(pixels.permute(0, 3, 1, 2) / 255)
    logits = _logits(model.weights | model.buffers, images)
    expected = [model.header.class_names[label] for label in predict_class(logits, 10).tolist()]
    found = list(predictions(load_to_use(run.folder, "last"), files))
    assert [row["class"] for row in found] == expected
    probabilities = logits.softmax(dim=1).max(dim=1).values
    torch.testing.assert_close(torch.tensor([row["probability"] for row in found]), probabilities, atol=1e-5, rtol=0)
    record, about = load_record(run.folder / "last.safetensors")
    del about["normalize"], about["resize"]  # as before there was a choice
    save_record(run.folder / "last.safetensors", record, about)
    older = load_model(run.folder, "last")
    assert (older.header.normalize, older.header.resize) == ("unit", "squash")
    again = predictions(load_to_use(run.folder, "last"), files)
    assert [row["probability"] for row in again] != [row["probability"] for row in found]


def _logits(tensors: dict[str, Tensor], images: Tensor) -> Tensor:
    backbone = build_backbone("PaperCNN", 8).eval()
    backbone.load_state_dict({n.removeprefix("backbone."): t for n, t in tensors.items() if n.startswith("backbone.")})
    with torch.no_grad():
        return nn.functional.linear(backbone(images), tensors["head.weight"], tensors["head.bias"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalize", "os.system"),
        ("normalize", {"mean": [0, 0, 0]}),
        ("normalize", {"mean": [0, 0, 0], "std": [0, 0, 0]}),
        ("normalize", {"mean": [0, 0, 0], "std": "abc"}),
        ("resize", "stretch"),
    ],
)
def test_a_saved_model_has_a_form(name: str, value: Any) -> None:
    run = finished("run", rounds=1, supervision="base")
    record, about = load_record(run.folder / "last.safetensors")
    save_record(run.folder / "last.safetensors", record, about | {name: value})
    with pytest.raises(InputError, match=rf"last\.safetensors is something else: .*{name}"):
        load_model(run.folder, "last")
