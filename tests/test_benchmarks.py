"""Benchmarks that check something: those that try to break the package, and the one that compares it with its peers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pages import ROOT


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks look into /proc")
@pytest.mark.parametrize(
    ("words", "row"),
    [
        (["kills.py", "--every", "60", "--fits", "0", "--scenarios", "FedAvg, base"], "| FedAvg, base | killed | "),
        (["fuzz.py", "--cases", "6"], "| command lines | 3 | "),
    ],
    ids=["kills", "fuzz"],
)
def test_nothing_is_found(words: list[str], row: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert row in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark looks into /proc")
@pytest.mark.skipif(importlib.util.find_spec("pfl") is None, reason="pfl is not installed; `make peers` installs it")
def test_peers_do_the_same_job() -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks/peers.py"),
        "--small",
        "--turns",
        "1",
        "--columns",
        "32 px",
        "tiny",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("hand-written loop", "pfl, two processes", "Flower", "this package, LocalBackend"):
        assert len(re.findall(f"^{name}: rounds", done.stdout, flags=re.MULTILINE)) == 2, done.stdout


@pytest.mark.parametrize(("factor", "rounds"), [(1.01, 3), (1.0, 2)], ids=["other weights", "a round less"])
def test_another_job_has_no_time(factor: float, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    peers = importlib.import_module("peers")
    job, cases = peers.Job(size=8, clients=2, images=8, rounds=3, backbone="small_net.small_net"), peers.CASES[:2]
    done = iter([(1.0, 3), (factor, rounds)])

    def do_job(case: object, file: Path, folder: Path) -> tuple[float, list[float], dict[str, torch.Tensor]]:
        scale, count = next(done)
        weights = peers.Prepared.load(file).weights
        return 0.0, [1.0, 2.0, 3.0][:count], {name: value + scale for name, value in weights.items()}

    monkeypatch.setattr(peers, "do_job", do_job)
    with pytest.raises(SystemExit, match="memory kept does another job"):
        peers.take_turn(job, cases)
