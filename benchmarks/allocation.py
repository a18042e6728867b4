"""What it brings to keep freed memory for the next tensor (`jdfl_lightning.core.system`).

    python benchmarks/allocation.py

Training steps of the paper's CNN at 112 px, batch 32: in one process with all threads, and in as many processes of one
thread each, with and without; every case is a process, or several, of its own, and they take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import torch
from timing import Times, write_section
from torch.nn.functional import cross_entropy

from jdfl_lightning import PaperCNN
from jdfl_lightning.core.system import reuse_memory


def steps(reuse: bool, threads: int, count: int) -> None:
    """Take training steps; print seconds a step and page faults a step."""
    torch.set_num_threads(threads)
    if reuse:
        reuse_memory()
    network = torch.nn.Sequential(PaperCNN(112), torch.nn.Linear(128, 7)).to(memory_format=torch.channels_last)
    sgd = torch.optim.SGD(network.parameters(), lr=0.01)
    images = torch.rand(32, 3, 112, 112).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 7, (32,))
    seconds, faults = [], 0
    for step in range(count + 2):
        if step == 2:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        begin = time.perf_counter()
        sgd.zero_grad()
        cross_entropy(network(images), labels).backward()
        sgd.step()
        seconds.append(time.perf_counter() - begin)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    print(json.dumps([statistics.median(seconds[2:]), faults / count]))


def main() -> None:
    """Run all cases in turns and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        steps(*options.case)
        return
    cores = os.cpu_count() or 1
    times = Times()
    faults: dict[str, float] = {}
    for _ in range(options.turns):
        for processes, threads in ((1, cores), (cores, 1)):
            for reuse in (False, True):
                kind = "memory reused" if reuse else "as glibc has it"
                name = f"{processes} x {threads} threads, {kind}"
                command = [sys.executable, __file__, "--case", json.dumps([reuse, threads, options.steps])]
                running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
                found = [json.loads(process.communicate()[0]) for process in running]
                times.setdefault(name, []).append(statistics.mean(s for s, _ in found) / processes)
                faults[name] = found[0][1]
                print(name, found, flush=True)
    base = next(iter(times))
    lines = [
        "| processes | seconds for a batch of 32 (median) | against the first row | page faults a step |",
        "|---|---|---|---|",
    ]
    for name in times:
        lines.append(f"| {name} | {times.median(name):.2f} | {times.ratio(name, base)} | {faults[name]:,.0f} |")
    write_section("allocation", "\n".join(lines))


if __name__ == "__main__":
    main()
