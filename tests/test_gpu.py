"""What docs/gpu.md says of GPUs, as far as a machine without one can tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import experiment
from jdfl_lightning import PoolBackend
from jdfl_lightning.backends.local import LocalRunner
from jdfl_lightning.cli import main
from jdfl_lightning.client.trainer import TrainerOptions
from jdfl_lightning.storage.checkpoint import ClientStates


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--trainer.accelerator", "gpu"], "options that work on this machine but: No supported gpu backend found"),
        (["--trainer.accelerator", "cuda"], "options that work on this machine but: .*CUDAAccelerator"),
        (["--trainer.accelerator", "cpu", "--trainer.devices", "[1]"], "options that work on this machine but: "),
        (["--trainer.devices", "2"], "--trainer.devices to be one device, as a client trains on one, but got 2"),
        (["--trainer.strategy", "ddp"], "a client trains on one device"),
        (["--trainer.benchmark", "true"], "it would make the bits of a GPU depend on timings"),
    ],
)
def test_what_a_machine_without_a_gpu_refuses(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line)


@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
def test_one_chosen_gpu_has_no_workers(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers would all be on that GPU; whoever wants this gives their number."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # they would be set to these 8 afterwards
    run: Any = experiment(trainer=TrainerOptions(accelerator=accelerator, devices="[1]"))
    with PoolBackend().open(run, ClientStates(Path("clients"))) as runner:
        assert type(runner) is LocalRunner
