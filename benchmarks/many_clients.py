"""A round of a thousand small clients with VectorBackend, for every algorithm.

    python benchmarks/many_clients.py

Every client has about 32 samples, the features of a frozen network, and takes one step on a head of 1,280 x 7 weights.
All clients take part in every round. A round is sampling, states read and written, training, screening, aggregation and
the checkpoint; accuracy is evaluated after the last round only, which does not count, nor does the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise

from random_images import RandomImages
from registered import Clock
from timing import write_section

from jdfl_lightning import Experiment, VectorBackend, algorithms, fit, reuse_memory

ALGORITHMS = ("FedAvg", "FedProx", "RobustFedAvg", "FedProc", "MOON", "SCAFFOLD", "FedDyn", "FedDC")


def measure(algorithm: str, supervision: str, clients: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a round, by the clock and of computing, and the memory in MiB."""
    reuse_memory()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        fit(
            Experiment(
                data=RandomImages(size=8, num_clients=clients, images=36 * clients),
                backbone="small_net.wide_features",
                backbone_args={"freeze": True},
                algorithm=getattr(algorithms, algorithm)(),
                supervision=supervision,
                num_domains=4,
                rounds=rounds,
                epochs=1,
                client_fraction=1.0,
                evaluate_every=rounds,
                backend=VectorBackend(),
                figures=False,
                run_dir=f"{folder}/run",
            ),
            clock,
        )
    work, seconds = ([b - a for a, b in pairwise(ends[:-1])] for ends in (clock.work, clock.ends))
    return {
        "work": statistics.median(work),
        "median": statistics.median(seconds),
        "least": min(seconds),
        "memory": max(clock.memory),
    }


def main() -> None:
    """Measure every algorithm and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--supervisions", nargs="+", default=["base", "random"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one.split(","), options.clients, options.rounds)))
        return
    lines = [
        f"{options.clients:,} clients of about 32 samples, one step each, {options.rounds - 2} rounds.\n",
        "| algorithm | supervision | seconds of computing a round | seconds (median) | least | MiB |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for supervision in options.supervisions:
        for algorithm in options.algorithms:
            case = ["--one", f"{algorithm},{supervision}", "--clients", str(options.clients)]
            command = [sys.executable, __file__, *case, "--rounds", str(options.rounds)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            row = json.loads(done.stdout.splitlines()[-1])
            times = " | ".join(f"{row[name]:.2f}" for name in ("work", "median", "least"))
            lines.append(f"| {algorithm} | {supervision} | {times} | {row['memory']:,.0f} |")
            print(lines[-1], flush=True)
    write_section("many clients", "\n".join(lines))


if __name__ == "__main__":
    main()
