"""Pool, Ray and Flower: the same weights to the bit as one process, for every optimizer and supervision."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from flower_grid import run_on_grid, write_config
from helpers import contents, experiment, same
from jdfl_lightning import PoolBackend, RayBackend, algorithms, fit

pytestmark = [
    pytest.mark.usefixtures("_imported_once"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # ray's own sockets and logs
    pytest.mark.filterwarnings("ignore:Waiting for room on the Ray cluster"),  # a busy machine starts actors slowly
]
ALGORITHMS = ["FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON", "RobustFedAvg"]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


def combinations() -> Iterator[tuple[str, str, str]]:
    """Every pair of optimizer, supervision and backend once, as in a Latin square."""
    for row, algorithm in enumerate(ALGORITHMS):
        for column, supervision in enumerate(("base", "graded", "random")):
            yield algorithm, supervision, ("pool", "ray", "flower")[(row + column) % 3]


@pytest.mark.parametrize(("algorithm", "supervision", "backend"), combinations())
def test_same_bits(algorithm: str, supervision: str, backend: str) -> None:
    rule = getattr(algorithms, algorithm)()
    run = experiment(algorithm=rule, supervision=supervision, rounds=3, client_fraction=0.75)
    fit(replace(run, run_dir="local"))
    if backend == "pool":
        fit(replace(run, run_dir="pool", backend=PoolBackend(workers=2, threads=1)))
        assert same("local", "pool")
    elif backend == "ray":
        fit(replace(run, run_dir="ray", backend=RayBackend(actors=1)))
        assert same("local", "ray")
    else:
        run_on_grid(write_config(run), {"run_dir": "flower"}, sites=2)
        assert_same_at_sites(supervision)


def assert_same_at_sites(supervision: str) -> None:
    ours, theirs = contents("local"), contents("flower")
    assert ours["rows"] == theirs["rows"]
    for name in ("last.safetensors", "best.safetensors", *["discovery.safetensors"] * (supervision != "base")):
        assert ours[name] == theirs[name]
    for number in (2, 3):  # the server's state; who has the clients' is told below
        assert ours[f"checkpoints/{number}.safetensors"][1] == theirs[f"checkpoints/{number}.safetensors"][1]
    kept = {file.name: file.read_bytes() for file in Path("states").rglob("*.safetensors")}
    for file in Path("local").glob("clients/*"):
        assert kept[file.name] == file.read_bytes()
