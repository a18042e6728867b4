"""The same job by hand, by Flower, by pfl-research and by this package, in one table.

    make peers

FedAvg on noise; everyone gets the same images, batches, order of batches and first weights, and must get the weights
of the hand-written loop: else there is no time. Everyone has processes of its own. Turns alternate; every run adds its
turns to those in build/peers.json, so that columns can be measured one at a time:

    build/peers/bin/python benchmarks/peers.py --columns "112 px" --turns 1
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peer_loop
import torch
from peer_job import Job, Prepared, Rounds
from timing import write_section

RESULTS = Path(__file__).parents[1] / "build/peers.json"
COLUMNS = {
    "112 px": Job(size=112, clients=4, images=64, rounds=3),
    "32 px": Job(size=32, clients=10, images=96, rounds=4),
    "tiny": Job(size=8, clients=100, images=32, rounds=11, backbone="small_net.small_net"),
    "bf16": Job(size=112, clients=4, images=64, rounds=3, bf16=True),
}
NEAR, STILL_NEAR = 1e-3, 0.3
"""How far from the loop's an update may be, as a share of its length: after the first round, and after the last.

Whoever has as many threads for a client gets the same bits from it, so that only averages round otherwise. From the
second round on rounding decides which of two nearly equal values is a maximum, or whether one is above zero, and a
difference of 1e-7 may become one of 0.07. Other batches, or another order, are 0.2 to 0.5 off.
"""


@dataclass(frozen=True)
class Case:
    """One who does the job."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    processes: int = 1
    """That are started for it; others it starts itself."""
    workers: int = 1
    """Processes that train."""
    threads: int = 2
    """Of each that trains."""
    keeps_memory: bool = False
    """Whether glibc is told to keep freed memory, as the package does by itself."""
    only: str | None = None
    """The column that it is for."""

    def in_column(self, column: str) -> Case:
        """Return it as it is in a column: for tiny tensors a second thread only waits."""
        return replace(self, threads=1) if column == "tiny" else self

    def fits(self, column: str) -> bool:
        """Return whether it has a place in a column; tiny tensors are in memory that glibc keeps anyway."""
        return self.only in (None, column) and not (self.keeps_memory and column == "tiny")


LOOP, OURS = "hand-written loop", "this package, PoolBackend"
CASES = [
    Case(LOOP, "peer_loop"),
    Case(f"{LOOP}, memory kept", "peer_loop", keeps_memory=True),
    Case("pfl, one process", "peer_pfl"),
    Case("pfl, two processes", "peer_pfl", processes=2, workers=2, threads=1),
    Case("pfl, two processes, memory kept", "peer_pfl", processes=2, workers=2, threads=1, keeps_memory=True),
    Case("Flower", "peer_flower", workers=2, threads=1),
    Case("Flower, memory kept", "peer_flower", workers=2, threads=1, keeps_memory=True),
    Case("this package, LocalBackend", "peer_package", ("local",)),
    Case(OURS, "peer_package", ("pool",), workers=2, threads=1),
    Case("this package, VectorBackend", "peer_package", ("vector",), only="tiny"),
]


def why_not(job: Job) -> str:
    """Return why a job is not worth measuring on this machine; empty if it is."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    lacks = job.bf16 and not words & {"avx512_bf16", "amx_bf16", "bf16"}
    return "skipped: this CPU has no bf16 instructions" if lacks else ""


def do_job(case: Case, file: Path, folder: Path) -> tuple[float, Rounds]:
    """Have a case do the job; return when it was started, and what it noted."""
    answer = folder / "answer.pt"
    answer.unlink(missing_ok=True)
    added = {
        "PEERS_JOB": str(file),
        "OMP_NUM_THREADS": str(case.workers * case.threads if case.module == "peer_package" else case.threads),
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    added |= {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    if case.keeps_memory:
        added |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    if case.processes > 1:
        added["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{port}" for port in _free_ports(case.processes))
    command = [sys.executable, __file__, "--one", case.name, "--answer", str(answer)]
    logs = [(folder / f"{rank}.log").open("w+") for rank in range(case.processes)]
    start = time.monotonic()
    running = [
        subprocess.Popen(
            command, env=os.environ | added | {"PFL_WORKER_RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT
        )
        for rank, log in enumerate(logs)
    ]
    codes = [process.wait() for process in running]
    said = ""
    for log in logs:
        log.seek(0)
        said += log.read()
        log.close()
    if any(codes):
        raise SystemExit(f"{case.name} failed:\n{said[-5000:]}")
    return start, Rounds(**torch.load(answer))


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def flat(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return all weights as one vector."""
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], start: torch.Tensor) -> float:
    """Return how far two models are apart, as a share of how far the second one is from the start."""
    return float((flat(one) - flat(other)).norm() / (flat(other) - start).norm())


def take_turn(job: Job, cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Have every case do the job once, the loop first; return seconds of rounds and of the start by name."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        file, folder = Path(name, "job.pt"), Path(name)
        prepared: Prepared = importlib.import_module("peer_package").prepare(job)
        prepared.save(file)
        begin, loops = flat(prepared.weights), {}
        for threads in {case.threads for case in cases}:
            torch.set_num_threads(threads)
            loops[threads] = peer_loop.run(replace(prepared, job=replace(job, rounds=1))).first
        last = None
        for case in cases:
            start, noted = do_job(case, file, folder)
            last = last or noted.last
            apart = distance(noted.first, loops[case.threads], begin), distance(noted.last, last, begin)
            rounds = [end - resume for resume, end in zip(noted.resumes, noted.ends[1:], strict=False)]
            same = len(noted.ends) == job.rounds and apart[0] < NEAR and apart[1] < (NEAR if job.exact else STILL_NEAR)
            said = f"rounds {[round(one, 3) for one in rounds]} s" if same else "does another job"
            print(f"{case.name}: {said}, {apart[0]:.0e} and {apart[1]:.0e} off", flush=True)
            if same:  # the start is what the first round takes beyond a later one: processes, imports, first touches
                beyond = noted.ends[0] - start - statistics.median(rounds)
                found[case.name] = {"rounds": rounds, "start": beyond, "apart": apart}
    return found


def table(turns: Mapping[str, list[dict[str, Any]]], columns: Mapping[str, Job]) -> str:
    """Return the section: a row for each case, a column for each job."""
    unit = {name: "ms a client" if name == "tiny" else "images/s" for name in columns}
    lines = [
        f"{_versions()}; {_machine()}. {_counts(turns)}",
        "",
        "| | processes x threads | "
        + " | ".join(f"{name}: {why_not(job) or unit[name]}" for name, job in columns.items())
        + " | start (s) |",
        "|---|---|" + "---|" * (len(columns) + 1),
    ]
    for case in CASES:
        cells = [_cell(case, name, job, turns.get(name, [])) for name, job in columns.items()]
        starts = [turn[case.name]["start"] for name in turns for turn in turns[name] if case.name in turn]
        start = f"{statistics.median(starts):.1f}" if starts else ""
        tiny = "" if case.threads == 1 else f"; tiny {case.workers} x {case.in_column('tiny').threads}"
        lines.append(f"| {case.name} | {case.workers} x {case.threads}{tiny} | {' | '.join(cells)} | {start} |")
    if apart := [one["apart"] for name in turns for turn in turns[name] for one in turn.values()]:
        first, last = (max(pair[place] for pair in apart) for place in range(2))
        lines += [
            "",
            f"Updates are at most {first:.0e} of their length from the loop's after a round, {last:.0e} at the end.",
        ]
    return "\n".join(lines)


def _cell(case: Case, column: str, job: Job, turns: Sequence[Mapping[str, Any]]) -> str:
    """Return median, least and most of a case's turns, and how many times as fast as the default backend it is."""
    if why_not(job) or not turns or not case.fits(column):
        return ""
    if not all(case.name in turn and OURS in turn for turn in turns):
        return "another job"
    mine, ours = ([_figure(job, column, turn[name]["rounds"]) for turn in turns] for name in (case.name, OURS))
    ratios = [b / a if column == "tiny" else a / b for a, b in zip(mine, ours, strict=True)]
    digits = 2 if column == "tiny" else 1 if max(mine) < 100 else 0
    least, middle, most = (f"{value:.{digits}f}" for value in (min(mine), statistics.median(mine), max(mine)))
    return f"{middle} ({least} to {most}); {statistics.median(ratios):.2f}"


def _figure(job: Job, column: str, rounds: Sequence[float]) -> float:
    clients = job.clients * len(rounds)
    return 1000 * sum(rounds) / clients if column == "tiny" else clients * job.images / sum(rounds)


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("flwr", "ray", "pfl", "torch"))


def _machine() -> str:
    return f"{os.cpu_count()} cores"


def _counts(turns: Mapping[str, list[Any]]) -> str:
    return "Turns: " + ", ".join(f"{len(found)} at {name}" for name, found in turns.items()) + "."


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, default=["112 px", "32 px", "tiny"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="try everything with few images; writes nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        [case] = [case for case in CASES if case.name == options.one]
        noted = importlib.import_module(case.module).run(Prepared.load(os.environ["PEERS_JOB"]), *case.arguments)
        if os.environ["PFL_WORKER_RANK"] == "0":
            torch.save(vars(noted), options.answer)
        return
    columns = COLUMNS
    if options.small:
        columns = {name: replace(job, size=8, clients=4, images=40, rounds=3) for name, job in COLUMNS.items()}
    known: dict[str, Any] = {}
    if RESULTS.exists() and not options.small:
        known = json.loads(RESULTS.read_text())
    for _ in range(options.turns):
        for name in options.columns:
            job = columns[name]
            if why_not(job):
                continue
            shape = "tiny" if options.small else name
            cases = [case.in_column(shape) for case in CASES if case.fits(name)]
            before = known.get(name, {})
            turns = before["turns"] if before.get("job") == asdict(job) else []
            known[name] = {"job": asdict(job), "turns": [*turns, take_turn(job, cases)]}
            if not options.small:
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(known, indent=1))
    text = table({name: known[name]["turns"] for name in columns if name in known}, columns)
    if options.small:
        print(text)
    else:
        write_section("peers", text)
    if "another job" in text:
        raise SystemExit("not all did the same job")


if __name__ == "__main__":
    main()
