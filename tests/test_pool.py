"""The pool: the same bits as one process, whatever happens to its workers."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jdfl_lightning
from helpers import Lines, Mortal, alive, children, contents, digits, examples, experiment, finished, same, until
from jdfl_lightning import Experiment, LocalBackend, PoolBackend, TrainerOptions, algorithms, fit
from jdfl_lightning.backends.dispatch import HELD, SHORT, Dispatcher, GoneError, Job, Worker
from jdfl_lightning.backends.local import LocalRunner
from jdfl_lightning.backends.pool import _Process, best_workers, wait_for
from jdfl_lightning.backends.worker import encode
from jdfl_lightning.client.evaluation import Evaluation, Scores
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.config import Checkpointing
from jdfl_lightning.core.errors import InputError, Note, StorageError
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.data.cache import ImageFile, decode_all, image_file
from jdfl_lightning.storage.checkpoint import ClientStates

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes are passed open files")
POOL = PoolBackend(workers=2, threads=1)


@pytest.mark.parametrize(
    ("algorithm", "supervision"),
    [("FedAvg", "hard"), ("SCAFFOLD", "random"), ("FedDyn", "base"), ("FedDC", "graded"), ("MOON", "random")],
)
def test_same_bits_as_one_process(algorithm: str, supervision: str) -> None:
    for name, backend in (("local", LocalBackend()), ("pool", POOL)):
        rule = getattr(algorithms, algorithm)()
        fit(experiment(algorithm=rule, supervision=supervision, backend=backend, run_dir=name, rounds=3))
    assert same("local", "pool")


@pytest.mark.parametrize(("every", "keep"), [(2, 1), (3, 2)])
def test_rare_checkpoints_beside_a_round_under_way(every: int, keep: int) -> None:
    """A best round is saved while the next one trains: what that has written already stays, and nothing else does."""
    settings = {"algorithm": algorithms.FedDC(), "checkpoint": Checkpointing(every=every, keep=keep), "rounds": 7}
    for name, backend in (("local", LocalBackend()), ("pool", POOL)):
        fit(experiment(supervision="base", backend=backend, run_dir=name, lr=0.2, client_fraction=0.5, **settings))
    ours, theirs = contents("local"), contents("pool")
    assert ours["rows"] == theirs["rows"]
    assert ours["last.safetensors"] == theirs["last.safetensors"]


def test_running_statistics() -> None:
    for name, backend in (("local", LocalBackend()), ("pool", POOL)):
        fit(experiment(backbone="helpers.batch_norm_net", backend=backend, run_dir=name, supervision="base"))
    assert same("local", "pool")


def test_a_worker_that_dies_is_replaced() -> None:
    finished("local", supervision="base")
    Path("life").touch()
    fit(experiment(algorithm=Mortal(str(Path.cwd())), supervision="base", backend=POOL, run_dir="pool"))
    assert not Path("life").exists()
    assert same("local", "pool")


def test_a_client_that_workers_die_of_twice_is_absent() -> None:
    for life in ("life1", "life2", "life3"):
        Path(life).touch()
    lines = Lines()
    run = fit(experiment(algorithm=Mortal(str(Path.cwd())), supervision="base", backend=POOL, run_dir="pool"), lines)
    assert [file.name for file in Path.cwd().glob("life*")] == ["life3"]
    assert [(row["clients"], row["refused"]) for row in run.rows] == [(3, 1), (4, 0)]
    (line,) = [line for line in lines.said if "does not count" in line]
    assert line == ("round 1: client 2 does not count: its process was ended by signal 9, as when memory runs out.")


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_die_idle_are_replaced(workers: int) -> None:
    run = experiment(supervision="base")
    weights, buffers = Workspace(run).initial(1)
    told: list[Evaluation] = []
    tasks = [FitTask(client, 1, 0, weights, buffers) for client in range(4)]
    with PoolBackend(workers=workers, threads=1).open(run, ClientStates(Path("clients"))) as runner:
        assert isinstance(runner, Dispatcher)
        first = list(runner.fit(tasks))
        for worker in runner.workers:
            assert isinstance(worker, _Process)
            assert worker.process.pid is not None
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.join()
        runner.evaluate({"": weights}, buffers, told.append)
        runner.finish()
        assert len(told) == 1
        again = list(runner.fit(tasks))
    for ours, theirs in zip(first, again, strict=True):
        assert isinstance(ours, FitResult)
        assert isinstance(theirs, FitResult)
        assert torch.equal(ours.weights["head.bias"], theirs.weights["head.bias"])


class Broken(algorithms.FedAvg):
    """FedAvg that fails at the client."""

    def local(self, task: FitTask, state: dict[str, Tensors]) -> algorithms.LocalUpdate:
        raise KeyError("no such luck")


def test_an_error_at_a_client_is_told() -> None:
    with pytest.raises(InputError, match=r"all 4 failed alike: KeyError: 'no such luck'") as error:
        fit(experiment(algorithm=Broken(), supervision="base", backend=POOL, run_dir="pool"))
    assert "Traceback" in str(error.value.__cause__)
    with pytest.raises(InputError, match=r"3 attempts were void.*lower --lr"):
        fit(experiment(lr=1e30, supervision="base", backend=POOL, run_dir="other"))


def test_a_full_disk_at_a_worker_ends_the_run() -> None:
    Path("run").mkdir()
    Path("run/clients").touch()
    states = ClientStates(Path("run/clients"))
    run = experiment(algorithm=algorithms.SCAFFOLD(), supervision="base")
    weights, buffers = Workspace(run).initial(1)
    task = FitTask(0, 1, 0, weights, buffers, run.algorithm.init_server(weights))
    for backend in (LocalBackend(), POOL):
        with backend.open(run, states) as runner, pytest.raises(StorageError, match="run/clients"):
            list(runner.fit([task]))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_and_no_file_is_left(ending: signal.Signals, tmp_path_factory: pytest.TempPathFactory) -> None:
    """However the server ends, all that it started ends with it, in the middle of a fit; no temporary file stays.

    A terminal and a job queue send a signal to the whole group; SIGKILL hits the server alone.
    """
    temporary = tmp_path_factory.mktemp("t")  # there is a socket in it, whose path has to be short
    arguments = ["--data.size", "16", "--rounds", "100", "--epochs", "10", "--supervision", "base"]
    server = subprocess.Popen(
        [sys.executable, "-m", "jdfl_lightning", "fit", *arguments, "--backend.workers", "2"],
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup has the tests ignore it
    )
    workers: list[int] = []

    def all_train() -> bool:
        assert server.poll() is None, server.communicate()
        workers[:] = [worker for child in children(server.pid) for worker in children(child)]
        return len(workers) == 2 and all(map(trains, workers))

    try:
        shared = set(map(str, Path("/dev/shm").iterdir()))
        until(all_train)
        processes = [*children(server.pid), *workers]
        (server.send_signal if ending == signal.SIGKILL else partial(os.killpg, server.pid))(ending)
        out, err = server.communicate(timeout=300)  # the clients under way come to their end
    finally:
        server.kill()
    assert server.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(ending, -ending), out + err
    assert "Traceback" not in err
    assert "ended by signal" not in out
    until(lambda: not any(map(alive, processes)))
    assert not list(temporary.iterdir())
    until(lambda: not set(map(str, Path("/dev/shm").iterdir())) - shared - in_use())  # others may come and go


def in_use() -> set[str]:
    """Files in shared memory that a process of this machine has mapped or open."""
    found: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found |= set(re.findall("/dev/shm/.*", (folder / "maps").read_text()))
            found |= {str(file.readlink()) for file in (folder / "fd").iterdir()}
    return found


def trains(pid: int) -> bool:
    """Whether a worker has mapped the images, which it does right before its first fit."""
    try:
        return "(deleted)" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


TELLING = """
import os
from pathlib import Path

import jdfl_lightning

class Telling(jdfl_lightning.FedAvg):
    def local(self, task, state):
        with Path("told").open("a") as out:
            print(jdfl_lightning.__file__, os.getpid(), os.getppid(), file=out)
        return super().local(task, state)
"""
SCRIPT = """
import sys

print("begins", flush=True)
sys.path[:0] = PATH

import jdfl_lightning
from telling import Telling
from jdfl_lightning import DigitsDomains, Experiment, PoolBackend, RunCallback, fit

class Mine(RunCallback):
    def reason_to_stop(self):
        return "one is enough"

def run(number, rounds=1, callbacks=()):
    return fit(
        Experiment(
            data=DigitsDomains(size=8, num_clients=4),
            algorithm=Telling(),
            backbone="helpers.tiny_net",
            rounds=rounds,
            epochs=1,
            client_fraction=1.0,
            supervision="base",
            backend=PoolBackend(workers=2, threads=1),
            callbacks=list(callbacks),
            run_dir=f"run{number}",
        ),
        progress=False,
    )
"""


def run_script(text: str, said: str = "") -> list[str]:
    """Run a script beside which there is a module `telling`, and a copy of the package, which its path names first."""
    Path("script").mkdir()
    Path("package").mkdir()
    Path("package/jdfl_lightning").symlink_to(Path(jdfl_lightning.__file__).parent)
    Path("script/telling.py").write_text(TELLING)
    path = [str(Path("package").absolute()), str(Path(__file__).parent)]
    Path("script/main.py").write_text(SCRIPT.replace("PATH", repr(path)) + text)
    command = [sys.executable, "script/main.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"begins\n{said}"  # once: it has no guard, and no other process runs it
    return Path("told").read_text().splitlines()


@pytest.mark.slow
def test_a_script_without_a_guard_fits_twice() -> None:
    """Workers are not the script's process, come from one fork server, and have the script's path from the start.

    A callback that the script defines is told by its own process, and stops the second run after one round of two.
    """
    told = run_script("run(1)\nprint(run(2, 2, [Mine()]).stop)\n", "Mine: one is enough\n")
    files, workers, parents = ({line.split()[column] for line in told} for column in range(3))
    assert files == {str(Path("package/jdfl_lightning/__init__.py").absolute())}
    assert len(workers) == 4
    assert len(parents) == 1


@pytest.mark.slow
def test_a_process_ends_although_a_thread_of_it_still_trains() -> None:
    """Python waits for processes that are left; these end only if the server hangs up."""
    waits = "while not Path('told').exists(): time.sleep(0.05)\n"
    imports = "import threading, time\nfrom pathlib import Path\n"
    told = run_script(f"{imports}threading.Thread(target=run, args=(1, 10**6), daemon=True).start()\n{waits}")
    assert told


@pytest.mark.usefixtures("_two_threads")
def test_a_process_that_may_not_start_others_trains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.warns(Note, match="one after the other: none could be started: daemonic processes"):
        assert chosen(PoolBackend(), experiment()) is LocalRunner
    with pytest.raises(InputError, match="Expected clients to train in worker processes but none could be started"):
        chosen(POOL, experiment())


class Fake(Worker):
    """A worker that is a thread and answers at once, or soon."""

    def __init__(self, log: list[int], chance: random.Random) -> None:
        self.connection, self._there = Pipe()
        self.log, self.chance = log, chance

    def begin(self, job: Job) -> None:
        kind, content = job.kind, job.content
        self.log.append(content.client if kind == "fit" else -1)
        answer = FitResult(content.client, 1, 1) if kind == "fit" else Evaluation({"": Scores(0.5, {})}, 0.0)
        delay = self.chance.choice([0, 0, 0.002])
        threading.Timer(delay, self._there.send_bytes, [encode(("done", answer))]).start()

    def take(self) -> tuple[str, Any]:
        return cast(tuple[str, Any], pickle.loads(self.connection.recv_bytes()))

    def end(self) -> str:
        return ""


@examples(30)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=40), workers=st.integers(1, 4), seed=st.integers(0, 99))
def test_order_and_number_of_results(sizes: list[int], workers: int, seed: int) -> None:
    """Results come in the order of tasks; a round's end is begun longest first; few results wait for earlier ones."""
    log: list[int] = []
    chance = random.Random(seed)
    pool = Dispatcher(lambda place: Fake(log, chance), wait_for, workers, sizes)
    told: list[Evaluation] = []
    pool.evaluate({}, {}, told.append)
    tasks = [FitTask(client, 1, 0, {}) for client in range(len(sizes))]
    seen = []
    for result in pool.fit(tasks):
        seen.append(result.client)
        assert len([client for client in log if client >= 0]) - len(seen) <= (HELD + 1) * workers
    assert seen == list(range(len(sizes)))
    pool.finish()
    assert len(told) == 1
    assert log[0] == -1
    begun = log[1:]
    assert sorted(begun) == seen
    end = HELD * workers
    assert begun[:-end] == seen[:-end]
    assert [sizes[client] for client in begun[-end:]] == sorted((sizes[c] for c in begun[-end:]), reverse=True)
    assert list(pool.fit([])) == []


class Queueing(Worker):
    """A worker that does its jobs in their order when it is waited for; some clients end its process."""

    def __init__(self, log: list[str], deadly: set[int]) -> None:
        self.log, self.deadly, self.queue = log, deadly, list[Job]()

    def begin(self, job: Job) -> None:
        self.queue.append(job)
        self.log.append(f"{job.kind} {len(self.queue)}")

    def takes_ahead(self, common: bytes) -> bool:
        return self.job is not None and self.job.common is common

    def take(self) -> tuple[str, Any]:
        job = self.queue.pop(0)
        if job.kind == "evaluate":
            return "done", Evaluation({"": Scores(0.5, {})}, 0.0)
        self.log.append(f"client {job.content.client}")
        if job.content.client in self.deadly:
            raise GoneError
        return "done", FitResult(job.content.client, 1, 1)

    def end(self) -> str:
        return ""


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_short_fits_are_sent_ahead(workers: int) -> None:
    """A worker has at most two jobs; if it dies, only the one that it was doing counts as tried."""
    log: list[str] = []
    pool = Dispatcher(lambda place: Queueing(log, {5, 6, 12}), lambda awaited: awaited[-1:], workers, [1] * 20)
    results = list(pool.fit([FitTask(client, 1, 0, {}) for client in range(20)]))
    assert [result.client for result in results] == list(range(20))
    assert {result.client for result in results if isinstance(result, FitFailure)} == {5, 6, 12}
    assert {log.count(f"client {client}") for client in (5, 6, 12)} == {2}
    assert {log.count(f"client {client}") for client in range(20) if client not in (5, 6, 12)} == {1}
    assert "fit 2" in log
    assert "fit 3" not in log
    told: list[Evaluation] = []
    pool.evaluate({}, {}, told.append)
    log.clear()
    assert len(list(pool.fit([FitTask(client, 2, 0, {}) for client in range(5)]))) == 5
    pool.finish()
    assert len(told) == 1
    assert log[0] == "evaluate 1", "an evaluation waits for nothing and is not sent ahead"


def test_long_fits_are_not_sent_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker may be idle sooner."""
    clock = itertools.count(step=2 * SHORT)
    monkeypatch.setattr("jdfl_lightning.backends.dispatch.time.monotonic", lambda: next(clock))
    log: list[str] = []
    pool = Dispatcher(lambda place: Queueing(log, set()), lambda awaited: awaited[:1], 2, [1] * 9)
    assert len(list(pool.fit([FitTask(client, 1, 0, {}) for client in range(9)]))) == 9
    assert "fit 1" in log
    assert "fit 2" not in log


def test_a_larger_client_is_neither_sent_ahead_nor_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fit may take long, although the last one was short."""
    now, sizes = 0.0, [50, 1, 2, 1, 60, 1, 2, 1, 40, 1]
    log: list[str] = []
    queues: list[Queueing] = []
    monkeypatch.setattr("jdfl_lightning.backends.dispatch.time.monotonic", lambda: now)

    def start(place: int) -> Queueing:
        queues.append(Queueing(log, set()))
        return queues[-1]

    def small_first(awaited: Sequence[Any]) -> Sequence[Any]:
        nonlocal now
        for worker in queues:  # whoever has two jobs has small ones
            clients = [job.content.client for job in worker.queue]
            assert len(clients) < 2 or max(sizes[client] for client in clients) <= 2
        first = min(awaited, key=lambda worker: sizes[worker.job.content.client])
        now += sizes[first.job.content.client] * SHORT / 3
        return [first]

    pool = Dispatcher(start, small_first, 2, sizes)
    assert len(list(pool.fit([FitTask(client, 1, 0, {}) for client in range(10)]))) == 10
    assert "fit 2" in log


def test_messages_keep_every_type(tmp_path: Path) -> None:
    tensors = {
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "whole": torch.tensor(7),
        "strided": torch.arange(6.0).reshape(2, 3).t(),
        "none": torch.zeros(0, 3),
        "yes": torch.tensor([True, False]),
        "live": torch.ones(2, requires_grad=True),
    }
    back = pickle.loads(encode(tensors))
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    back["half"][0] = 3.0  # and can be written to


def test_images_are_shared_not_copied(image_tree: Path, tmp_path: Path) -> None:
    paths = sorted(image_tree.rglob("*.png"))
    cached = decode_all(paths, 8, lambda *_: None)
    with image_file(cached) as file:
        assert isinstance(file.file, str)
        assert Path(file.file).parent == tmp_path / "cache"
        assert torch.equal(file.map(), cached)
    with image_file(cached.clone()) as file:
        assert isinstance(file.file, int)
        images = file.map()
        assert torch.equal(images, cached)
        images[0] = 0  # copy on write: nobody else sees it
        assert torch.equal(file.map(), cached)
    with pytest.raises(FileNotFoundError):
        file.map()
    cached[0] = 7  # changed in place: the file no longer has them
    with image_file(cached) as file:
        assert isinstance(file.file, int)
        assert torch.equal(file.map(), cached)


@pytest.fixture
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def chosen(backend: PoolBackend, run: Experiment) -> Any:
    with backend.open(run, ClientStates(Path("clients"))) as runner:
        return len(runner.workers) if isinstance(runner, Dispatcher) else type(runner)


@pytest.mark.usefixtures("_two_threads")
def test_auto_starts_workers_where_it_pays() -> None:
    run = experiment()
    assert chosen(PoolBackend(), run) == 2
    assert chosen(PoolBackend(), experiment(client_fraction=0.25)) is LocalRunner
    assert chosen(PoolBackend(), experiment(client_fraction=0.75)) is LocalRunner  # three clients for two workers
    assert chosen(PoolBackend(threads=2), run) is LocalRunner
    assert chosen(PoolBackend(), experiment(trainer=TrainerOptions(accelerator="mps"))) is LocalRunner
    assert chosen(PoolBackend(workers=1), run) == 1
    torch.set_num_threads(1)
    assert chosen(PoolBackend(), run) is LocalRunner


@given(clients=st.integers(1, 200), cores=st.integers(1, 64), threads=st.none() | st.integers(1, 8))
def test_workers_never_outnumber_clients_or_cores(clients: int, cores: int, threads: int | None) -> None:
    workers = best_workers(clients, cores, threads)
    assert 1 <= workers <= clients
    assert workers == 1 or workers * (threads or 1) <= cores


@pytest.mark.usefixtures("_two_threads")
def test_what_only_a_script_knows_is_trained_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    data = digits()
    monkeypatch.setattr(type(data), "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "DigitsDomains", type(data), raising=False)
    with pytest.warns(Note, match="one after the other: .*put it into a module"):
        assert chosen(PoolBackend(), experiment(data=data)) is LocalRunner
    with pytest.raises(InputError, match="cannot import what a script or a notebook defines"):
        chosen(POOL, experiment(data=data))


@pytest.mark.parametrize(("option", "value"), [("workers", 0), ("workers", -1), ("threads", 0)])
def test_bad_options(option: str, value: int) -> None:
    with pytest.raises(InputError, match=f"--backend.{option}"):
        PoolBackend(**{option: value})


def test_gpus_are_shared_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, as far as a machine without one can tell: a worker for each, which is told its own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    started: list[str | int] = []

    class Started(_Process):
        def __init__(self, setup: bytes, images: ImageFile) -> None:
            started.append(pickle.loads(setup).experiment.trainer.devices)

        def end(self) -> str:
            return ""

    monkeypatch.setattr("jdfl_lightning.backends.pool._Process", Started)
    assert chosen(PoolBackend(), experiment()) == 2
    assert chosen(PoolBackend(workers=3), experiment()) == 3
    assert started == ["[0]", "[1]", "[0]", "[1]", "[0]"]
    assert chosen(PoolBackend(), experiment(trainer=TrainerOptions(accelerator="gpu", devices="[1]"))) is LocalRunner
    assert chosen(PoolBackend(), experiment(client_fraction=0.25)) is LocalRunner
