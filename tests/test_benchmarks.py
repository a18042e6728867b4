"""Benchmarks that check something: those that try to break the package, and the one that compares it with its peers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pages import ROOT


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks look into /proc")
@pytest.mark.parametrize(
    ("words", "row"),
    [
        (["kills.py", "--every", "60", "--fits", "0", "--scenarios", "FedAvg, base"], "| FedAvg, base | killed | "),
        (
            ["kills.py", "--every", "60", "--fits", "0", "--scenarios", "clients trained together"],
            "| clients trained together | killed | ",
        ),
        (["fuzz.py", "--cases", "6"], "| command lines | 3 | "),
    ],
    ids=["kills", "kills of a stack", "fuzz"],
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


@pytest.mark.parametrize(
    ("factor", "rounds", "counts"),
    [(1.0, 3, True), (1.01, 3, False), (1.0, 2, False)],
    ids=["same", "weights", "rounds"],
)
def test_another_job_has_no_time(factor: float, rounds: int, counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    peers, loop = importlib.import_module("peers"), importlib.import_module("peer_loop")
    job = peers.Job(size=8, clients=2, images=8, rounds=3, backbone="small_net.small_net")
    jobs = iter([(1.0, 3), (factor, rounds)])

    def do_job(case: object, file: Path, folder: Path) -> tuple[float, Any]:
        """Do the job as the loop does, but with another rate, or fewer rounds."""
        prepared, (scale, count) = peers.Prepared.load(file), next(jobs)
        changed = replace(prepared.job, lr=scale * prepared.job.lr, rounds=count)
        return 0.0, loop.run(replace(prepared, job=changed))

    monkeypatch.setattr(peers, "do_job", do_job)
    before = torch.get_num_threads()
    try:
        found = peers.take_turn(job, peers.CASES[:2])
    finally:
        torch.set_num_threads(before)
    assert list(found) == [case.name for case in peers.CASES[: 1 + counts]]
