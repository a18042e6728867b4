"""A joint head on other people's networks: torchvision's and timm's classifiers, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from jdfl_lightning import HardTargets, JointHead, SoftTargetKLLoss, predict_class, replace_head
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.models import find_head

NETWORKS = [
    ("torchvision", "resnet18", "fc"),
    ("torchvision", "efficientnet_b0", "classifier.1"),
    ("torchvision", "vit_b_32", "heads.head"),
    ("torchvision", "mobilenet_v3_small", "classifier.3"),
    ("timm", "resnet18", "fc"),
    ("timm", "efficientnet_b0", "classifier"),
    ("timm", "vit_tiny_patch16_224", "head"),
    ("timm", "mobilenetv3_small_050", "classifier"),
]


def build(library: str, name: str) -> nn.Module:
    """A classifier of 1,000 classes for images of 32 px."""
    if library == "torchvision":
        options: dict[str, Any] = {"image_size": 32} if name.startswith("vit") else {}
        model = torchvision.models.get_model(name, **options)
    else:
        options = {"img_size": 32} if name.startswith("vit") else {}
        model = timm.create_model(name, **options)
    assert isinstance(model, nn.Module)
    return model


def loss_of(model: nn.Module, images: Tensor, labels: Tensor, domains: Tensor) -> Tensor:
    loss: Tensor = SoftTargetKLLoss()(model(images), HardTargets(4)(domains), labels)
    return loss


@pytest.mark.parametrize(
    ("library", "name", "head"),
    [pytest.param(*network, marks=[pytest.mark.slow] * (network[1] != "resnet18")) for network in NETWORKS],
)
def test_real_networks(library: str, name: str, head: str) -> None:
    """M*C outputs, a head that is trained, and weights that a second such network takes over."""
    torch.manual_seed(0)
    model = build(library, name)
    others = {n for n, _ in model.named_parameters() if not n.startswith(f"{head}.")}
    assert replace_head(model, num_classes=7, num_domains=4) is model
    layer = model.get_submodule(head)
    assert isinstance(layer, JointHead)
    assert {n for n, _ in model.named_parameters()} == others | {f"{head}.weight", f"{head}.bias"}

    images, labels, domains = torch.randn(8, 3, 32, 32), torch.arange(8) % 7, torch.arange(8) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss = loss_of(model, images, labels, domains)
    assert loss.item() == pytest.approx(torch.tensor(28.0).log().item(), rel=0.25)  # 28 outputs, nothing learned yet
    loss.backward()
    optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert {f"{head}.weight", f"{head}.bias"} <= moved
    assert moved & others  # some start behind a zero, and cannot move in one step

    twin = replace_head(build(library, name), 7, 4)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        logits = model.eval()(images)
        assert torch.equal(twin.eval()(images), logits)
    assert logits.shape == (8, 28)
    assert torch.equal(layer.predict(logits), predict_class(logits, 7))


def test_device_type_mode_and_bias_are_those_of_the_old_head() -> None:
    model = nn.ModuleDict({"head": nn.Linear(4, 2, bias=False, dtype=torch.float64)}).eval()
    head = replace_head(model, 3, 2, score="sum").get_submodule("head")
    assert isinstance(head, JointHead)
    assert "bias" not in head.state_dict()
    assert (head.weight.dtype, head.training, head.score) == (torch.float64, False, "sum")
    with torch.device("meta"):
        meta = nn.ModuleDict({"fc": nn.Linear(4, 2)})
    assert replace_head(meta, 3, 2).get_parameter("fc.weight").device.type == "meta"


def test_a_frozen_network_gets_a_head_that_is_trained() -> None:
    model = nn.ModuleDict({"body": nn.Linear(5, 4), "fc": nn.Linear(4, 2)}).requires_grad_(False)
    replace_head(model, 3, 2)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["fc.weight", "fc.bias"]


def test_a_head_can_be_replaced_again_and_by_name() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 10))
    assert replace_head(model, 3, 2, head="3")(torch.zeros(1, 3, 2, 2)).shape == (1, 6)
    assert replace_head(model, 5, 4, head="3")(torch.zeros(1, 3, 2, 2)).shape == (1, 20)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torchvision.models.squeezenet1_1(),  # ends in a convolution
        lambda: timm.create_model("resnet18", num_classes=0),  # has no head
        lambda: timm.create_model("deit_tiny_distilled_patch16_224"),  # has two
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)),  # may be anything
    ],
)
def test_no_head_is_found(make: object) -> None:
    model = make()  # type: ignore[operator]
    with pytest.raises(InputError, match=rf"linear head but found none in {type(model).__name__}"):
        replace_head(model, 7, 4)


def test_a_bad_name_is_named() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(InputError, match="linear layer but '0' is a Flatten"):
        replace_head(model, 7, 4, head="0")
    with pytest.raises(InputError, match="part of Sequential but got 'top'"):
        replace_head(model, 7, 4, head="top")


@pytest.mark.slow
def test_torchvisions_heads_are_the_last_linear_layers() -> None:
    """One of every family, built without memory."""
    names = (
        "alexnet convnext_tiny densenet121 googlenet inception_v3 maxvit_t mnasnet0_5 mobilenet_v2 resnext50_32x4d "
        "shufflenet_v2_x0_5 swin_t swin_v2_t vgg11 wide_resnet50_2 efficientnet_v2_s"
    )
    with torch.device("meta"):
        for name in names.split():
            model = torchvision.models.get_model(
                name, **({"init_weights": False} if name in ("googlenet", "inception_v3") else {})
            )
            assert find_head(model) == [n for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1], name
    assert find_head(torchvision.models.regnet_y_400mf()) == "fc"
