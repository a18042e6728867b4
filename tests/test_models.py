"""Backbones and the LightningModule on its own."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from helpers import every
from jdfl_lightning import DigitsDomains, GradedTargets, JointHead, JointModule, PaperCNN, RandomTargets
from jdfl_lightning.client.trainer import TrainerOptions, quiet, silent_trainer
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.models import build_backbone, conv_blocks, num_features, select_parameters


def paper_module(size: int = 32, **arguments: object) -> JointModule:
    return JointModule(PaperCNN(size), 128, **({"num_classes": 7} | arguments))  # type: ignore[arg-type]


def test_paper_cnn_has_the_papers_size() -> None:
    """6,744,487 parameters at 112 px with 7 classes.

    Blocks: 896 + 64 + 9,248 + 64; 18,496 + 128 + 36,928 + 128; 73,856 + 256 + 147,584 + 256 = 287,904.
    fc1: 128 * 14 * 14 * 256 + 256 = 6,422,784; fc2: 32,896; fc3: 903.
    """
    module = paper_module(112)
    assert sum(p.numel() for p in module.parameters()) == 287_904 + 6_422_784 + 32_896 + 903 == 6_744_487


def test_paper_cnn_against_a_plain_version() -> None:
    cnn, x = PaperCNN(16), torch.randn(2, 3, 16, 16)
    maps = x
    for block in (cnn.block1, cnn.block2, cnn.block3):
        conv1, norm1, _, conv2, norm2, _, _ = block
        maps = torch.relu(norm1(conv1(maps)))
        maps = nn.functional.max_pool2d(torch.relu(norm2(conv2(maps))), 2)
    expected = torch.relu(cnn.fc2(torch.relu(cnn.fc1(maps.flatten(1)))))
    torch.testing.assert_close(cnn(x), expected)
    assert [cnn.get_submodule(name).num_groups for name in ("block1.1", "block2.1", "block3.4")] == [8, 16, 16]


@pytest.mark.parametrize("size", [0, 4, 30, 114])
def test_paper_cnn_refuses_other_sizes(size: int) -> None:
    with pytest.raises(InputError, match=f"multiple of 8 but got {size}"):
        PaperCNN(size)


@pytest.mark.parametrize(
    ("name", "features", "last"),
    [
        ("resnet18", 512, "layer4"),
        ("mobilenet_v3_small", 1024, "features.12"),
        pytest.param("vit_b_16", 768, "conv_proj", marks=pytest.mark.slow),
    ],
)
def test_torchvision_backbones(name: str, features: int, last: str) -> None:
    size = 224 if name.startswith("vit") else 32
    backbone = build_backbone(name, size)
    assert num_features(backbone, size) == features
    assert backbone.training
    assert conv_blocks(backbone)[-1] == last


@pytest.mark.parametrize(
    "name",
    [
        "resnet19",
        "helpers.missing",
        "no_such_module.net",
        "os.getcwd",
        "os.path",
        "..x",
        "fcn_resnet50",
        "helpers.Path",
    ],
)
def test_unknown_backbone(name: str) -> None:
    with pytest.raises(InputError, match="--backbone"):
        build_backbone(name, 32)


def test_backbone_must_give_features() -> None:
    with pytest.raises(InputError, match=r"--data\.size"):
        num_features(build_backbone("alexnet", 8), 8)
    with pytest.raises(InputError, match="features of shape"):
        num_features(build_backbone("helpers.picture_net", 8), 8)


def test_layer_subsets() -> None:
    """B is block3 and the head: 221,952 + 903 parameters; A the head alone; C adds block2's 55,680."""
    module = paper_module(8)
    sizes = {
        layers: sum(dict(module.named_parameters())[name].numel() for name in select_parameters(module, layers))
        for layers in "ABC"
    }
    assert sizes == {"A": 903, "B": 222_855, "C": 222_855 + 55_680}
    assert select_parameters(module, ["*fc2*", "head.bias"]) == [
        "backbone.fc2.weight",
        "backbone.fc2.bias",
        "head.bias",
    ]
    for wrong in ("D", ["nothing.*"]):
        with pytest.raises(InputError, match=r"--clustering\.layers"):
            select_parameters(module, wrong)


@pytest.mark.parametrize("targets", every(3, [RandomTargets(2), GradedTargets(torch.eye(4)), None]))
def test_module_trains_alone(targets: nn.Module | None) -> None:
    """Plain Lightning: 6 epochs on the digits at 8 px are enough to do far better than chance."""
    pl.seed_everything(0, verbose=False)
    data = DigitsDomains(size=8)
    module = JointModule(
        nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU()),
        64,
        10,
        targets,  # type: ignore[arg-type]
        domains=data.domain_names,
        lr=0.2,
    )
    if targets is not None and module.head.num_domains == 2:
        data.setup()
        data.domains %= 2
    with quiet():
        trainer = silent_trainer(TrainerOptions(accelerator="cpu"), max_epochs=6)
        trainer.fit(module, data)
        (scores,) = trainer.test(module, data, verbose=False)
    assert scores["test/acc"] > 0.5
    assert {"test/acc_worst", "test/acc_spread", "test/acc/ink", "test/acc/outline"} <= set(scores)
    assert "val/acc" in trainer.callback_metrics or trainer.validate_loop is not None


def test_module_is_its_parts() -> None:
    module = JointModule(nn.Flatten(), 12, 3, RandomTargets(2))
    assert isinstance(module.head, JointHead)
    images, labels = torch.randn(5, 3, 2, 2), torch.tensor([0, 1, 2, 0, 1])
    module.generator = torch.Generator().manual_seed(1)
    weights = RandomTargets(2)(labels, torch.Generator().manual_seed(1))
    seen: list[torch.Tensor] = []

    def term(task_loss: torch.Tensor, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.extend((features, labels))
        return 2 * task_loss

    module.loss_term = term
    loss = module.training_step((images, labels, labels), 0)
    torch.testing.assert_close(loss, 2 * module.loss(module(images), weights, labels))
    assert torch.equal(seen[0], images.flatten(1))
    assert torch.equal(seen[1], labels)
