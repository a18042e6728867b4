"""The model of a run as a file for others, and back."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from helpers import every, finished
from jdfl_lightning import DigitsDomains, JointModule, Part, Run, build_backbone, export, from_pretrained, predict
from jdfl_lightning.cli import main
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.data.cache import decode

CASES: dict[str, dict[str, Any]] = {
    "paper": {"backbone": "PaperCNN", "supervision": "graded"},
    "sum": {"backbone": "PaperCNN", "supervision": "random", "score": "sum"},
    "base": {"backbone": "PaperCNN", "supervision": "base"},
    "features": {"backbone": "resnet18", "backbone_args": {"freeze": True, "hidden": 5}, "supervision": "graded"},
    "timm": {"backbone": "timm/mobilenetv3_small_050", "supervision": "base"},
}


def trained(case: str) -> Path:
    return finished("run", **({"rounds": 1} | CASES[case])).folder


def probabilities(run: Any, images: list[Path]) -> tuple[list[str], np.ndarray]:
    """Classes and probabilities of them, as `predict` gives them."""
    frame = predict(run, images)
    return list(frame["class"]), frame["probability"].to_numpy()


@pytest.fixture
def images(image_tree: Path) -> list[Path]:
    return sorted(image_tree.rglob("*.png"))[::4]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_onnx_predicts_as_predict_does(case: str, images: list[Path]) -> None:
    """With nothing but the file: the size of the images and the names of the classes are in it."""
    folder = trained(case)
    assert main(["export", "--run", str(folder), "--format", "onnx", "--output", "new.onnx"]) == 0
    about = {entry.key: json.loads(entry.value) for entry in onnx.load("new.onnx").metadata_props if entry.key != "x"}
    session = onnxruntime.InferenceSession("new.onnx", providers=["CPUExecutionProvider"])
    names, expected = probabilities(folder, images)
    for batch in (images, images[:1]):
        pixels = np.stack([decode(path, about["size"], about["resize"]) for path in batch])
        label, found, domain = session.run(["label", "probabilities", "pseudo_domain"], {"images": pixels})
        assert [about["class_names"][number] for number in label] == names[: len(batch)]
        np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
        np.testing.assert_allclose(found[np.arange(len(batch)), label], expected[: len(batch)], atol=1e-5)
        assert list(domain) == list(predict(folder, batch)["pseudo_domain"])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sum", "features"])
def test_a_program_of_torch_predicts_as_predict_does(case: str, images: list[Path]) -> None:
    folder = trained(case)
    assert export(folder, "torch", "new.pt2") == Path("new.pt2")
    extra = {"class_names.json": "", "size.json": "", "resize.json": ""}
    program = torch.export.load("new.pt2", extra_files=extra)
    classes, size, resize = (json.loads(extra[f"{name}.json"]) for name in ("class_names", "size", "resize"))
    pixels = torch.from_numpy(np.stack([decode(path, size, resize) for path in images]))
    label, found, _ = program.module()(pixels)
    names, expected = probabilities(folder, images)
    assert [classes[number] for number in label.tolist()] == names
    np.testing.assert_allclose(found.gather(1, label.unsqueeze(1)).squeeze(1).numpy(force=True), expected, atol=1e-5)


@pytest.mark.parametrize("case", ["paper", "base", pytest.param("features", marks=pytest.mark.slow)])
def test_a_checkpoint_of_lightning_has_the_same_module(case: str) -> None:
    folder = trained(case)
    export(folder, "lightning", "new.ckpt")
    about = torch.load("new.ckpt", weights_only=True)["jdfl"]
    assert about["class_names"] == [str(digit) for digit in range(10)]
    backbone = build_backbone(about["backbone"], about["size"], about["backbone_args"])
    module = JointModule.load_from_checkpoint("new.ckpt", backbone=backbone, map_location="cpu").eval()
    model, inputs = Run.read(folder).model(), torch.randn(3, 3, about["size"], about["size"])
    with torch.no_grad():
        assert torch.equal(module(inputs), model(inputs))
    assert module.head.num_domains == (1 if case == "base" else 3)


@pytest.mark.parametrize("case", every(2, ["paper", "features", "sum", "timm"]))
def test_a_folder_for_a_hub_and_back(case: str, images: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """No trust is needed, and no run folder: all that predict says is the same, to the bit."""
    folder = trained(case)
    assert main(["export", "--run", str(folder), "--format", "hub", "--output", "new"]) == 0
    assert {file.name for file in Path("new").iterdir()} == {"README.md", "config.json", "model.safetensors"}
    capsys.readouterr()
    for place in (str(folder), "new"):
        assert main(["predict", "--run", place, *map(str, images)]) == 0
    first, second = capsys.readouterr().out.split("image,class,probability,pseudo_domain\n")[1:]
    assert first == second
    assert len(list(csv.reader(io.StringIO(first)))) == len(images)
    model = from_pretrained("new")
    assert model(images).shape[0] == len(images)
    assert predict(model, images).equals(predict(folder, images))


@pytest.mark.slow
def test_a_module_with_its_own_forward(images: list[Path]) -> None:
    """What is exported is what predict uses; a folder that names a class of the user's needs trust."""
    run = finished("run", rounds=1, backbone="PaperCNN", supervision="base", model=Part("own_parts.Neck", width=4))
    export(run, "torch", "new.pt2")
    pixels = torch.from_numpy(np.stack([decode(path, 8) for path in images]))
    label, found, _ = torch.export.load("new.pt2").module()(pixels)
    names, expected = probabilities(run, images)
    assert list(map(str, label.tolist())) == names
    np.testing.assert_allclose(found.gather(1, label.unsqueeze(1)).squeeze(1).numpy(force=True), expected, atol=1e-5)
    export(run, "hub", "new")
    with pytest.raises(InputError, match=r"names own_parts\.Neck, which would be imported"):
        from_pretrained("new")
    assert predict(from_pretrained("new", trust=True), images).equals(predict(run, images))
    with pytest.raises(InputError, match="Neck has its own forward"):
        export(run, "lightning", "new.ckpt")


def test_no_place_of_this_machine_leaves_with_a_model(tmp_path: Path) -> None:
    file = tmp_path / "secret place.safetensors"
    save_file(build_backbone("PaperCNN", 8).state_dict(), file)
    arguments = {"weights": str(file), "freeze": True, "cache": True}
    run = finished("run", rounds=1, backbone="PaperCNN", backbone_args=arguments, supervision="base")
    export(run, "hub", "new")
    assert json.loads(Path("new/config.json").read_text())["backbone_args"] == {"freeze": True}
    for written in Path("new").iterdir():
        assert b"secret" not in written.read_bytes()


def test_the_card_says_what_the_run_was() -> None:
    run = finished("run", rounds=2, backbone="PaperCNN", supervision="graded")
    export(run, "hub", "new")
    card = Path("new/README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "jdfl-lightning"
    best = run.best
    for words in (
        "3 pseudo-domains were found",
        "| data | DigitsDomains |",
        r"| num\_clients | 4 |",
        "| algorithm | FedAvg |",
        "| supervision | Graded |",
        "| rounds | 2 |",
        f"after round {int(best['round'])} of 2",
        f"| all domains | {100 * best['test/acc']:.2f} % |",
        f"| chalk | {100 * best['test/acc/chalk']:.2f} % |",
        "picked by these same held-out images",
        "No differential privacy",
        "8 x 8 pixels (squash), normalised as `unit`",
    ):
        assert words in card, words


def test_the_card_says_which_images_picked_the_round() -> None:
    data = DigitsDomains(size=8, num_clients=4, val_fraction=0.2)
    export(finished("run", rounds=2, backbone="PaperCNN", supervision="base", data=data), "hub", "new")
    assert "picked by" not in Path("new/README.md").read_text()  # validation images did, which no accuracy here is of


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained("paper")
    Path("there").write_text("x")
    for words, message in (
        (["--format", "onxx"], "Did you mean 'onnx'"),
        (["--output", "there"], "--output to be new but there exists"),
        (["--output", "no/such/folder.onnx", "--format", "lightning"], "Expected to write no/such/folder.onnx"),
        (["--weights", "bset"], "Did you mean 'best'"),
    ):
        assert main(["export", "--run", str(folder), *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["export", "--run", "nowhere"]) == 2
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(InputError, match=r"jdfl-lightning\[onnx\]"):
        export(folder, "onnx")


def change(**values: Any) -> None:
    about = json.loads(Path("new/config.json").read_text())
    Path("new/config.json").write_text(json.dumps(about | values))


def test_a_model_from_elsewhere_runs_nothing(
    tmp_path: Path, images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules of run folders: known networks without arguments of their own, no links, a fixed form."""
    export(trained("paper"), "hub", "new")
    (tmp_path / "bomb.py").write_text("from pathlib import Path\nPath('mark').touch()\ndef net(size): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    whole = Path("new/config.json").read_text()
    for values, message in (
        ({"backbone": "bomb.net"}, "names bomb.net, which would be imported"),
        ({"backbone": "timm/hf-hub:x/y"}, "which would be imported"),
        ({"backbone_args": {"width": 3}}, "gives its backbone arguments: {'width': 3}"),
        ({"size": "large"}, "cannot be read: size"),
        ({"library": "another"}, "not of jdfl-lightning"),
        ({"class_names": []}, "cannot be read: class_names"),
        ({"class_names": list("abcdefg")}, "its head has no multiple of 7 outputs"),
        ({"backbone": "resnet18"}, "weights of a resnet18 but they are of something else"),
    ):
        change(**values)
        with pytest.raises(InputError, match=message.replace("{", r"\{")):
            from_pretrained("new")
        Path("new/config.json").write_text(whole)
    change(backbone_args={"weights": "/etc/passwd.safetensors"})
    assert len(predict("new", images)) == len(images)  # which is not read
    assert not Path("mark").exists()
    with pytest.raises(InputError, match="--weights to be left out"):
        predict("new", images, which="best")
    state = {name: tensor.clone() for name, tensor in load_file("new/model.safetensors").items()}  # it is mapped
    Path("new/model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match="cannot be read"):
        from_pretrained("new")
    Path("new/model.safetensors").unlink()
    with pytest.raises(InputError, match=r"cannot be read|has no"):
        from_pretrained("new")
    save_file(state, "elsewhere.safetensors")
    Path("new/model.safetensors").symlink_to(Path("elsewhere.safetensors").absolute())
    with pytest.raises(InputError, match="is a link"):
        from_pretrained("new")


def test_models_on_the_hub(monkeypatch: pytest.MonkeyPatch, images: list[Path]) -> None:
    """An id is fetched by huggingface_hub, the two files alone; without it, or without a network, one line says so."""
    folder = trained("paper")
    export(folder, "hub", "new")
    asked: list[Any] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(Path("new").absolute())

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    model = from_pretrained("somebody/digits")
    assert asked == [("somebody/digits", ["config.json", "model.safetensors"])]
    assert predict(model, images).equals(predict(folder, images))

    def fail(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no network\nmore of it")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(InputError, match=r"somebody/digits is neither: no network$"):
        from_pretrained("somebody/digits")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="huggingface_hub is not installed"):
        from_pretrained("somebody/digits")
    with pytest.raises(InputError, match="or the id of one on the hub, but got 'nowhere'"):
        from_pretrained("nowhere")
