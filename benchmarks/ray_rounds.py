"""What Ray adds to a round: the round's time, less that of the actor that worked longest.

    python benchmarks/ray_rounds.py

Ray is started on this machine; every client trains the paper's network on 40 images of 32 px. Actors write down how
long each job took them; the rest of a round is messages, the object store, states and waiting for each other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from random_images import RandomImages
from timing import write_section

from jdfl_lightning import SCAFFOLD, Algorithm, Experiment, FedAvg, RayBackend
from jdfl_lightning.backends import ray as backend
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.core.messages import FitResult, FitTask
from jdfl_lightning.storage.checkpoint import ClientStates

LOG = "JDFL_BENCHMARK_LOG"


class Timed(backend.Clients):
    """An actor that writes down how long it works."""

    def do(self, *arguments: Any) -> np.ndarray:
        """Do a job and add its seconds to this actor's file."""
        start = time.perf_counter()
        answer = super().do(*arguments)
        with Path(os.environ[LOG], str(os.getpid())).open("a") as log:
            log.write(f"{time.perf_counter() - start}\n")
        return answer


def rounds(algorithm: Algorithm, actors: int, clients: int, turns: int) -> tuple[list[float], list[float], int]:
    """Run rounds; return the seconds of each, those beyond the busiest actor's, and the bytes that go to an actor."""
    everybody = max(4, clients)
    data = RandomImages(size=32, num_clients=everybody, images=45 * everybody)
    data.deal(0)
    run = Experiment(data=data, algorithm=algorithm, supervision="base", epochs=1, client_fraction=1.0)
    weights, buffers = Workspace(run).initial(1)
    broadcast = algorithm.broadcast(algorithm.init_server(weights))
    times, beyond, since = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ[LOG] = f"{folder}/log"
        Path(folder, "log").mkdir()
        with RayBackend(actors=actors).open(run, ClientStates(Path(folder, "run/clients"))) as runner:
            for number in range(1, turns + 2):
                tasks = [
                    FitTask(client, number, 0, weights, buffers, broadcast, since=since) for client in range(clients)
                ]
                before = worked(folder)
                start = time.perf_counter()
                results = list(runner.fit(tasks))
                seconds = time.perf_counter() - start
                assert all(isinstance(result, FitResult) for result in results), results
                since = number if algorithm.init_client(weights) else 0
                if number > 1:  # the first one waits for the actors to start
                    after = worked(folder)
                    times.append(seconds)
                    beyond.append(seconds - max(after[actor] - before[actor] for actor in after))
    return times, beyond, tasks[0].num_bytes


def worked(folder: str) -> dict[str, float]:
    """Return the seconds that each actor has worked."""
    found: dict[str, float] = defaultdict(float)
    for log in Path(folder, "log").iterdir():
        found[log.name] = sum(map(float, log.read_text().split()))
    return found


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    backend.Clients = Timed  # type: ignore[misc]
    lines = [
        "| algorithm | actors | clients a round | s a round | ms beyond the busiest actor | MB to an actor |",
        "|---|" + "---:|" * 5,
    ]
    for algorithm in (FedAvg(), SCAFFOLD()):
        for actors, clients in ((1, 1), (2, 2), (2, 10)):
            times, beyond, size = rounds(algorithm, actors, clients, options.turns)
            extra = sorted(1000 * seconds for seconds in beyond)
            middle = f"{statistics.median(extra):.0f} ({extra[0]:.0f} to {extra[-1]:.0f})"
            name = type(algorithm).__name__
            row = f"| {name} | {actors} | {clients} | {statistics.median(times):.2f} | {middle} | {size / 1e6:.1f} |"
            lines.append(row)
            print(row, flush=True)
    write_section("ray rounds", "\n".join(lines), "ray.md")


if __name__ == "__main__":
    main()
