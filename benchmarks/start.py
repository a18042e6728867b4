"""How long it takes to start: help, import, and `fit` to its first step on cached images.

    python benchmarks/start.py

The images are noise in the shape of PACS: 9,991 JPEG files of 128 px.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from timing import in_turns, write_section

TELL = """
import time
from jdfl_lightning import FedAvg
class Telling(FedAvg):
    def local(self, task, state):
        local = super().local(task, state)
        local.begin = lambda params: print("FIRST STEP", time.time(), flush=True)
        return local
"""


def main() -> None:
    """Time all and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "telling.py").write_text(TELL)
        write_images(folder / "images")
        environment = os.environ | {"PYTHONPATH": str(folder), "JDFL_CACHE": str(folder / "cache")}
        arguments = ["--data", "ImageFolderDomains", "--data.root", str(folder / "images"), "--data.size", "112"]
        arguments += ["--algorithm", "telling.Telling", "--supervision", "base", "--rounds", "1", "--epochs", "1"]

        def first_step(*more: str) -> float:
            begin = time.time()
            command = [sys.executable, "-m", "jdfl_lightning", "fit", *arguments, *more]
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("FIRST STEP"):
                        process.kill()
                        return float(line.split()[2]) - begin
            raise SystemExit(f"the run ended with code {process.returncode} before its first step")

        first = first_step("--backend", "LocalBackend")
        python, package = sys.executable, "jdfl_lightning"
        steps: dict[str, list[float]] = {"LocalBackend": [], "PoolBackend": []}
        times = in_turns(
            {
                "`jdfl-lightning --help`": lambda: run(python, "-m", f"{package}.cli", "--help"),
                "`jdfl-lightning fit --help`": lambda: run(python, "-m", f"{package}.cli", "fit", "--help"),
                "`import jdfl_lightning`": lambda: run(python, "-c", f"import {package}"),
                "`import torch`": lambda: run(python, "-c", "import torch"),
                "`import lightning.pytorch`": lambda: run(python, "-c", "import lightning.pytorch"),
                "`from jdfl_lightning import JointHead`": lambda: run(python, "-c", f"from {package} import JointHead"),
                **{
                    f"`fit`, second start to the first step, {name}": lambda name=name: steps[name].append(
                        first_step("--backend", name)
                    )
                    for name in steps
                },
            },
            options.turns,
        )
        for name, seconds in steps.items():
            times[f"`fit`, second start to the first step, {name}"] = seconds[1:]
    lines = [
        f"PACS-like noise, 9,991 images at 112 px; the first start, which decodes them, took {first:.1f} s to its "
        f"first step. {options.turns} turns.",
        "",
        "| | seconds (median) | least to most |",
        "|---|---|---|",
    ]
    for name, seconds in times.items():
        lines.append(f"| {name} | {times.median(name):.2f} | {min(seconds):.2f} to {max(seconds):.2f} |")
    write_section("start", "\n".join(lines))


def run(*command: str) -> None:
    """Run a command to its end."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_images(root: Path) -> None:
    """Write noise in four domains of seven classes, as many as PACS has."""
    rng = np.random.default_rng(0)
    for domain, count in (("photo", 1670), ("art", 2048), ("cartoon", 2344), ("sketch", 3929)):
        for label in range(7):
            (root / domain / str(label)).mkdir(parents=True)
        for number in range(count):
            noise = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize((128, 128))
            noise.save(root / domain / str(number % 7) / f"{number}.jpg")


if __name__ == "__main__":
    main()
