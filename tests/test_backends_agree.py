"""Pool, Ray and Flower: the same weights to the bit as one process, for every optimizer and supervision."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from helpers import contents, every, experiment, same
from jdfl_lightning import Experiment, PoolBackend, RayBackend, algorithms, fit

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # ray's own sockets and logs
    pytest.mark.filterwarnings("ignore:Waiting for room on the Ray cluster"),  # a busy machine starts actors slowly
]
ALGORITHMS = ["FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON", "RobustFedAvg"]


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


def pairs(backend: str) -> Iterator[tuple[str, str]]:
    """A third of all pairs of optimizer and supervision: every pair of the three is there, as in a Latin square."""
    for row, algorithm in enumerate(ALGORITHMS):
        yield algorithm, ("base", "graded", "random")[(row + ["pool", "flower", "ray"].index(backend)) % 3]


def setting(algorithm: str, supervision: str) -> Experiment:
    rule = getattr(algorithms, algorithm)()
    return experiment(algorithm=rule, supervision=supervision, rounds=3, client_fraction=0.75)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "supervision"), pairs("pool"))
def test_same_bits_in_a_pool(algorithm: str, supervision: str) -> None:
    run = setting(algorithm, supervision)
    fit(replace(run, run_dir="local"))
    fit(replace(run, run_dir="pool", backend=PoolBackend(workers=2, threads=1)))
    assert same("local", "pool")


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
@pytest.mark.parametrize(("algorithm", "supervision"), pairs("ray"))
def test_same_bits_on_ray(algorithm: str, supervision: str) -> None:
    run = setting(algorithm, supervision)
    fit(replace(run, run_dir="local"))
    fit(replace(run, run_dir="ray", backend=RayBackend(actors=1)))
    assert same("local", "ray")


@pytest.mark.parametrize(("algorithm", "supervision"), every(3, pairs("flower")))
def test_same_bits_on_flower(algorithm: str, supervision: str) -> None:
    from flower_grid import run_on_grid, write_config

    run = setting(algorithm, supervision)
    fit(replace(run, run_dir="local"))
    run_on_grid(write_config(run), {"run_dir": "flower"}, sites=2)
    ours, theirs = contents("local"), contents("flower")
    assert ours["rows"] == theirs["rows"]
    for name in ("last.safetensors", "best.safetensors", *["discovery.safetensors"] * (supervision != "base")):
        assert ours[name] == theirs[name]
    for number in (2, 3):  # the server's state; who has the clients' is told below
        assert ours[f"checkpoints/{number}.safetensors"][1] == theirs[f"checkpoints/{number}.safetensors"][1]
    kept = {file.name: file.read_bytes() for file in Path("states").rglob("*.safetensors")}
    for file in Path("local").glob("clients/*"):
        assert kept[file.name] == file.read_bytes()
