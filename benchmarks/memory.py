"""Peak memory of the server: against the clients of a round, and against all clients of a stateful algorithm.

    python benchmarks/memory.py

Each row is a run in a process of its own, of two rounds (the second table: as many as it takes for every client to take
part about twice) with images of 32 px, whose model has 3.4 MB; what is reported is the server process alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from random_images import RandomImages
from timing import write_section

from jdfl_lightning import SCAFFOLD, Experiment, FedAvg, LocalBackend, PoolBackend, RunCallback
from jdfl_lightning.backends import Backend
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.server.events import Events
from jdfl_lightning.server.rounds import Rounds
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.storage.checkpoint import ClientStates


class Tidy(RunCallback):
    """Removes states that are no longer needed, as checkpoints do."""

    def __init__(self, states: ClientStates) -> None:
        self.states = states

    def round_aggregated(self, state: ServerState, metrics: dict[str, float]) -> None:
        """Keep the newest state of each client."""
        for client, round in set(self.states.kept()) - set(state.clients.items()):
            self.states.remove(client, round)


def measure(clients: int, per_round: int, rounds: int, backend: str, algorithm: str) -> dict[str, float]:
    """Run some rounds; return the peak memory of this process and the size of the clients' states, in MiB."""
    data = RandomImages(size=32, num_clients=clients, images=5 * clients + 40)
    data.deal(0)
    where: Backend = LocalBackend() if backend == "local" else PoolBackend(workers=2, threads=1)
    run = Experiment(
        data=data,
        algorithm=SCAFFOLD() if algorithm == "SCAFFOLD" else FedAvg(),
        supervision="base",
        rounds=rounds,
        epochs=1,
        client_fraction=per_round / clients,
        evaluate_every=rounds,
    )
    with tempfile.TemporaryDirectory() as folder:
        weights, buffers = Workspace(run).initial(1)
        state = ServerState(0, weights, buffers, run.algorithm.init_server(weights))
        states = ClientStates(Path(folder))
        with where.open(run, states) as runner:
            Rounds(run, runner, Events(Tidy(states))).run(state)
        disk = sum(file.stat().st_size for file in Path(folder).iterdir())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak": peak / 1024, "disk": disk / 2**20}


def apart(*case: int | str) -> dict[str, float]:
    """Measure a case in a process of its own."""
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(case, done.stdout.strip(), flush=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure all cases and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(*options.case)))
        return
    lines = ["| clients a round (FedAvg) | local (MiB) | pool, the server (MiB) |", "|---|---|---|"]
    for count in (1, 10, 100):
        peaks = [apart(max(count, 4), count, 2, backend, "FedAvg")["peak"] for backend in ("local", "pool")]
        lines.append(f"| {count} | {peaks[0]:,.0f} | {peaks[1]:,.0f} |")
    lines += ["", "| clients in all (SCAFFOLD, local, 10 a round) | their states on disk (MiB) | memory (MiB) |"]
    lines.append("|---|---|---|")
    for count in (10, 100, 1000):
        found = apart(count, 10, max(2, count // 5), "local", "SCAFFOLD")
        lines.append(f"| {count:,} | {found['disk']:,.0f} | {found['peak']:,.0f} |")
    write_section("memory", "\n".join(lines))


if __name__ == "__main__":
    main()
