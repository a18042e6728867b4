"""Clients that train on the features of a frozen network: the same as with the whole network in every batch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers import contents, digits, experiment, same
from jdfl_lightning import (
    Clustering,
    Experiment,
    JointModule,
    PaperCNN,
    Part,
    PoolBackend,
    PrivateFedAvg,
    RayBackend,
    VectorBackend,
    algorithms,
    evaluate,
    fit,
    predict,
    to_input,
)
from jdfl_lightning.client.features import open_workspace, why_no_features
from jdfl_lightning.core.errors import InputError, Note, StorageError
from jdfl_lightning.data.duplicates import digest_images
from jdfl_lightning.data.features import compute_features, features_of
from jdfl_lightning.server.run import discover
from jdfl_lightning.storage.weights import load_model

FROZEN = {"freeze": True, "hidden": 6}
ALGORITHMS = ["FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON", "RobustFedAvg"]


def nothing(*_: Any) -> None:
    """Show no progress."""


def setting(**settings: Any) -> Experiment:
    return experiment(**({"backbone": "PaperCNN", "backbone_args": FROZEN, "rounds": 2} | settings))


@pytest.mark.parametrize(
    ("algorithm", "supervision"),
    [
        pytest.param(name, ("base", "graded", "random")[row % 3], marks=[pytest.mark.slow] * (row not in (0, 2)))
        for row, name in enumerate(ALGORITHMS)
    ],
)
def test_the_same_as_without_the_cache(algorithm: str, supervision: str) -> None:
    """To 1e-6: sums over a convolution's window may be ordered otherwise in batches of another size."""
    run = setting(algorithm=getattr(algorithms, algorithm)(), supervision=supervision)
    fit(replace(run, run_dir="cached"))
    fit(replace(run, run_dir="plain", backbone_args=FROZEN | {"cache": False}))
    assert Path("cached/network.safetensors").exists()
    assert not Path("plain/network.safetensors").exists()
    ours, theirs = (load_model(Path(name), "last") for name in ("cached", "plain"))
    assert {*ours.weights} == {*theirs.weights} == {"backbone.hidden.0.weight", "backbone.hidden.0.bias", *HEAD}
    assert {*ours.buffers} == {*theirs.buffers}
    for name, value in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=1e-5, atol=1e-6)
    for name, value in theirs.buffers.items():
        assert torch.equal(ours.buffers[name], value)
    for mine, other in zip(contents("cached")["rows"], contents("plain")["rows"], strict=True):
        assert mine["test/acc"] == other["test/acc"]
        assert float(mine["train/loss"]) == pytest.approx(float(other["train/loss"]), rel=1e-5)


HEAD = ("head.weight", "head.bias")


@pytest.mark.parametrize("hidden", [None, 6])
def test_frozen_parameters_do_not_travel(hidden: int | None) -> None:
    """Down and up, four clients: the head of 10 outputs, and the hidden layer; the 327,936 frozen ones stay."""
    run = fit(setting(backbone_args={"freeze": True, "hidden": hidden}, supervision="base", run_dir="run"))
    trained = 128 * 10 + 10 if hidden is None else 128 * 6 + 6 + 6 * 10 + 10
    assert [row["bytes/down"] for row in run.rows] == [row["bytes/up"] for row in run.rows] == [4 * 4 * trained] * 2
    frozen = load_model(run.folder, "best").buffers
    assert sum(tensor.numel() for tensor in frozen.values()) == sum(p.numel() for p in PaperCNN(8).parameters())


def test_bits_of_features() -> None:
    """The same for any number of threads; chunk by chunk what the network gives."""
    torch.manual_seed(0)
    network, images = PaperCNN(8).eval().requires_grad_(False), digits().images[:100]
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(compute_features(network, images, "unit", nothing))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.testing.assert_close(found[0], network(to_input(images)), rtol=1e-5, atol=1e-6)
    assert not found[0].requires_grad
    (found[0] * torch.ones(128, requires_grad=True)).sum().backward()  # usable for training


def test_what_decides_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, images, preprocessing and the network's name and arguments; a damaged file is made again."""
    torch.manual_seed(0)
    images = digits().images[:40]
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return compute_features(*args)

    def features(network: nn.Module, images: Tensor, normalize: Any, about: Any) -> Tensor:
        return features_of(network, images, normalize, about, digest_images(images), nothing)

    monkeypatch.setattr("jdfl_lightning.data.features.compute_features", counted)
    network, about = PaperCNN(8).eval(), {"name": "PaperCNN", "arguments": {}}
    other = images.clone()
    other[17, 3, 3, 0] += 1
    moved = PaperCNN(8).eval()
    first = features(network, images, "unit", about)
    assert torch.equal(features(network, images.clone(), "unit", dict(about)), first)
    assert len(calls) == 1
    cases: list[Any] = [
        (moved, images, "unit", about),
        (network, other, "unit", about),
        (network, images, "imagenet", about),
        (network, images[:39], "unit", about),
        (network, images, "unit", about | {"arguments": {"stride": 1}}),
        (network, images, "unit", None),
        (network, images, "unit", None),
    ]
    for arguments in cases:
        before = len(calls)
        features(*arguments)
        assert len(calls) == before + 1
    assert torch.equal(features(network, images, "unit", about), first)
    files = [file for file in Path(os.environ["JDFL_CACHE"]).iterdir() if file.name.endswith(".features.npy")]
    assert len(files) == 6
    for content in (b"", b"damaged", None):
        for file in files:
            file.unlink()
            if content is None:
                np.save(file.with_suffix(""), np.zeros(3))
            else:
                file.write_bytes(content)
        before = len(calls)
        assert torch.equal(features(network, images, "unit", about), first)
        assert len(calls) == before + 1


class Doubled(JointModule):
    """Changes the images of a batch."""

    def augment(self, images: torch.Tensor) -> torch.Tensor:
        return 2 * images


class Counting(JointModule):
    """Changes nothing of what a batch has."""

    def task_loss(self, logits: torch.Tensor, weights: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.log("train/size", float(len(labels)))
        return super().task_loss(logits, weights, labels)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, None),
        ({"model": Part(Counting)}, None),
        ({"model": Part(Doubled)}, "Doubled has its own augment"),
        ({"clustering": Clustering(labels="rotations")}, "Phase 1 turns images (--clustering.labels)"),
        ({"backbone_args": {"freeze": True, "cache": False}}, ""),
        ({"backbone_args": {"freeze": ["block*"]}}, ""),
        ({"backbone_args": {"hidden": 3}}, ""),
        ({"backbone": "own_parts.HiddenNet", "backbone_args": {"freeze": True, "hidden": 3}}, None),
    ],
    ids=str,
)
def test_when_features_are_used(settings: dict[str, Any], why: str | None) -> None:
    assert why_no_features(setting(**settings)) == why


def test_augmented_images_are_not_cached() -> None:
    data = digits()
    data.augment = ["RandomHorizontalFlip"]
    data.check()
    with pytest.warns(Note, match=r"runs for every batch, as images are augmented \(--data\.augment\)"):
        fit(setting(data=data, rounds=1, run_dir="run", supervision="base"))
    assert not Path("run/network.safetensors").exists()


def test_images_are_turned_below_a_frozen_network() -> None:
    """Features cannot be turned, so that Phase 1 on rotations has the images, and a run ends."""
    with pytest.warns(Note, match=r"as Phase 1 turns images \(--clustering\.labels\)"):
        run = fit(setting(rounds=1, run_dir="run", clustering=Clustering(epochs=1, layers="A", labels="rotations")))
    assert run.discovery is not None
    assert len(run.discovery["assignments"]) == 4


def test_the_data_of_the_user_has_images_afterwards() -> None:
    data = digits()
    fit(setting(data=data, run_dir="run", supervision="base"))
    assert next(iter(data.test_dataloader()))[0].shape[1:] == (3, 8, 8)


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("network", ["PaperCNN", "helpers.tiny_net"])
def test_same_bits_in_a_pool(network: str) -> None:
    """Features are mapped from the cache's file, or from a file without a name for a network of one's own."""
    run = setting(backbone=network, supervision="graded", algorithm=algorithms.SCAFFOLD())
    fit(replace(run, run_dir="local"))
    fit(replace(run, run_dir="pool", backend=PoolBackend(workers=2, threads=1)))
    assert same("local", "pool")


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:Waiting for room on the Ray cluster")
def test_same_bits_on_ray() -> None:
    run = setting(supervision="random", algorithm=algorithms.FedDC())
    fit(replace(run, run_dir="local"))
    fit(replace(run, run_dir="ray", backend=RayBackend(actors=1)))
    assert same("local", "ray")


@pytest.mark.parametrize("hidden", [None, 6])
def test_clients_trained_together(hidden: int | None) -> None:
    """To rounding, as the VectorBackend promises."""
    run = setting(backbone_args={"freeze": True, "hidden": hidden}, supervision="graded")
    fit(replace(run, run_dir="local"))
    fit(replace(run, run_dir="vector", backend=VectorBackend()))
    ours, theirs = (load_model(Path(name), "last") for name in ("local", "vector"))
    for name, value in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=1e-4, atol=1e-5)


def weights_file(file: Path, seed: int = 5) -> Path:
    torch.manual_seed(seed)
    save_file(PaperCNN(8).state_dict(), file)
    return file


def test_same_bits_on_flower(tmp_path: Path) -> None:
    """Every site computes its own features."""
    from flower_grid import run_on_grid, write_config

    arguments = FROZEN | {"weights": str(weights_file(tmp_path / "mine.safetensors"))}
    run = setting(supervision="graded", backbone_args=arguments)
    fit(replace(run, run_dir="local"))
    run_on_grid(write_config(run), {"run_dir": "flower"}, sites=2)
    ours, theirs = contents("local"), contents("flower")
    assert ours["rows"] == theirs["rows"]
    for name in ("last.safetensors", "best.safetensors", "network.safetensors", "discovery.safetensors"):
        assert ours[name] == theirs[name]


def test_a_site_with_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has the same name there, but another content."""
    from flower_grid import run_on_grid, write_config

    file = weights_file(tmp_path / "mine.safetensors")
    run = setting(supervision="base", backbone_args=FROZEN | {"weights": str(file)})
    config = write_config(run)

    def swapped(*args: Any, **kwargs: Any) -> Any:
        weights_file(file, seed=6)
        return open_workspace(*args, **kwargs)

    monkeypatch.setattr("jdfl_lightning.federation.site.open_workspace", swapped)
    with pytest.raises(InputError, match=r"--backbone_args\.weights to be '\w+' as in the server's run but got '\w+'"):
        run_on_grid(config, {"run_dir": "flower"}, sites=2)


def test_whole_models(tmp_path: Path, image_tree: Path) -> None:
    """Predict and test need no weights file; test finds the features in the cache and gives the same accuracies."""
    file = weights_file(tmp_path / "mine.safetensors")
    run = fit(setting(run_dir="run", backbone_args=FROZEN | {"weights": str(file)}))
    file.unlink()
    frame = evaluate(run, progress=False)
    assert frame.loc["best", "test/acc"] == run.best["test/acc"]
    assert frame.loc["last", "test/acc"] == run.last["test/acc"]
    assert len(predict(run, image_tree)) == 36
    network: Any = run.model().backbone.network
    torch.manual_seed(5)
    assert all(torch.equal(network.state_dict()[name], value) for name, value in PaperCNN(8).state_dict().items())
    Path("run/network.safetensors").unlink()
    with pytest.raises(StorageError, match=r"Expected the network that run/best\.safetensors was trained on"):
        predict(run, image_tree)


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    arguments = FROZEN | {"weights": str(weights_file(tmp_path / "mine.safetensors"))}
    run = setting(rounds=3, backbone_args=arguments, algorithm=algorithms.SCAFFOLD(), supervision="graded")
    fit(replace(run, run_dir="whole"))
    fit(replace(run, run_dir="part", rounds=2))
    fit(replace(run, resume="part"))
    assert same("whole", "part")


def test_other_weights_do_not_resume_a_run(tmp_path: Path) -> None:
    file = weights_file(tmp_path / "mine.safetensors")
    run = setting(run_dir="run", supervision="base", backbone_args=FROZEN | {"weights": str(file)})
    fit(run)
    weights_file(file, seed=6)
    with pytest.raises(StorageError, match=r"PaperCNN \(--backbone_args\.weights\) that the run began with"):
        fit(replace(run, run_dir=None, resume="run", rounds=3))


@pytest.mark.slow
def test_privacy_with_a_network_that_has_statistics() -> None:
    """A frozen network is no part of what clients send, so that it may have BatchNorm."""
    private = PrivateFedAvg()
    run = setting(backbone="resnet18", backbone_args={"freeze": True}, algorithm=private, supervision="base", rounds=1)
    found = fit(replace(run, run_dir="run", client_fraction=0.5))
    assert len(load_model(found.folder, "last").buffers) > 100
    with pytest.raises(InputError, match="without running statistics"):
        fit(replace(run, run_dir="other", client_fraction=0.5, backbone_args={"freeze": True, "cache": False}))


def test_discovery_on_features() -> None:
    """Phase 1 looks at the head's update: 128 x 10 weights and 10 biases."""
    found = discover(setting(run_dir="found", backbone_args={"freeze": True}))
    vectors = [v for v in load_file(found / "discovery.safetensors").values() if v.ndim == 2 and v.shape[0] == 4]
    assert vectors[0].shape == (4, 1290)


def test_a_network_that_is_all_features_gives_a_light_module() -> None:
    workspace = open_workspace(setting())
    weights, buffers = workspace.initial(1)
    module = workspace.module(weights, buffers)
    assert buffers == {}
    assert isinstance(module.backbone.network, nn.Identity)
    assert module(torch.zeros(2, 128)).shape == (2, 10)
    assert workspace.data.features is not None
    assert workspace.data.features.shape == (1797, 128)
