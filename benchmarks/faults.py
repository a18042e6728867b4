"""Kill runs with SIGKILL at random moments, continue them, and compare with runs that were never stopped.

    python benchmarks/faults.py --kills 100

Every run is a process of its own, with SCAFFOLD, FedDC, FedDyn, FedProc, MOON or FedAvg, in the local backend or in a
pool of two workers. Also: memory and open files over 500 fits of one process.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from timing import write_section

from jdfl_lightning import SCAFFOLD, DigitsDomains, Experiment, LocalBackend, PoolBackend, algorithms, fit
from jdfl_lightning.backends import Backend
from jdfl_lightning.checkpoint import load_record
from jdfl_lightning.client import Site, fit_client
from jdfl_lightning.messages import FitTask
from jdfl_lightning.nursery import nursery
from jdfl_lightning.run_folder import read_run

ALGORITHMS = ("SCAFFOLD", "FedDC", "FedDyn", "FedProc", "MOON", "FedAvg")


def run(folder: Path, name: str, backend: Backend) -> None:
    """Begin a run, or go on with it."""
    experiment = Experiment(
        data=DigitsDomains(size=8, num_clients=6),
        algorithm=getattr(algorithms, name)(),
        supervision="graded",
        num_domains=3,
        rounds=6,
        epochs=1,
        backend=backend,
        run_dir=str(folder),
        resume="auto",
    )
    fit(experiment)


def in_process(work: Callable[[], None], kill_after: float | None) -> bool:
    """Do work in a process, and kill it after a while; return whether it came to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(f"FAILED: {error!r}", flush=True)
            os._exit(1)
    deadline = float("inf") if kill_after is None else time.monotonic() + kill_after
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if status != 0:
                raise SystemExit("a continued run failed")
            return True
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.002)


def outcome(folder: Path) -> tuple[object, ...]:
    """Return all that a run computed, and the names of all its files."""
    rows = [{n: str(v) for n, v in row.items() if not n.startswith("time/")} for row in read_run(folder).rows]
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    digests = []
    for name in files:
        if name.endswith(".safetensors"):
            for group, tensors in load_record(folder / name)[0].items():
                for key, tensor in tensors.items():
                    digests.append((name, group, key, hashlib.blake2b(tensor.numpy().tobytes()).hexdigest()))
    return rows, files, digests


def kill(kills: int, folder: Path) -> str:
    """Kill as often as asked for; return what came of it."""
    chance, done, finished = random.Random(0), 0, 0
    backends: tuple[Backend, ...] = (LocalBackend(), PoolBackend(workers=2, threads=1))
    whole: dict[str, tuple[object, ...]] = {}
    length: dict[tuple[str, str], float] = {}
    while done < kills:
        for name in ALGORITHMS:
            for backend in backends:
                kind = type(backend).__name__
                cut = folder / f"{name}-{kind}"
                if (name, kind) not in length:
                    begin = time.monotonic()
                    untouched = folder / f"whole-{name}-{kind}"
                    in_process(partial(run, untouched, name, backend), None)
                    length[name, kind] = time.monotonic() - begin
                    found = outcome(untouched)
                    if whole.setdefault(name, found) != found:
                        raise SystemExit(f"{name}: the pool ends elsewhere than one process")
                after = chance.uniform(0.02, 0.7) * length[name, kind]
                if in_process(partial(run, cut, name, backend), after):
                    finished += 1
                    if outcome(cut) != whole[name]:
                        raise SystemExit(f"{name}: another end after being killed")
                    shutil.rmtree(cut)
                else:
                    done += 1
                print(".", end="", flush=True)
        print(f"{done} kills, {finished} runs finished after kills", flush=True)
    for name in ALGORITHMS:
        for backend in backends:
            cut = folder / f"{name}-{type(backend).__name__}"
            in_process(partial(run, cut, name, backend), None)
            finished += 1
            if outcome(cut) != whole[name]:
                raise SystemExit(f"{name}: another end after being killed")
    return (
        f"| SIGKILL at random moments, {len(ALGORITHMS)} algorithms, graded, local and pool | {done} | {done}: all "
        f"{finished} runs that were continued ended with the same tensors, rows and files as without a kill |"
    )


def endure(fits: int) -> str:
    """Fit clients in one process; return how memory and open files grow."""
    data = DigitsDomains(size=8, num_clients=20)
    data.deal(0)
    site = Site(Experiment(data=data, algorithm=SCAFFOLD(), supervision="base", epochs=1))
    weights, buffers = site.initial(1)
    server = site.experiment.algorithm.init_server(weights)
    state = site.experiment.algorithm.init_client(weights)
    seen = {}
    for number in range(fits + 51):
        fit_client(site, FitTask(number % 20, 1, 0, weights, buffers, server), state)
        if number in (50, fits + 50):
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen[number] = pages * resource.getpagesize() / 2**20, len(list(Path("/proc/self/fd").iterdir()))
    (before, open_before), (after, open_after) = seen.values()
    growth = 100 * (after / before - 1)
    return (
        f"| {fits} fits in one process (after 50) | {fits} | memory {before:.0f} -> {after:.0f} MiB ({growth:+.1f} %), "
        f"open files {open_before} -> {open_after} |"
    )


def main() -> None:
    """Try it, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--fits", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, nursery():
        lines = ["| fault | times | survived |", "|---|---|---|", kill(options.kills, Path(folder))]
    lines.append(endure(options.fits))
    write_section("faults", "\n".join(lines), "robustness.md")


if __name__ == "__main__":
    main()
