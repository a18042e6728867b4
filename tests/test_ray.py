"""Ray: actors of a cluster, their ends, and states that travel with the tasks."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from helpers import Lines, Mortal, Waiting, experiment, finished, same, until
from jdfl_lightning import SCAFFOLD, FedAvg, LocalBackend, RayBackend, fit
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.config import Checkpointing
from jdfl_lightning.core.errors import InputError, StorageError
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.storage.checkpoint import ClientStates

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # ray's own sockets and logs
    pytest.mark.filterwarnings("ignore:Waiting for room on the Ray cluster"),  # a busy machine starts actors slowly
]


@pytest.fixture(scope="class")
def _ray() -> Iterator[None]:
    """One Ray for all tests that need no particular one; a backend uses the one that is there."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


class Choosy(FedAvg):
    """FedAvg that fails at client 1."""

    def local(self, task: FitTask, state: dict[str, Tensors]) -> Any:
        if task.client == 1:
            raise KeyError("no such luck")
        return super().local(task, state)


@pytest.mark.slow
@pytest.mark.usefixtures("_ray")
class TestOnOneCluster:
    def test_states_travel_with_the_tasks(self) -> None:
        fit(experiment(algorithm=SCAFFOLD(), rounds=3, run_dir="local"))
        fit(experiment(algorithm=SCAFFOLD(), rounds=2, run_dir="ray", backend=RayBackend()))
        assert len(list(Path("ray/clients").iterdir())) >= 4
        fit(experiment(algorithm=SCAFFOLD(), rounds=3, resume="ray", backend=RayBackend()))
        assert same("local", "ray")
        assert not list(Path("ray").glob(".*"))

    def test_a_client_whose_state_is_damaged_starts_afresh_if_it_may(self) -> None:
        fit(experiment(algorithm=SCAFFOLD(), rounds=2, run_dir="ray", client_fraction=1.0, supervision="base"))
        for state in Path("ray/clients").iterdir():
            state.write_bytes(b"damaged")
        again = experiment(algorithm=SCAFFOLD(), rounds=3, resume="ray", client_fraction=1.0, supervision="base")
        with pytest.raises(StorageError, match="reset_damaged_clients"):
            fit(replace(again, backend=RayBackend()))
        lines = Lines()
        fit(replace(again, backend=RayBackend(), checkpoint=Checkpointing(reset_damaged_clients=True)), lines)
        assert sum("started afresh" in line for line in lines.said) == again.data.num_clients

    def test_an_actor_killed_in_a_round(self) -> None:
        finished("local", supervision="base")
        Path("life").touch()
        fit(experiment(algorithm=Mortal(str(Path.cwd())), supervision="base", backend=RayBackend(), run_dir="ray"))
        assert not Path("life").exists()
        assert same("local", "ray")

    def test_a_client_that_actors_die_of_twice_is_absent(self) -> None:
        for life in ("life1", "life2", "life3"):
            Path(life).touch()
        lines = Lines()
        rule = Mortal(str(Path.cwd()))
        run = fit(experiment(algorithm=rule, supervision="base", backend=RayBackend(actors=1), run_dir="ray"), lines)
        assert [file.name for file in Path.cwd().glob("life*")] == ["life3"]
        assert [(row["clients"], row["refused"]) for row in run.rows] == [(3, 1), (4, 0)]

    def test_failures_are_told(self) -> None:
        run = experiment(supervision="base", algorithm=Choosy())
        weights, buffers = Workspace(run).initial(1)
        states = ClientStates(Path("run/clients"))
        with RayBackend(actors=1).open(run, states) as runner:
            good, bad = runner.fit([FitTask(client, 1, 0, weights, buffers) for client in range(2)])
            assert isinstance(good, FitResult)
            assert isinstance(bad, FitFailure)
            assert "KeyError: 'no such luck'" in bad.reason
            assert list(runner.fit([])) == []
        Path("run").mkdir()
        Path("run/clients").touch()
        scaffold = experiment(supervision="base", algorithm=SCAFFOLD())
        task = FitTask(0, 1, 0, weights, buffers, scaffold.algorithm.init_server(weights))
        with RayBackend(actors=1).open(scaffold, states) as runner, pytest.raises(StorageError, match="run/clients"):
            list(runner.fit([task]))

    def test_what_a_cluster_has_no_room_for(self) -> None:
        for backend, message in (
            (RayBackend(cpus=3), "--backend.cpus to be at most the 2 of one machine but got 3"),
            (RayBackend(gpus=0.5), "--backend.gpus to be at most the 0 of one machine but got 0.5"),
        ):
            with pytest.raises(InputError, match=message):
                fit(experiment(supervision="base", backend=backend))
            assert not Path("runs").exists()

    def test_an_actor_that_cannot_be_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Something that this process has and an actor has not."""
        monkeypatch.setattr("jdfl_lightning.backends.ray.Clients.enter", lambda self, path: None)
        with pytest.raises(InputError, match=r"worker to start but: .*helpers"):
            fit(experiment(supervision="base", backend=RayBackend()))


@pytest.mark.slow
def test_a_lost_node_is_not_the_end() -> None:
    """A head without CPUs and two nodes with one each; one of them is taken away while clients train on both."""
    assert not ray.is_initialized()
    fit(experiment(supervision="base", run_dir="local", rounds=3))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        first, _ = [cluster.add_node(wait=False, num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes(timeout=300)
        backend = RayBackend(address=cluster.address)

        def lose() -> None:
            until(lambda: len(list(Path.cwd().glob("begun*"))) == 2)
            cluster.remove_node(first, allow_graceful=False)
            Path("go").touch()

        thread = threading.Thread(target=lose)
        thread.start()
        rule = Waiting(str(Path.cwd()), clients=range(4))
        run = fit(experiment(algorithm=rule, supervision="base", run_dir="ray", backend=backend, rounds=3))
        thread.join()
        assert [row["clients"] for row in run.rows] == [4, 4, 4]
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert same("local", "ray")


@pytest.mark.slow
def test_from_the_command_line_with_no_cluster(tmp_path: Path) -> None:
    """Ray is started for the run and ends with it; nothing of it is on the screen."""
    arguments = ["--data.size=8", "--rounds=1", "--epochs=1", "--supervision=base", "--run_dir=run"]
    done = subprocess.run(
        [sys.executable, "-m", "jdfl_lightning", "fit", *arguments, "--backend=RayBackend", "--backend.actors=1"],
        capture_output=True,
        text=True,
        env=os.environ | {"RAY_TMPDIR": "/tmp"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "Waiting for room" not in line]  # of a busy machine
    assert "ray" not in "\n".join(told).lower()
    assert (tmp_path / "work/run/best.safetensors").exists()


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one of other tests, which Ray would find among the processes of this machine."""
    assert not ray.is_initialized()
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", functools.cache(set))
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda temp_dir: None)
    with pytest.raises(InputError, match=r"--backend\.address to be that of a Ray cluster but got auto"):
        fit(experiment(supervision="base", backend=RayBackend(address="auto")))


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'jdfl-lightning\[ray\]'"):
        fit(experiment(supervision="base", backend=RayBackend()))


@pytest.mark.parametrize(("option", "value"), [("actors", 0), ("cpus", 0), ("gpus", -1.0)])
def test_bad_options(option: str, value: float) -> None:
    with pytest.raises(InputError, match=f"--backend.{option}"):
        RayBackend(**{option: value})  # type: ignore[arg-type]


def test_local_is_the_measure() -> None:
    """The comparisons above would notice a difference."""
    for name, seed in (("a", 0), ("b", 1)):
        fit(experiment(supervision="base", run_dir=name, seed_everything=seed, backend=LocalBackend()))
    assert not same("a", "b")
