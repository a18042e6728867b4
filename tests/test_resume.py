"""A run can be killed at any moment, and goes on as if nothing had been."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger

from helpers import checkered, contents, digits, discovered, examples, experiment, finished
from jdfl_lightning import Experiment, LocalBackend, PoolBackend, VectorBackend, algorithms, evaluate, fit
from jdfl_lightning.backends import Backend
from jdfl_lightning.cli import BAD_INPUT, main
from jdfl_lightning.config import Checkpointing, as_dict
from jdfl_lightning.core.errors import InputError, Note, StorageError
from jdfl_lightning.core.files import write_whole
from jdfl_lightning.storage.bundles import Bundles
from jdfl_lightning.storage.checkpoint import ClientStates, read_header
from jdfl_lightning.storage.folder import lock_run, read_run
from jdfl_lightning.storage.records import load_record, save_record
from jdfl_lightning.storage.trust import sign
from jdfl_lightning.ui.display import Display
from jdfl_lightning.ui.loggers import WandbRounds

STATEFUL = ["FedAvg", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON"]


class CutError(Exception):
    """A run that ends in the middle."""


class CutAt(Display):
    """Ends a run when so many clients have answered."""

    def __init__(self, after: int) -> None:
        self.left = after

    def step(self, what: str, done: int, total: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise CutError


def interrupted(after: int, **changes: Any) -> None:
    """Run until so many clients have answered, then continue to the end."""
    with pytest.raises(CutError):
        fit(experiment(run_dir="cut", **changes), CutAt(after))
    fit(experiment(resume="cut", **changes))


@pytest.mark.parametrize(("name", "supervision"), checkered(STATEFUL, ("base", "graded", "random"), every=3))
def test_continued_is_uninterrupted(name: str, supervision: str) -> None:
    """To the bit: weights, client states, server record, metrics, best round."""
    algorithm = getattr(algorithms, name)()
    changes = {"algorithm": algorithm, "supervision": supervision, "rounds": 4, "client_fraction": 0.5}
    finished("whole", **changes)
    interrupted(after=5 if supervision == "base" else 9, **changes)
    assert contents("cut") == contents("whole")


@pytest.mark.parametrize("after", [0, 2, 4, 5, 7, 11])
def test_wherever_it_was_cut(after: int) -> None:
    """In discovery (4 clients), between rounds, in the last round; with a checkpoint in every second round."""
    changes: dict[str, Any] = {
        "algorithm": algorithms.SCAFFOLD(),
        "rounds": 4,
        "client_fraction": 0.5,
        "checkpoint": Checkpointing(every=2, keep=1),
        "evaluate_every": 3,
    }
    finished("whole", **changes)
    interrupted(after, **changes)
    assert contents("cut") == contents("whole")
    assert sorted(file.name for file in Path("cut/checkpoints").iterdir()) == ["4.safetensors"]


@pytest.mark.slow
def test_continued_in_a_pool() -> None:
    """Also where a round's evaluation goes on beside the next round's fits."""
    changes = {"algorithm": algorithms.SCAFFOLD(), "rounds": 3, "supervision": "base"}
    finished("whole", **changes)
    pool = PoolBackend(workers=2, threads=1)
    with pytest.raises(CutError):
        fit(experiment(run_dir="cut", backend=pool, **changes), CutAt(6))
    fit(experiment(resume="cut", backend=pool, **changes))
    ours, theirs = contents("cut"), contents("whole")
    assert ours.pop("config.yaml") != theirs.pop("config.yaml")  # another backend
    assert ours == theirs


def test_more_rounds_can_be_added() -> None:
    finished("whole", rounds=4)
    finished("cut", rounds=2)
    run = fit(experiment(resume="cut", rounds=4))
    assert len(run.rows) == 4
    assert contents("cut") == contents("whole")
    assert fit(experiment(resume="cut", rounds=4)).rows == run.rows  # finished: nothing is left to do
    with pytest.raises(InputError, match=r"--rounds to be 4 .* rounds can only be added"):
        fit(experiment(resume="cut", rounds=3))


def test_a_schedule_forbids_more_rounds() -> None:
    finished("cut", rounds=2, algorithm=algorithms.FedProc())
    with pytest.raises(InputError, match=r"--rounds to be 2 .* schedule"):
        fit(experiment(resume="cut", rounds=3, algorithm=algorithms.FedProc()))


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"seed_everything": 1}, "--seed_everything"),
        ({"data": digits(5)}, "--data.num_clients"),
        ({"algorithm": algorithms.SCAFFOLD()}, "--algorithm"),
        ({"algorithm": algorithms.FedAvg(weighting="uniform")}, "--algorithm.weighting"),
        ({"num_domains": 2}, "--num_domains"),
        ({"lr": 0.1}, "--lr"),
        ({"clustering": {"epochs": 2}}, "--clustering.epochs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_change_of_the_past_is_refused(change: dict[str, Any], flag: str) -> None:
    finished("cut", rounds=1)
    before = contents("cut")
    if "clustering" in change:
        from jdfl_lightning import Clustering

        change = {"clustering": Clustering(**change["clustering"])}
    with pytest.raises(InputError, match=f"Expected {flag} to be .* as in cut"):
        fit(experiment(resume="cut", rounds=2, **change))
    assert contents("cut") == before


def test_other_images_are_refused() -> None:
    finished("cut", rounds=1)
    changed = digits()
    changed.images = changed.images.clone()
    changed.images[0] ^= 1
    assert changed.fingerprint() != digits().fingerprint()
    with pytest.raises(InputError, match="the images of the run cut but they, or their split, differ"):
        fit(experiment(resume="cut", rounds=2, data=changed))


def test_auto_takes_the_newest_run_of_the_same_settings() -> None:
    first = fit(experiment(rounds=1))
    other = fit(experiment(rounds=1, lr=0.1))
    again = fit(experiment(rounds=2, resume="auto"))
    assert again.folder == first.folder != other.folder
    new = fit(experiment(rounds=1, lr=0.2, resume="auto"))
    assert new.folder not in (first.folder, other.folder)
    named = fit(experiment(rounds=1, run_dir="named", resume="auto"))
    assert (named.folder, len(fit(experiment(rounds=2, run_dir="named", resume="auto")).rows)) == (Path("named"), 2)


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data.size", "8", "--data.num_clients", "4", "--epochs", "1", "--supervision", "base"]
    assert main(["fit", *arguments, "--rounds", "1", "--run_dir", "run"]) == 0
    assert main(["fit", "--resume", "run", "--rounds", "2"]) == 0
    assert [row["round"] for row in read_run(Path("run")).rows] == [1, 2]
    assert "resumed after round 1" in capsys.readouterr().out
    assert main(["fit", "--resume", "run", "--rounds", "3", "--lr", "0.5"]) == 2
    assert "Expected --lr to be 0.05 as in run but got 0.5" in capsys.readouterr().err
    assert main(["fit", "--resume", "nowhere"]) == 2
    assert "nowhere has no config.yaml" in capsys.readouterr().err
    assert main(["fit", "--resume"]) == 2
    assert "Expected --resume with a value" in capsys.readouterr().err
    assert main(["fit", "--resume", "run"]) == 0
    assert "all 2 rounds are over: --rounds N with a larger number adds some" in capsys.readouterr().out


def change_settings(folder: Path, **settings: Any) -> None:
    """Sign other settings, as if a run of this user had written them."""
    config = yaml.safe_load((folder / "config.yaml").read_text()) | settings
    (folder / "config.yaml").write_bytes(sign(yaml.safe_dump(config).encode()))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rounds": "x"}, "rounds"),
        ({"rounds": None}, "rounds"),
        ({"rounds": datetime.date(2020, 1, 1)}, "rounds"),
        ({"checkpoint": 5}, "checkpoint"),
        ({"checkpoint": {"every": "x", "keep": 2, "reset_damaged_clients": False}}, "checkpoint.every"),
        ({"clustering": 5}, "clustering"),
    ],
    ids=str,
)
def test_settings_of_a_wrong_type_are_named(
    settings: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    discovered("run")
    shutil.copy("run/config.yaml", "own.yaml")
    change_settings(Path("run"), **settings)
    for command in (
        ["--resume", "run"],
        ["--resume", "run", "--rounds", "3", "--checkpoint.every", "1", "--clustering.epochs", "1"],
        ["--config", "own.yaml", "--resume", "auto", "--run_dir", "run"],
        ["--config", "own.yaml", "--discovery", "run"],
    ):
        assert main(["fit", *command]) == BAD_INPUT, command
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert named in error, command
    for resume, run_dir in (("run", None), ("auto", "run")):
        with pytest.raises(StorageError, match=rf"Expected {named} in run/config\.yaml to be a"):
            fit(experiment(resume=resume, run_dir=run_dir))


def test_auto_skips_what_it_cannot_read() -> None:
    first = fit(experiment(rounds=1, supervision="base"))
    faults: list[dict[str, Any]] = [{"rounds": "x"}, {"checkpoint": 5}, {"clustering": [5]}]
    for number, wrong in enumerate(faults):
        shutil.copytree(first.folder, f"runs/{9 - number}")
        change_settings(Path(f"runs/{9 - number}"), **wrong)
    for name, text in (("a", b"lr: ["), ("b", b"\xff"), ("c", b"")):
        Path("runs", name).mkdir()
        Path("runs", name, "config.yaml").write_bytes(text)
    with pytest.warns(Note) as notes:
        again = fit(experiment(rounds=2, supervision="base", resume="auto"))
    assert again.folder == first.folder
    said = [str(note.message) for note in notes if note.category is Note]
    assert [note.partition(":")[0] for note in said] == [f"--resume auto skips runs/{name}" for name in "cba987"]
    assert all(note.isprintable() for note in said)


class Remembering(WandbRounds):
    """Remembers which runs it was asked to go on with, and which it was."""

    asked: ClassVar[list[str | None]] = []
    ids: ClassVar[list[str | None]] = []

    def start(self, folder: Path, default_name: str, run_id: str | None = None) -> None:
        super().start(folder, default_name, run_id)
        self.asked.append(run_id)
        self.ids.append(self.version)


@pytest.fixture
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Remembering, "asked", [])
    monkeypatch.setattr(Remembering, "ids", [])


@pytest.mark.slow
@pytest.mark.usefixtures("_nothing_remembered")
def test_the_same_wandb_run_goes_on() -> None:
    fit(experiment(supervision="base", logger=Remembering(), run_dir="run", rounds=1))
    fit(experiment(supervision="base", logger=Remembering(), resume="run", rounds=2))
    ids = Remembering.ids
    assert ids[0] is not None
    assert ids[0] == ids[1]


@pytest.mark.slow
@pytest.mark.usefixtures("_nothing_remembered")
@pytest.mark.parametrize("what", ["another class", "a run of somebody else", "no class"])
def test_another_wandb_run_is_left_alone(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a checkpoint names may be the version of another logger, or a run that somebody wants to be written to."""
    first = CSVLogger("logs", version="1") if what == "another class" else Remembering()
    fit(experiment(supervision="base", logger=first, run_dir="run", rounds=1))
    if what == "a run of somebody else":
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another user"))
    if what == "no class":
        record, about = load_record(Path("run/checkpoints/1.safetensors"))
        save_record(Path("run/checkpoints/1.safetensors"), record, about | {"logger": "abc"})
    fit(experiment(supervision="base", logger=Remembering(), resume="run", rounds=2))
    assert Remembering.asked[-1] is None


# --- killed for real


def tiny_run(folder: str, resume: bool, name: str) -> None:
    changes: dict[str, Any] = {"resume": "auto", "run_dir": folder} if resume else {"run_dir": folder}
    algorithm = getattr(algorithms, name)()
    fit(experiment(algorithm=algorithm, rounds=6, client_fraction=0.5, num_domains=2, **changes))


def in_child(work: Callable[[], None], kill_after: float | None) -> bool:
    """Do work in a process of its own, which is killed after a while; return whether it came to its end."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    deadline = None if kill_after is None else time.monotonic() + kill_after
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0
            return True
        if deadline is not None and time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("name", ["SCAFFOLD", "FedDC", "MOON", "FedAvg"])
def test_killed_at_random_moments(name: str) -> None:
    """SIGKILL five times a run, four algorithms: nothing lost, the same end, nothing left over."""
    begin = time.monotonic()
    assert in_child(lambda: tiny_run("whole", False, name), None)
    length = time.monotonic() - begin
    chance = random.Random(name)
    kills = 0
    for _ in range(60):
        if kills >= 5:
            break
        if in_child(lambda: tiny_run("cut", True, name), chance.uniform(0.05, 0.6) * length):
            assert contents("cut") == contents("whole")
            shutil.rmtree("cut")
        else:
            kills += 1
    assert kills == 5
    assert in_child(lambda: tiny_run("cut", True, name), None)
    assert contents("cut") == contents("whole")
    assert not [file for file in Path("cut").rglob("*") if file.name.endswith(".tmp")]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_after_the_current_client() -> None:
    arguments = ["--data.size", "16", "--rounds", "100", "--epochs", "3", "--supervision", "base"]
    command = [
        sys.executable,
        "-m",
        "jdfl_lightning",
        "fit",
        "--backend",
        "LocalBackend",
        "--checkpoint.every",
        "50",
    ]
    with subprocess.Popen(
        [*command, *arguments, "--run_dir", "run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("round 2/"):
                run.send_signal(signal.SIGINT)
                break
        out, err = run.communicate(timeout=300)
    assert run.returncode == 130, err
    assert "stopping after the current client" in out
    assert "resume with: jdfl-lightning fit --resume run" in out
    assert "Traceback" not in err
    last = int(read_run(Path("run")).last["round"])
    assert Path(f"run/checkpoints/{last}.safetensors").exists()


# --- what a disk can do


STEPS = ["open", "write", "fsync", "replace"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("round", [1, 2])
def test_a_full_disk_at_every_step(step: str, round: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of writing fails once with ENOSPC: one clear line, the last checkpoint intact, and the run goes on."""
    changes: dict[str, Any] = {"algorithm": algorithms.SCAFFOLD(), "rounds": 3, "supervision": "base"}
    finished("whole", **changes)
    full = OSError(errno.ENOSPC, "No space left on device")
    armed = [True]

    def fails(path: object) -> bool:
        return armed[0] and f"checkpoints/.{round}.safetensors" in str(path)

    opened, wrapped, replace, fsync = os.open, os.fdopen, Path.replace, os.fsync
    path_of: dict[int, object] = {}

    class FullFile:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> FullFile:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, content: bytes) -> None:
            self.file.write(content[: len(content) // 2])
            raise full

    def open_(path: Any, *args: Any, **kwargs: Any) -> int:
        if fails(path) and step == "open":
            raise full
        descriptor = opened(path, *args, **kwargs)
        path_of[descriptor] = path
        return descriptor

    def fdopen_(descriptor: int, *args: Any, **kwargs: Any) -> Any:
        file = wrapped(descriptor, *args, **kwargs)
        return FullFile(file) if fails(path_of[descriptor]) and step == "write" else file

    def replace_(path: Path, target: Path) -> Path:
        if fails(path) and step == "replace":
            raise full
        return replace(path, target)

    def fsync_(descriptor: int) -> None:
        if step == "fsync" and fails(path_of.get(descriptor)):
            raise full
        fsync(descriptor)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fdopen", fdopen_)
    monkeypatch.setattr(Path, "replace", replace_)
    monkeypatch.setattr(os, "fsync", fsync_)
    with pytest.raises(StorageError, match=rf"{round}\.safetensors but: No space left on device\."):
        fit(experiment(run_dir="cut", **changes))
    armed[0] = False
    if round == 1:  # not even one round: nothing to keep
        assert not Path("cut").exists()
        return
    assert [file.name for file in Path("cut/checkpoints").iterdir()] == ["1.safetensors"]
    fit(experiment(resume="cut", **changes))
    assert contents("cut") == contents("whole")


@pytest.mark.parametrize(("every", "backend"), [(1, LocalBackend()), (2, LocalBackend()), (2, VectorBackend())])
def test_states_are_durable_before_the_checkpoint_that_refers_to_them(
    every: int, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may lose what was not synced: when a checkpoint appears, every state that it names was."""
    synced: set[tuple[int, int]] = set()
    fsync, replace, counts = os.fsync, Path.replace, []

    def which(found: os.stat_result) -> tuple[int, int]:
        return found.st_ino, found.st_mtime_ns

    def file_of(client: int, round: int) -> Path:
        bundle = Bundles(Path("run/clients")).find(client, round)
        assert (bundle is not None) == isinstance(backend, VectorBackend)
        return Path(f"run/clients/{client}-{round}.safetensors") if bundle is None else bundle.file

    def fsync_(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(which(os.fstat(descriptor)))

    def replace_(path: Path, target: Path) -> Path:
        if target.parent.name == "checkpoints":
            clients = read_header(path).clients
            states = [file_of(client, round) for client, round in clients.items()]
            counts.append(sum(which(state.stat()) in synced for state in states))
            assert counts[-1] == len(states)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync_)
    monkeypatch.setattr(Path, "replace", replace_)
    options = Checkpointing(every=every)
    changes: dict[str, Any] = {"algorithm": algorithms.SCAFFOLD(), "supervision": "base", "client_fraction": 0.5}
    fit(experiment(run_dir="run", rounds=4, checkpoint=options, evaluate_every=4, backend=backend, **changes))
    assert len(counts) == 4 // every
    assert min(counts) >= 2


def test_a_folder_that_cannot_be_written() -> None:
    finished("cut", rounds=1, supervision="base")
    shutil.rmtree("cut/checkpoints")
    Path("cut/checkpoints").touch()
    with pytest.raises(StorageError, match="cut/checkpoints"):
        fit(experiment(resume="cut", rounds=2, supervision="base"))


@pytest.mark.parametrize("damage", ["cut short", "flipped", "foreign", "empty"])
@pytest.mark.parametrize("victim", ["checkpoints/3.safetensors", "clients/*-3.safetensors"])
def test_damage_is_named_and_the_checkpoint_before_is_offered(damage: str, victim: str) -> None:
    changes: dict[str, Any] = {"algorithm": algorithms.SCAFFOLD(), "supervision": "base"}
    finished("cut", rounds=3, **changes)
    finished("whole", rounds=4, **changes)
    file = next(Path("cut").glob(victim))
    content = bytearray(file.read_bytes())
    if damage == "cut short":
        del content[-10:]
    elif damage == "flipped":
        content[-5] ^= 4
    elif damage == "foreign":
        content = bytearray(b"\x80\x04not a safetensors file at all")
    else:
        content = bytearray()
    file.write_bytes(content)
    with pytest.raises(StorageError, match=rf"{file.name} .*--resume cut/checkpoints/2\.safetensors"):
        fit(experiment(resume="cut", rounds=4, **changes))
    fit(experiment(resume="cut/checkpoints/2.safetensors", rounds=4, **changes))
    ours, theirs = contents("cut"), contents("whole")
    assert ours == theirs


@examples(150)
@given(data=st.data())
def test_no_damage_goes_unseen_or_does_anything_else(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Any byte changed, any end missing, any bytes at all: the original record, or a `StorageError`."""
    folder = tmp_path_factory.mktemp("fuzz")
    file, tensor = folder / "x.safetensors", torch.arange(5.0)
    save_record(file, {"c": {"w": tensor}}, {"round": 3})
    content = bytearray(file.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "junk"]))
    if kind == "flip":
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content = bytearray(data.draw(st.binary(max_size=200)))
    file.write_bytes(content)
    try:
        record, about = load_record(file)
    except StorageError:
        return
    else:  # a space in the header is not damage
        assert about == {"round": 3}
        assert torch.equal(record["c"]["w"], tensor)


@examples(60)
@given(
    about=st.dictionaries(
        st.sampled_from(["round", "clients", "metrics", "data", "logger"]),
        st.one_of(st.none(), st.integers(), st.text(max_size=5), st.dictionaries(st.text(max_size=3), st.integers())),
    )
)
def test_checkpoints_that_are_something_else(about: dict[str, Any], tmp_path_factory: Any) -> None:
    from jdfl_lightning.storage.checkpoint import Checkpoints

    checkpoints = Checkpoints(tmp_path_factory.mktemp("fuzz"), keep=2)
    checkpoints.folder.mkdir()
    save_record(checkpoints.file(1), {"weights": {"w": torch.zeros(1)}}, about)
    try:
        found = checkpoints.load(checkpoints.file(1))[1]
    except StorageError:
        return
    assert json.loads(json.dumps(about))["round"] == found.round


def test_writing_whole_leaves_nothing_behind(tmp_path: Path) -> None:
    file = Path("x")
    write_whole(file, b"old")
    with pytest.raises(StorageError, match="nowhere"):
        write_whole(Path("nowhere/x"), b"new")
    assert file.read_bytes() == b"old"
    assert [path.name for path in Path.cwd().iterdir()] == ["x"]
    assert not ClientStates(tmp_path / "none").folder.exists()


def test_settings_are_complete() -> None:
    """What is saved of a run says everything: another key would escape the comparison."""
    assert set(as_dict(Experiment())) == {field.name for field in dataclasses.fields(Experiment)}


def test_going_back_and_being_killed() -> None:
    """From round 2 of 4 again, killed in round 3: the run goes on from round 2, with every row."""
    changes: dict[str, Any] = {"supervision": "base", "checkpoint": Checkpointing(every=2, keep=2), "lr": 1e-6}
    finished("whole", rounds=4, **changes)
    shutil.copytree("whole", "cut")
    named = next(file for file in sorted(Path("cut/checkpoints").iterdir()) if file.stem != "4")
    with pytest.raises(CutError):
        fit(experiment(resume=str(named), rounds=4, **changes), CutAt(2))
    fit(experiment(resume="cut", rounds=4, **changes))
    assert contents("cut") == contents("whole")


@pytest.mark.parametrize(("before", "after"), [(1, 5), (5, 1), (2, 3)])
@pytest.mark.parametrize("killed", [False, True])
def test_going_back_leaves_the_rows_that_stay(before: int, after: int, killed: bool) -> None:
    """Rounds that are over stay evaluated, or not, as they were, whatever --evaluate_every is from then on."""
    changes: dict[str, Any] = {"supervision": "base", "checkpoint": Checkpointing(keep=3)}
    finished("run", rounds=6, evaluate_every=before, **changes)
    rows = contents("run")["rows"]
    back: dict[str, Any] = {"rounds": 6, "evaluate_every": after, **changes}
    if killed:
        with pytest.raises(CutError):
            fit(experiment(resume="run/checkpoints/4.safetensors", **back), CutAt(2))
        fit(experiment(resume="run", **back))
    else:
        fit(experiment(resume="run/checkpoints/4.safetensors", **back))
    again = contents("run")["rows"]
    assert again[:4] == rows[:4]
    assert [not math.isnan(float(row["test/acc"])) for row in again[4:]] == [5 % after == 0, True]


def test_best_weights_are_those_of_a_row() -> None:
    """Sparse checkpoints, and fewer evaluations after going on: best.safetensors is still the best row's."""
    changes: dict[str, Any] = {"supervision": "base", "lr": 0.3, "checkpoint": Checkpointing(every=50)}
    with pytest.raises(CutError):
        fit(experiment(run_dir="cut", rounds=6, **changes), CutAt(18))
    run = fit(experiment(resume="cut", rounds=6, evaluate_every=5, **changes))
    scores = main_test(run.folder)
    assert scores == run.best["test/acc"]


def main_test(folder: Path) -> float:
    """Accuracy of the best weights, measured anew."""
    return float(evaluate(folder).loc["best", "test/acc"])


def test_a_run_has_one_writer() -> None:
    finished("run", rounds=1, supervision="base")
    with lock_run(Path("run")), pytest.raises(InputError, match="another process is writing run"):
        fit(experiment(resume="run", rounds=2, supervision="base"))
    assert len(fit(experiment(resume="run", rounds=2, supervision="base")).rows) == 2
    with pytest.raises(InputError, match="--run_dir to be left out"):
        fit(experiment(resume="run", run_dir="other", rounds=3, supervision="base"))


def test_discovery_of_other_images_is_not_taken_up() -> None:
    with pytest.raises(CutError):
        fit(experiment(run_dir="cut", rounds=1), CutAt(5))
    before = json.loads(Path("cut/discovery.json").read_text())
    changed = digits()
    changed.images = 255 - changed.images
    fit(experiment(resume="cut", rounds=1, data=changed))
    after = json.loads(Path("cut/discovery.json").read_text())
    assert before["data"] != after["data"]
    assert before["inertias"] != after["inertias"]


def test_a_damaged_table_is_named() -> None:
    finished("cut", rounds=1, supervision="base")
    Path("cut/metrics.csv").write_bytes(b"round,test/acc\n\xff\xfe,1\n")
    with pytest.raises(StorageError, match=r"metrics\.csv"):
        fit(experiment(resume="cut", rounds=2, supervision="base"))


class Listing(Display):
    """Takes down which states there are after each round."""

    def __init__(self) -> None:
        self.files: list[set[str]] = []

    def round(self, number: int, total: int, metrics: Mapping[str, float]) -> None:
        self.files.append({file.stem for file in Path("run/clients").iterdir()})


def test_states_between_checkpoints_do_not_pile_up() -> None:
    """What a round replaces goes at once, unless a checkpoint names it."""
    listing = Listing()
    options = {"algorithm": algorithms.FedDyn(), "checkpoint": Checkpointing(every=4, keep=1), "supervision": "base"}
    fit(experiment(rounds=9, run_dir="run", **options), listing)
    assert max(map(len, listing.files)) <= 2 * 4  # of 4 clients: what the kept checkpoint names, and the newest
    assert listing.files[-1] == {f"{client}-9" for client in range(4)}


@pytest.mark.parametrize("edited", ["rounds: 2\n", "rounds: 2\ncheckpoint: 5\n", "rounds: x\n", "clustering: 5\n"])
def test_settings_without_their_groups_are_named(edited: str) -> None:
    """A config.yaml whose groups are missing or no groups ends in one line."""
    finished("run")
    Path("run/config.yaml").write_text(edited)
    for command in (["fit", "--resume", "run"], ["fit", "--discovery", "run"]):
        assert main([*command, "--data.size", "8", "--backend", "LocalBackend", "--rounds", "1"]) == 2
