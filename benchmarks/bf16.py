"""Accuracy in bf16 mixed precision beside single precision: FedAvg on the digits, baseline and graded targets.

    python benchmarks/bf16.py

Runs of one seed share split, initialisation and order of batches; they differ in the precision alone, and with it in
the layout of images and convolutions. The accuracy is that of the last round, on the test images.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import product
from typing import Any

import torch
from timing import write_section

from jdfl_lightning import DigitsDomains, Experiment, LocalBackend, TrainerOptions, fit
from jdfl_lightning.ui.display import Display

PRECISIONS = ("32-true", "bf16-mixed")


def measure(supervision: str, seed: int, precision: Any, rounds: int, size: int) -> tuple[float, float]:
    """Return the accuracy after the last round, in per cent, and the run's seconds of computing."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run = fit(
            Experiment(
                data=DigitsDomains(size=size),
                backbone="digits_net.digits_net",
                supervision=supervision,
                num_domains=None if supervision == "base" else 4,
                rounds=rounds,
                epochs=2,
                lr=0.05,
                evaluate_every=rounds,
                seed_everything=seed,
                trainer=TrainerOptions(precision=precision, accelerator="cpu"),
                backend=LocalBackend(),
                figures=False,
                run_dir=f"{folder}/run",
            ),
            Display(),
        )
        accuracy = 100 * float(run.metrics["test/acc"].iloc[-1])
    return accuracy, time.process_time() - start


def main() -> None:
    """Run all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--size", type=int, default=16)
    options = parser.parse_args()
    lines = [
        f"FedAvg, 10 clients of {options.size} px, half of them in a round, {options.rounds} rounds of 2 epochs; torch "
        f"{torch.__version__.partition('+')[0]}.\n",
        "| supervision | precision | " + " | ".join(f"seed {seed}" for seed in options.seeds) + " | mean |",
        "|---|---|" + "---:|" * (len(options.seeds) + 1),
    ]
    for supervision, precision in product(("base", "graded"), PRECISIONS):
        found = [measure(supervision, seed, precision, options.rounds, options.size) for seed in options.seeds]
        numbers = [accuracy for accuracy, _ in found]
        cells = " | ".join(f"{number:.1f}" for number in [*numbers, statistics.mean(numbers)])
        lines.append(f"| {supervision} | {precision} | {cells} |")
        print(lines[-1], f"  {sum(seconds for _, seconds in found):.0f} s of computing", flush=True)
    write_section("bf16", "\n".join(lines))


if __name__ == "__main__":
    main()
