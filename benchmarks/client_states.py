"""Memory with many stateful clients: SCAFFOLD's variates live in one file for each client, not in memory.

    python benchmarks/client_states.py --clients 1000

Prints, every few rounds, how many clients have a state, what these states weigh on disk, and the process's memory.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

from jdfl_lightning import SCAFFOLD, DigitsDomains, Experiment
from jdfl_lightning.backends import LocalBackend
from jdfl_lightning.checkpoint import ClientStates
from jdfl_lightning.client import Site
from jdfl_lightning.rounds import ServerState, run_rounds


def resident_mib() -> float:
    """Return the memory that the process holds now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--fraction", type=float, default=0.1)
    options = parser.parse_args()
    data = DigitsDomains(size=8, num_clients=options.clients)
    data.deal(0)
    run = Experiment(
        data=data,
        algorithm=SCAFFOLD(),
        supervision="base",
        rounds=options.rounds,
        client_fraction=options.fraction,
        epochs=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        states, site = ClientStates(Path(folder)), Site(run)
        weights, buffers = site.initial(1)
        parameters = sum(tensor.numel() for tensor in weights.values())
        print(f"{options.clients:,} clients, {parameters:,} parameters\n")
        print("| rounds | clients with a state | their states on disk (MiB) | memory of the process (MiB) |")
        print("|---|---|---|---|")
        start = ServerState(0, weights, buffers, run.algorithm.init_server(weights))
        with LocalBackend().open(run, states) as runner:
            for report in run_rounds(run, runner, site, start, [0] * options.clients, None, lambda *_: None):
                number = report.state.round
                if number in (1, 2, 5) or number % 10 == 0:
                    files = list(Path(folder).iterdir())
                    disk = sum(file.stat().st_size for file in files) / 2**20
                    print(f"| {number} | {len(files):,} | {disk:,.0f} | {resident_mib():,.0f} |", flush=True)


if __name__ == "__main__":
    main()
