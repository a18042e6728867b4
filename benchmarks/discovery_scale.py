"""Phase 1 with thousands of clients: update vectors of 222,000 entries through the sketch, clustered.

    python benchmarks/discovery_scale.py

Synthetic updates: each client's is the direction of one of four domains plus noise, so that cosines within a domain are
about 0.5 and between domains 0. They are made and sketched by as many processes as there are cores, as clients would,
and clustered in this one. Every size runs in a process of its own, whose peak of memory is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score
from timing import write_section

from jdfl_lightning.clustering.clusters import cluster
from jdfl_lightning.clustering.sketch import sketch
from jdfl_lightning.clustering.updates import Updates, unit

DOMAINS = 4


def direction(seed: int, length: int) -> np.ndarray:
    """Return a random direction of length 1."""
    entries = np.random.default_rng(seed).standard_normal(length, dtype=np.float32)
    return entries / np.linalg.norm(entries)


def own_memory() -> float:
    """Return the MiB that this process does not share with others."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def sketches(first: int, last: int, length: int, dim: int) -> tuple[np.ndarray, float]:
    """Return the sketches of some clients, and the memory that it took."""
    torch.set_num_threads(1)
    domains = [direction(domain, length) for domain in range(DOMAINS)]
    short = np.empty((last - first, dim), dtype=np.float32)
    for client in range(first, last):
        update = torch.from_numpy(domains[client % DOMAINS] + direction(1000 + client, length))
        short[client - first] = unit(sketch(unit(update), dim, seed=0)).numpy()
    return short, own_memory()


def measure(clients: int, length: int, dim: int) -> dict[str, float]:
    """Sketch and cluster; return seconds, memory and agreement."""
    cores = os.cpu_count() or 1
    begin = time.perf_counter()
    bounds = np.linspace(0, clients, 4 * cores + 1).astype(int).tolist()
    with get_context("fork").Pool(cores) as pool:
        parts = pool.starmap(sketches, [(a, b, length, dim) for a, b in pairwise(bounds)])
    vectors = torch.from_numpy(np.concatenate([short for short, _ in parts]))
    middle = time.perf_counter()
    found = cluster(Updates(list(range(clients)), vectors), None, "elbow", 10, seed=0)
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "sketch": middle - begin,
        "cluster": end - middle,
        "server": peak,
        "all": peak + cores * max(memory for _, memory in parts),
        "m": found.num_domains,
        "ari": float(adjusted_rand_score([c % DOMAINS for c in range(clients)], list(found.assignments.values()))),
    }


def main() -> None:
    """Measure every size and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 3000, 10000])
    parser.add_argument("--length", type=int, default=222_000)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(*options.case)))
        return
    lines = [
        f"Vectors of {options.length:,} entries, sketches of {options.dim}; M from 1 to 10 tried, by elbow.",
        "",
        "| clients | sketching (s) | clustering (s) | together (s) | server (MiB) | with clients (MiB) | M | ARI |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for clients in options.clients:
        command = [sys.executable, __file__, "--case", json.dumps([clients, options.length, options.dim])]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(clients, found, flush=True)
        together = found["sketch"] + found["cluster"]
        lines.append(
            f"| {clients:,} | {found['sketch']:.1f} | {found['cluster']:.1f} | {together:.1f} "
            f"| {found['server']:,.0f} | {found['all']:,.0f} | {found['m']} | {found['ari']:.2f} |"
        )
    write_section("scale", "\n".join(lines), "discovery.md")


if __name__ == "__main__":
    main()
