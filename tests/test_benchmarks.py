"""The two benchmarks that try to break the package run, and find nothing in the few cases that there is time for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
