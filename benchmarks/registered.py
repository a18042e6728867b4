"""Time and memory of a round against the number of registered clients, of which 50 or 1,000 take part.

    python benchmarks/registered.py
    python benchmarks/registered.py --features --per_round 1000 --clients 1000 10000 100000 --rounds 12 --probed 10000

Each row is a run in a process of its own: `fit` with checkpoints, metrics and all, random targets with Phase 1 on as
many clients as a round has, or --probed of them, 5 images a client at 8 px and a network of a few hundred parameters,
so that what is left is the server's. With --features clients train a head on the features of a frozen network, which
are computed once, with VectorBackend, and Phase 1 uses sketches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from random_images import RandomImages
from timing import write_section

from jdfl_lightning import SCAFFOLD, Clustering, Experiment, FedAvg, LocalBackend, VectorBackend, fit
from jdfl_lightning.storage.checkpoint import ClientStates
from jdfl_lightning.ui.display import Display


def resident() -> float:
    """Return the memory of this process, in MiB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


class Clock(Display):
    """Takes down when a round ends, and the memory then."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.work: list[float] = []
        self.memory: list[float] = []
        self.stages: dict[str, float] = {}
        """When each stage began."""

    def step(self, what: str, done: int, total: int) -> None:
        """A client has answered, or a stage begins."""
        self.stages.setdefault(what, time.perf_counter())

    def round(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        """A round has ended."""
        self.ends.append(time.perf_counter())
        self.work.append(time.process_time())
        self.memory.append(resident())


def measure(clients: int, algorithm: str, rounds: int, per_round: int, probed: int, features: bool) -> dict[str, float]:
    """Run rounds; return the time of a round in the first and in the last third, and the memory after each."""
    clock, share = Clock(), per_round / clients
    with tempfile.TemporaryDirectory() as folder:
        fit(
            Experiment(
                data=RandomImages(size=8, num_clients=clients, images=6 * clients),
                backbone="small_net.wide_features" if features else "small_net.small_net",
                backbone_args={"width": 64, "freeze": True} if features else {},
                algorithm=SCAFFOLD() if algorithm == "SCAFFOLD" else FedAvg(),
                supervision="random",
                num_domains=4,
                rounds=rounds,
                epochs=1,
                client_fraction=share,
                clustering=Clustering(
                    epochs=1, fraction=min(1.0, probed / clients), sketch_dim=256 if features else None
                ),
                evaluate_every=rounds,
                backend=VectorBackend() if features else LocalBackend(),
                figures=False,
                run_dir=f"{folder}/run",
            ),
            clock,
        )
        states = len(ClientStates(Path(folder, "run/clients")).kept())
    seconds, work = (
        [b - a for a, b in pairwise(ends[:-1])] for ends in (clock.ends, clock.work)
    )  # the last is evaluated
    third = len(seconds) // 3
    return {
        "phase_1": clock.stages["round 1"] - clock.stages["discovery"],
        "work_first": statistics.median(work[:third]),
        "work_last": statistics.median(work[-third:]),
        "first": min(seconds[:third]),
        "last": min(seconds[-third:]),
        "memory_first": clock.memory[third],
        "memory_last": clock.memory[-2],
        "states": states,
    }


def main() -> None:
    """Measure all numbers of clients and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--algorithms", nargs="+", default=["FedAvg", "SCAFFOLD"])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--per_round", type=int, default=50)
    parser.add_argument("--probed", type=int, help="clients in Phase 1; as many as in a round if not given")
    parser.add_argument("--features", action="store_true", help="train heads on features of a frozen network")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        clients, algorithm = options.one.split(",")
        probed = options.probed or options.per_round
        found = measure(int(clients), algorithm, options.rounds, options.per_round, probed, options.features)
        print(json.dumps(found))
        return
    lines = [
        "| algorithm | registered | Phase 1 (s) | CPU s a round, early | late | least s, early | late "
        "| MiB, early | late | states |",
        "|---|" + "---:|" * 9,
    ]
    for algorithm in options.algorithms:
        for clients in options.clients:
            command = [sys.executable, __file__, "--one", f"{clients},{algorithm}", "--rounds", str(options.rounds)]
            command += ["--per_round", str(options.per_round), *["--features"] * options.features]
            command += [] if options.probed is None else ["--probed", str(options.probed)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = json.loads(done.stdout.splitlines()[-1])
            times = " | ".join(f"{row[name]:.3f}" for name in ("work_first", "work_last", "first", "last"))
            sizes = " | ".join(f"{row[name]:.0f}" for name in ("memory_first", "memory_last", "states"))
            lines.append(f"| {algorithm} | {clients:,} | {row['phase_1']:.1f} | {times} | {sizes} |")
            print(lines[-1], flush=True)
    name = "registered clients on features" if options.features else "registered clients"
    write_section(name, "\n".join(lines), "scale.md")


if __name__ == "__main__":
    main()
