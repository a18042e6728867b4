"""Run a matrix of small runs and print hashes of all that they computed, to compare two versions of the package.

    python benchmarks/bits.py --output before.json
    python benchmarks/bits.py --compare before.json
    python benchmarks/bits.py --compare before.json --only 'SCAFFOLD-*-LocalBackend'

Every optimizer with every supervision, one client after the other, in a pool, on Ray and on Flower's messages, which
have to agree where OMP_NUM_THREADS is 1; runs that are killed in the middle and resumed; discovery by sketches, with
clients that join later. What is hashed: the weights, the metrics but for times, the discovery. Only the command line
and the files of a run are used, so that the script outlives changes inside the package.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from fnmatch import fnmatch
from functools import partial
from itertools import product
from pathlib import Path

import ray
import yaml
from safetensors.numpy import load_file

from jdfl_lightning.cli import main as command

sys.path.append(str(Path(__file__).parents[1] / "tests"))

ALGORITHMS = ("FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON", "RobustFedAvg")
SUPERVISIONS = ("base", "hard", "graded", "random")
SETTINGS = {
    "data": {"class_path": "DigitsDomains", "init_args": {"size": 8, "num_clients": 6}},
    "rounds": 3,
    "epochs": 1,
    "client_fraction": 0.5,
    "num_domains": 3,
}


def options(**changes: object) -> list[str]:
    """Return options of the command line."""
    return ["--config", "small.yaml", *[f"--{name.replace('__', '.')}={value}" for name, value in changes.items()]]


def fit(folder: str, *args: str) -> None:
    """Train; what is not asked for is an error."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        code = command(["fit", *args, *([] if "--resume" in args else [f"--run_dir={folder}"])])
    if code != 0:
        raise SystemExit(f"{folder}: exit code {code}")


def fit_with_a_kill(folder: str, *args: str) -> None:
    """Train in a process that is killed once a round is over, and resume."""
    if (child := os.fork()) == 0:
        fit(folder, *args)
        os._exit(0)
    while not list(Path(folder).glob("checkpoints/1.safetensors")):
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    fit(folder, "--resume", folder)


def on_ray(folder: str, *args: str) -> None:
    """Train on a Ray of this process."""
    if not ray.is_initialized():
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    fit(folder, *args)


def on_flower(algorithm: str, supervision: str) -> None:
    """Train at two sites whose messages go through Flower's bytes."""
    from flower_grid import run_on_grid

    Path("flower.yaml").write_text(yaml.safe_dump(SETTINGS | {"algorithm": algorithm, "supervision": supervision}))
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        run_on_grid("flower.yaml", {"run_dir": f"flower-{algorithm}-{supervision}"}, sites=2)


def digest(folder: Path) -> dict[str, str]:
    """Return hashes of the weights, the metrics and the discovery of a run."""
    found = {}
    for name in ("last", "discovery"):
        if (file := folder / f"{name}.safetensors").exists():
            tensors = load_file(file)
            parts = [
                f"{key} {tensors[key].dtype} {tensors[key].shape}".encode() + tensors[key].tobytes()
                for key in sorted(tensors)
            ]
            found[name] = hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()
    with (folder / "metrics.csv").open(newline="") as lines:
        rows = [{n: float(v) for n, v in row.items() if not n.startswith("time/")} for row in csv.DictReader(lines)]
    found["metrics"] = hashlib.blake2b(json.dumps(rows, sort_keys=True).encode(), digest_size=8).hexdigest()
    return found


def matrix(only: str) -> Iterator[str]:
    """Run everything whose name matches a pattern in this folder; give the name of each run as it ends."""
    Path("small.yaml").write_text(yaml.safe_dump(SETTINGS))
    for name, run in runs():
        if fnmatch(name, only):
            run()
            yield name
    if ray.is_initialized():
        ray.shutdown()


def runs() -> Iterator[tuple[str, Callable[[], None]]]:
    """Give the name of every run, and what runs it."""
    for algorithm in ALGORITHMS:
        for supervision in SUPERVISIONS:
            for backend in ("LocalBackend", "PoolBackend"):
                name = f"{algorithm}-{supervision}-{backend}"
                workers = ["--backend.workers=2"] if backend == "PoolBackend" else []
                chosen = options(algorithm=algorithm, supervision=supervision, backend=backend)
                yield name, partial(fit, name, *chosen, *workers)
        name = f"{algorithm}-graded-resumed"
        chosen = options(algorithm=algorithm, supervision="graded", backend="LocalBackend")
        yield name, partial(fit_with_a_kill, name, *chosen)
    for newcomers in ("nearest", "update"):
        name = f"newcomers-{newcomers}"
        late = options(
            supervision="graded", backend="LocalBackend", clustering__fraction=0.5, clustering__newcomers=newcomers
        )
        yield name, partial(fit, name, *late, "--clustering.sketch_dim=64")
    for algorithm, supervision in product(ALGORITHMS, SUPERVISIONS):
        name = f"{algorithm}-{supervision}-RayBackend"
        chosen = options(algorithm=algorithm, supervision=supervision, backend="RayBackend", backend__actors=1)
        yield name, partial(on_ray, name, *chosen)
        yield f"flower-{algorithm}-{supervision}", partial(on_flower, algorithm, supervision)


def apart(found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the runs that computed something else than one client after the other did."""
    runs = [f"{algorithm}-{supervision}" for algorithm, supervision in product(ALGORITHMS, SUPERVISIONS)]
    return [
        name
        for run in runs
        for name in (f"{run}-PoolBackend", f"{run}-RayBackend", f"flower-{run}")
        if name in found and found[name] != found.get(f"{run}-LocalBackend", found[name])
    ]


def main() -> int:
    """Print hashes; with --compare, say which differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the hashes there")
    parser.add_argument("--compare", type=Path, help="compare with the hashes of an earlier call")
    parser.add_argument("--only", default="*", help="a pattern of names: run these alone")
    args = parser.parse_args()
    before = json.loads(args.compare.read_text()) if args.compare else {}
    before = {name: value for name, value in before.items() if fnmatch(name, args.only)}
    output = args.output and args.output.absolute()
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in matrix(args.only):
            found[name] = digest(Path(name))
            changed = [what for what, value in before.get(name, found[name]).items() if found[name].get(what) != value]
            print(name, *found[name].values(), *[f"{what} DIFFERS" for what in changed], flush=True)
    if output:
        output.write_text(json.dumps(found, indent=1))
    differing = [name for name, value in before.items() if found.get(name) != value]
    print(f"{len(found)} runs" + (f", {len(differing)} differ" if before else ""))
    if os.environ.get("OMP_NUM_THREADS") == "1" and (others := apart(found)):
        print("not as one client after the other:", *others)
        return 1
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
