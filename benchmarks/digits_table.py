"""Best-round accuracy on the digits for algorithms x supervisions, mean and standard deviation over seeds.

    python benchmarks/digits_table.py --seeds 0 1 2 --out runs/digits_table

Finished runs are skipped, so that a run cut off can be continued. The table goes to standard output as Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from jdfl_lightning.storage.folder import read_run
from jdfl_lightning.storage.names import CURVES


def run(folder: Path, arguments: list[str], threads: int) -> None:
    """Run one `fit` in a process of its own, unless it is finished."""
    if (folder / CURVES).exists():
        return
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.unfinished-{os.getpid()}"))
    command = [sys.executable, "-m", "jdfl_lightning", "fit", "--run_dir", str(folder), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    print(f"done: {folder}", file=sys.stderr, flush=True)


def main() -> None:
    """Run the matrix, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["FedAvg"])
    parser.add_argument("--supervisions", nargs="+", default=["base", "hard", "graded", "random"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/digits_table"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, the cores shared among them")
    parser.add_argument("rest", nargs="*", help="further arguments of fit, after --")
    options = parser.parse_args()
    threads = max(1, (os.cpu_count() or 1) // options.jobs)

    def folder(algorithm: str, supervision: str, seed: int) -> Path:
        path: Path = options.out / f"{algorithm}-{supervision}-{seed}"
        return path

    matrix = list(product(options.algorithms, options.supervisions, options.seeds))
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [
            pool.submit(
                run,
                folder(algorithm, supervision, seed),
                ["--algorithm", algorithm, "--supervision", supervision, "--seed_everything", str(seed), *options.rest],
                threads,
            )
            for algorithm, supervision, seed in matrix
        ]
        for job in jobs:
            job.result()

    print("| | " + " | ".join(options.supervisions) + " |")
    print("|---" * (1 + len(options.supervisions)) + "|")
    for algorithm in options.algorithms:
        cells = []
        for supervision in options.supervisions:
            best = [100 * read_run(folder(algorithm, supervision, s)).best["test/acc"] for s in options.seeds]
            spread = f" ± {statistics.stdev(best):.1f}" if len(best) > 1 else ""
            cells.append(f"{statistics.mean(best):.1f}{spread}")
        print(f"| {algorithm} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
