"""Networks of torchvision and timm with weights, frozen or not, and what goes with them."""

from __future__ import annotations

import sys
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import yaml
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression
from torch import nn

from helpers import experiment
from jdfl_lightning import (
    PACS,
    Experiment,
    ImageFolderDomains,
    OfficeCaltech,
    PaperCNN,
    build_backbone,
    evaluate,
    fit,
    num_features,
    predict,
    to_input,
)
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.config import parse_experiment
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.models import Backbone, preprocessing_of, select_parameters
from jdfl_lightning.storage.trust import known_backbone
from jdfl_lightning.storage.weights import load_model
from lite0 import NETWORK, packaged_file, write_lite0


@pytest.fixture(scope="module")
def lite0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lite0(tmp_path_factory.mktemp("weights") / "lite0.safetensors")


@pytest.mark.parametrize("size", [96, 128])
def test_the_same_function_as_the_packages_own_network(lite0: Path, size: int) -> None:
    """timm's network with renamed weights gives the features of the network that the weights were published with."""
    package = pytest.importorskip("efficientnet_lite_pytorch")
    theirs = package.EfficientNet.from_name("efficientnet-lite0", image_size=size).eval()
    theirs.load_state_dict(torch.load(packaged_file(), weights_only=True))
    ours = build_backbone(NETWORK, size, {"weights": str(lite0)}).eval()
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.extract_features(images).mean(dim=(2, 3))
        torch.testing.assert_close(ours(images), expected, rtol=1e-5, atol=1e-6)
    assert num_features(ours, size) == 1280


@pytest.mark.parametrize(
    ("name", "size", "features"),
    [("timm/resnet18", 32, 512), ("timm/resnet18.a1_in1k", 32, 512), ("timm/mobilenetv3_small_050", 32, 1024)],
)
def test_networks_of_timm(name: str, size: int, features: int) -> None:
    backbone = build_backbone(name, size)
    assert num_features(backbone, size) == features
    plain = timm.create_model(name.removeprefix("timm/").partition(".")[0], num_classes=0)
    assert set(backbone.state_dict()) == set(plain.state_dict())


def test_arguments_go_to_timms_network() -> None:
    backbone = build_backbone("timm/vit_tiny_patch16_224", 32, {"img_size": 32, "depth": 2, "freeze": True})
    assert isinstance(backbone, Backbone)
    assert len(backbone.network.blocks) == 2  # type: ignore[arg-type]
    assert num_features(backbone, 32) == 192


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pth", ".pt", ".safetensors"])
@pytest.mark.parametrize("nested", ["", "state_dict"])
def test_weights_of_a_file(tmp_path: Path, suffix: str, nested: str) -> None:
    """All but the head, which may have any number of classes, or be missing."""
    model = torchvision.models.resnet18(num_classes=3)
    state: dict[str, Any] = model.state_dict()
    file = tmp_path / f"mine{suffix}"
    if suffix == ".safetensors":
        save_file({name: value for name, value in state.items() if not name.startswith("fc.")}, file)
    else:
        torch.save({nested: state, "epoch": 3} if nested else state, file)
    backbone = build_backbone("resnet18", 32, {"weights": str(file)})
    assert {*backbone.state_dict()} == {name for name in state if not name.startswith("fc.")}
    assert all(torch.equal(value, state[name]) for name, value in backbone.state_dict().items())


class _Unsafe:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("mark"),)


@pytest.mark.slow
def test_files_that_are_no_weights_of_the_network(tmp_path: Path) -> None:
    other, wrong, code, note = (tmp_path / name for name in ("other.pth", "wrong.pth", "code.pth", "note.pth"))
    torch.save(torchvision.models.resnet34().state_dict(), other)
    torch.save({**torchvision.models.resnet18().state_dict(), "conv1.weight": torch.zeros(1)}, wrong)
    torch.save({"x": _Unsafe()}, code)
    note.write_text("no weights")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "note.safetensors").write_text("no weights")
    for file, message in (
        (other, "resnet18 but .*other.pth is not: resnet18 has no layer1.2"),
        (wrong, "wrong.pth is not: size mismatch for conv1.weight"),
        (code, "code.pth cannot be read"),
        (note, "note.pth cannot be read"),
        (tmp_path / "list.pth", "holds other things than named tensors"),
        (tmp_path / "note.safetensors", "note.safetensors cannot be read"),
        (tmp_path / "none.pth", "there is no .*none.pth"),
        (tmp_path, "--backbone_args.weights to be one of"),
        ("IMAGENET1K_V9", "Did you mean 'IMAGENET1K_V1'"),
    ):
        with pytest.raises(InputError, match=message):
            build_backbone("resnet18", 32, {"weights": str(file)})
    assert not Path("mark").exists()
    for name, weights in (("PaperCNN", True), ("helpers.tiny_net", "DEFAULT"), ("timm/resnet18", "V2")):
        with pytest.raises(InputError, match=r"--backbone_args\.weights to be"):
            build_backbone(name, 32, {"weights": weights})


def test_networks_that_timm_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="Did you mean 'resnet18'"):
        build_backbone("timm/resnet81", 32)
    with pytest.raises(InputError, match="arguments of timm/resnet18 but"):
        build_backbone("timm/resnet18", 32, {"depth": 3})
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match=r"jdfl-lightning\[timm\]"):
        build_backbone("timm/resnet18", 32)


def test_what_is_out_of_reach_says_which_file_to_put_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*args: Any, **kwargs: Any) -> Any:
        raise urllib.error.URLError("Name or service not known")

    def no_hub(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError("An error happened.\nMore of it.")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", nowhere)
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", no_hub)
    with pytest.raises(InputError, match=r"Put the file resnet18-f37072fd\.pth of https://.* into .*/checkpoints, or"):
        build_backbone("resnet18", 32, {"weights": "DEFAULT"})
    with pytest.raises(
        InputError, match=r"An error happened\. Get the file model\.safetensors of timm/resnet18\.a1_in1k"
    ):
        build_backbone("timm/resnet18", 32, {"weights": True})


def test_published_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network: what would be downloaded is handed in."""
    state = torchvision.models.resnet18().state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *args, **kwargs: state)
    for weights in ("DEFAULT", "IMAGENET1K_V1", "ResNet18_Weights.IMAGENET1K_V1", True):
        found = build_backbone("resnet18", 32, {"weights": weights}).state_dict()
        assert all(torch.equal(value, state[name]) for name, value in found.items())


@pytest.mark.parametrize(
    ("name", "arguments", "size", "normalize"),
    [
        ("resnet18", {"weights": "DEFAULT"}, 224, "imagenet"),
        ("resnet18", {"weights": "mine.pth"}, 224, "imagenet"),
        ("inception_v3", {"weights": "DEFAULT"}, 299, "imagenet"),
        ("timm/tf_efficientnet_lite0", {"weights": True}, 224, "unit"),
        ("timm/efficientnet_lite0", {"weights": True}, 224, "imagenet"),
        ("resnet18", {"weights": None, "freeze": True}, 112, "unit"),
        ("PaperCNN", {"weights": "mine.pth"}, 112, "unit"),
        ("mine.net", {"weights": "mine.pth"}, 112, "unit"),
    ],
)
def test_preprocessing_of_the_weights(name: str, arguments: dict[str, Any], size: int, normalize: str) -> None:
    """It fills what the user leaves open; the user's data module stays as it is."""
    data = PACS("x")
    run = Experiment(data=data, backbone=name, backbone_args=arguments)
    assert (run.data.size, run.data.normalize) == (size, normalize)
    assert (data.size, data.normalize) == (112, "unit")
    given = Experiment(data=PACS("x", size=64, normalize="imagenet"), backbone=name, backbone_args=arguments)
    assert (given.data.size, given.data.normalize) == (64, "imagenet")
    part = Experiment(data=PACS("x", size=64), backbone=name, backbone_args=arguments)
    assert (part.data.size, part.data.normalize) == (64, normalize)


def test_preprocessing_of_a_command_line_and_of_loaded_data(image_tree: Path) -> None:
    args = ["--data.size=null", "--backbone=resnet18", "--backbone_args.weights=DEFAULT", "--backbone_args.freeze=true"]
    run = parse_experiment("fit", args)
    assert (run.data.size, run.data.normalize) == (224, "imagenet")
    assert run.backbone_args == {"weights": "DEFAULT", "freeze": True}
    data = ImageFolderDomains(str(image_tree), num_clients=1, unseen="bright")
    data.setup()
    other = Experiment(data=data, backbone="resnet18", backbone_args={"weights": "DEFAULT"}).data
    other.setup()
    assert (tuple(data.images.shape[1:]), tuple(other.images.shape[1:])) == ((112, 112, 3), (224, 224, 3))
    assert list(other.domain_names) == list(data.domain_names) == ["dark"]
    assert torch.equal(other.domains, data.domains)


def test_lite0_is_normalised_as_its_package_says() -> None:
    """The published network gets (x - 127) / 128 of values to 255; timm has (x - 127.5) / 127.5."""
    look = preprocessing_of(NETWORK, {"weights": True})
    assert look is not None
    for value in (0, 128, 255):
        assert abs((value / 255 - look.mean[0]) / look.std[0] - (value - 127) / 128) < 0.01


def norm_net(size: int) -> nn.Module:
    """Two stages with BatchNorm, one without parameters, and dropout."""
    first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False))
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize(
    ("freeze", "frozen", "still"),
    [
        (True, 6, {"0.1", "0.3", "1.1"}),
        (["0.*"], 4, {"0.1", "0.3"}),
        (["0.*", "1.*"], 6, {"0.1", "0.3", "1.1"}),
        (["1.0.weight", "1.0.bias", "1.1.*"], 2, {"1.1"}),
        (["0.1.*"], 2, {"0.1"}),
        (False, 0, set()),
    ],
)
def test_what_is_frozen(freeze: Any, frozen: int, still: set[str]) -> None:
    """BatchNorm keeps its statistics and dropout is off exactly where all parameters are frozen."""
    torch.manual_seed(0)
    backbone = Backbone(norm_net(8), 4, hidden=5, freeze=freeze)
    network = backbone.network
    assert sum(not parameter.requires_grad for parameter in network.parameters()) == frozen
    backbone.eval().train()
    modes = {name for name, part in network.named_modules() if name in ("0.1", "0.3", "1.1") and not part.training}
    assert modes == still
    before = {name: value.clone() for name, value in network.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in backbone.parameters() if p.requires_grad], lr=0.1)
    backbone(torch.randn(6, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    after = network.state_dict()
    moved = {
        name.rpartition(".")[0] for name in after if "running" in name and not torch.equal(after[name], before[name])
    }
    assert moved == {"0.1", "1.1"} - still
    assert backbone.frozen == (frozen == 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": 0}, r"--backbone_args\.hidden to be null or a positive number but got 0"),
        ({"hidden": True}, r"--backbone_args\.hidden"),
        ({"freeze": "all"}, r"--backbone_args\.freeze to be true, false or a list of patterns but got 'all'"),
        ({"freeze": ["layer9.*"]}, r"'layer9\.\*' matches none of conv1\.weight"),
        ({"freeze": True, "cache": "no"}, r"--backbone_args\.cache to be true or false"),
        ({"frezee": True}, "--backbone_args to be arguments of resnet18"),
    ],
)
def test_wrong_arguments_of_a_backbone(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_backbone("resnet18", 32, arguments)


def test_a_network_of_ones_own_may_have_arguments_of_these_names() -> None:
    backbone = build_backbone("own_parts.HiddenNet", 8, {"hidden": 7, "freeze": True})
    assert isinstance(backbone, Backbone)
    assert backbone.hidden.__class__ is nn.Identity  # hidden is the network's own
    assert num_features(backbone, 8) == 7
    assert backbone.frozen


def test_layers_of_phase_1_with_a_frozen_network() -> None:
    """What is frozen has no update: B is the head alone; the hidden layer is named by a pattern."""
    run = experiment(backbone="PaperCNN", backbone_args={"freeze": True, "hidden": 6})
    workspace = Workspace(run)
    module = workspace.module(*workspace.initial(1))
    for layers in "ABC":
        assert select_parameters(module, layers) == ["head.weight", "head.bias"]
    assert select_parameters(module, ["backbone.hidden.*", "head.bias"])[-1] == "head.bias"
    assert len(select_parameters(module, ["backbone.hidden.*", "head.*"])) == 4


def test_a_run_needs_no_weights_file_afterwards(tmp_path: Path, image_tree: Path) -> None:
    """All tensors are saved, so predict and test work when the file is gone; frozen ones are as they were."""
    torch.manual_seed(5)
    file = tmp_path / "mine.safetensors"
    save_file(PaperCNN(8).state_dict(), file)
    arguments = {"weights": str(file), "freeze": ["block*"], "hidden": 9}
    run = fit(experiment(run_dir="run", backbone="PaperCNN", backbone_args=arguments, supervision="base"))
    saved = load_model(run.folder, "best")
    tensors = saved.weights | saved.buffers
    for name, value in load_file(file).items():
        assert torch.equal(tensors[f"backbone.network.{name}"], value) == name.startswith("block"), name
    before = predict(run, image_tree)
    file.unlink()
    assert predict(run, image_tree).equals(before)
    assert evaluate(run, progress=False).loc["best", "test/acc"] == run.best["test/acc"]


def test_a_folder_from_elsewhere_reads_no_weights(
    tmp_path: Path, image_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither predict nor test nor resume opens the file that it names; a network's own arguments need trust."""
    file = tmp_path / "mine.safetensors"
    save_file(PaperCNN(8).state_dict(), file)
    arguments = {"weights": str(file), "freeze": True, "hidden": 9}
    run = fit(experiment(run_dir="run", backbone="PaperCNN", backbone_args=arguments, supervision="base", rounds=1))
    config = Path("run/config.yaml")
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text())))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another user"))
    opened: list[Any] = []
    monkeypatch.setattr("jdfl_lightning.models.backbones.read_weights", opened.append)
    assert len(predict(run, image_tree)) == 36
    evaluate(run, progress=False)
    with pytest.raises(
        InputError, match=r"--backbone_args\.weights to be '.*mine\.safetensors' as in run but it is left out"
    ):
        fit(parse_experiment("fit", ["--resume", "run", "--rounds", "2"]), progress=False)
    assert opened == []


def test_names_of_timm_from_elsewhere() -> None:
    assert all(map(known_backbone, ("timm/resnet18", "timm/resnet18.a1_in1k", "PaperCNN", "resnet18")))
    for name in ("timm/hf-hub:x/y", "timm/local-dir:x", "timm/", "timm/../x", "timm/a.b.c", "timm.models.resnet18"):
        assert not known_backbone(name)


@pytest.mark.slow
def test_features_of_real_weights_are_good(lite0: Path, real_data: Path) -> None:
    """A linear classifier on them: 90 % and more of the held-out images of Office-Caltech-10 at 128 px."""
    data = OfficeCaltech(str(real_data / "office_caltech_10"), size=128)
    run = Experiment(data=data, backbone=NETWORK, backbone_args={"weights": str(lite0), "freeze": True})
    data = run.data  # type: ignore[assignment]
    data.deal(0)
    backbone = build_backbone(NETWORK, 128, run.backbone_args).eval()
    with torch.inference_mode():
        features = torch.cat([backbone(to_input(images, data.normalize)) for images in data.images.split(64)])
    train, test = torch.cat(data.partition.clients), torch.cat(data.partition.test)
    probe = LogisticRegression(max_iter=1000, C=0.1).fit(features[train].numpy(), data.labels[train].numpy())
    assert probe.score(features[test].numpy(), data.labels[test].numpy()) > 0.9
