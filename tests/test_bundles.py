"""Bundles: the states of clients that were trained together are in one file, and read, replaced, damaged one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import contents, examples, experiment
from jdfl_lightning import DigitsDomains, Experiment, LocalBackend, PoolBackend, RunCallback, VectorBackend, fit
from jdfl_lightning.algorithms import SCAFFOLD, FedAvg, LocalUpdate
from jdfl_lightning.callbacks import RoundReport
from jdfl_lightning.config import Checkpointing
from jdfl_lightning.core import files
from jdfl_lightning.core.errors import StorageError
from jdfl_lightning.core.messages import FitTask
from jdfl_lightning.core.tensors import Record, Tensors
from jdfl_lightning.storage import bundles
from jdfl_lightning.storage.bundles import Bundles
from jdfl_lightning.storage.checkpoint import ClientStates
from jdfl_lightning.storage.records import stored_digest

ROUND = 5


def state_of(client: int) -> Record:
    """A state with two groups, a tensor without dimensions and one without values."""
    value = torch.arange(6.0).view(2, 3) + client
    return {"c": {"w": value, "b": -value[0]}, "n": {"seen": torch.tensor(client), "none": torch.empty(0, 3)}}


def saved(folder: Path, clients: range = range(2, 8), **options: Any) -> ClientStates:
    store = ClientStates(folder, **options)
    store.save_all(ROUND, {client: state_of(client) for client in clients})
    return store


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("*.safetensors"))


def is_state_of(client: int, found: Record | None) -> bool:
    assert found is not None
    expected = state_of(client)
    return found.keys() == expected.keys() and all(
        found[group].keys() == expected[group].keys()
        and all(
            torch.equal(found[group][name], tensor) and found[group][name].dtype == tensor.dtype
            for name, tensor in expected[group].items()
        )
        for group in expected
    )


def test_states_saved_together_are_in_one_file_and_read_alone_or_together(tmp_path: Path) -> None:
    saved(tmp_path)
    assert names(tmp_path) == ["bundle-5-2-6.safetensors"]
    store = ClientStates(tmp_path)  # of another process, which only has the folder
    assert is_state_of(4, store.load(4, ROUND))
    store.save(9, 3, state_of(9))
    found = store.recall_all({7: ROUND, 9: 3, 2: ROUND})
    assert found.keys() == {2, 7, 9}
    assert all(is_state_of(client, state) for client, state in found.items())
    assert sorted(store.kept()) == [*[(client, ROUND) for client in range(2, 8)], (9, 3)]
    assert store.missing({2: ROUND, 7: ROUND, 9: 3, 8: ROUND, 3: 4}) == [8, 3]
    with pytest.raises(StorageError, match="no file"):
        store.load(8, ROUND)


def test_a_state_has_the_checksum_of_a_file_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path / "together")
    alone = ClientStates(tmp_path / "alone")
    alone.save(4, ROUND, state_of(4))
    digest = stored_digest(tmp_path / "alone" / "4-5.safetensors")
    assert digest.encode() in (tmp_path / "together" / "bundle-5-2-6.safetensors").read_bytes()


def failing(start: str, error: Exception) -> Any:
    """`write_whole`, but files whose names begin so cannot be written."""

    def write(file: Path, *content: Any, **options: Any) -> None:
        if file.name.startswith(start):
            raise error
        files.write_whole(file, *content, **options)

    return write


def test_a_file_that_cannot_be_written_ends_the_run_before_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "write_whole", failing("bundle-3-", StorageError("No space left on device.")))
    with pytest.raises(StorageError, match="No space left"):
        fit(setting(run_dir="run"))
    assert sorted(file.stem for file in Path("run/checkpoints").iterdir()) == ["1", "2"]
    monkeypatch.undo()


class Failing(RunCallback):
    """A part of the user's that fails after two rounds."""

    def round_evaluated(self, report: RoundReport) -> None:
        if report.round == 2:
            raise RuntimeError("a fault")


@pytest.mark.parametrize("every", [1, 10])
def test_no_checkpoint_refers_to_states_whose_file_could_not_be_written(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if the run ends before its next checkpoint."""
    settings = {"rounds": 3, "client_fraction": 1.0, "checkpoint": Checkpointing(every=every, keep=1)}
    with monkeypatch.context() as patch:
        patch.setattr(bundles, "write_whole", failing("bundle-2-0-4.", StorageError("No space left.")))  # a first group
        with pytest.raises(StorageError, match="No space left"):
            fit(setting(**settings, run_dir="run", callbacks=[Failing()]))
    assert [file.stem for file in Path("run/checkpoints").iterdir()] == ["1"]
    fit(setting(**settings, resume="run"))
    fit(setting(**settings, run_dir="other"))
    assert contents("run") == contents("other")


def test_states_that_need_too_much_memory_together_are_saved_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a group is that needs too much to be trained together."""
    monkeypatch.setattr(bundles, "write_whole", failing("bundle-2-0-4.", MemoryError("none left")))
    fit(setting(rounds=2, client_fraction=1.0, run_dir="run", checkpoint=Checkpointing(keep=1)))
    assert names(Path("run/clients")) == [
        *[f"{client}-2.safetensors" for client in range(4)],
        "bundle-2-4-3.safetensors",
    ]
    store = ClientStates(Path("run/clients"))
    assert all(store.load(client, 2) for client in range(7))


def test_a_run_that_ends_between_checkpoints_says_that_states_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint at the run's end is of the last round whose states are all there."""
    monkeypatch.setattr(bundles, "write_whole", failing("bundle-2-", StorageError("No space left.")))
    settings = {"checkpoint": Checkpointing(every=10, keep=1), "backend": VectorBackend()}
    with pytest.raises(StorageError, match="No space left"):
        fit(setting(**settings, run_dir="run", callbacks=[Failing()]))
    assert [file.stem for file in Path("run/checkpoints").iterdir()] == ["1"]


class Keeping(FedAvg):
    """Its clients keep their weights, which its server changes."""

    def local(self, task: FitTask, state: Record) -> Any:
        return KeepingUpdate(task, state)

    def aggregate(self, weights: Tensors, server: Record, results: Any, context: Any) -> tuple[Tensors, Record]:
        for result in results:
            for tensor in result.weights.values():
                tensor.zero_()
        return weights, server


class KeepingUpdate(LocalUpdate):
    stacks: ClassVar[bool] = False

    def report(self, weights: Tensors) -> tuple[Record, Record]:
        return {}, {"mine": weights}


@pytest.mark.parametrize("stacks", [False, True])
def test_a_state_is_what_it_was_when_it_was_saved(stacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may do as it likes with an answer that shares its tensors."""
    monkeypatch.setattr(KeepingUpdate, "stacks", stacks)
    fit(setting(run_dir="run", algorithm=Keeping(), rounds=1, batch_size=1000))  # one step each: rows in their order
    store = ClientStates(Path("run/clients"))
    assert any(Path("run/clients").glob("bundle-*"))
    assert all(store.load(*state)["mine"]["head.weight"].any() for state in store.kept())


@pytest.mark.parametrize(
    "states",
    [
        {1: state_of(1)},
        {1: state_of(1), 2: {"c": {"w": torch.zeros(3)}}},
        {1: {"c": {"w": torch.zeros(3)}}, 2: {"c": {"w": torch.zeros(3).double()}}},
        {1: {"c": {"w": torch.zeros(3)}}, 2: {"h": {"w": torch.zeros(3)}}},
    ],
)
def test_one_state_and_states_of_different_forms_have_files_of_their_own(
    states: dict[int, Record], tmp_path: Path
) -> None:
    store = ClientStates(tmp_path)
    store.save_all(ROUND, states)
    assert names(tmp_path) == [f"{client}-5.safetensors" for client in states]
    found = store.recall_all(dict.fromkeys(states, ROUND))
    assert {client: list(state or ()) for client, state in found.items()} == {c: list(s) for c, s in states.items()}


def test_states_without_tensors(tmp_path: Path) -> None:
    """Such as MOON's on features, where nothing is below the head."""
    store = ClientStates(tmp_path)
    store.save_all(ROUND, {client: {"previous": {}} for client in range(3)})
    assert store.recall_all({0: ROUND, 2: ROUND}) == {0: {}, 2: {}}


def test_a_file_shrinks_with_its_states(tmp_path: Path) -> None:
    """Of 6 states 3 may go before the file is written again; the last one takes the file with it."""
    store, other = saved(tmp_path), ClientStates(tmp_path)
    assert is_state_of(7, other.load(7, ROUND))
    store.remove((client, ROUND) for client in (2, 4, 5))
    assert names(tmp_path) == ["bundle-5-2-6.safetensors"]
    assert store.missing({2: ROUND, 3: ROUND}) == [2]
    store.remove([(3, ROUND)])
    assert names(tmp_path) == ["bundle-5-6-2.safetensors"]
    assert all(is_state_of(client, store.load(client, ROUND)) for client in (6, 7))
    assert is_state_of(7, other.load(7, ROUND)), "a worker that knows the larger file"
    store.remove([(6, ROUND)])
    assert names(tmp_path) == ["bundle-5-6-2.safetensors"]
    store.remove([], fully=True)
    assert names(tmp_path) == ["bundle-5-7-1.safetensors"]
    store.remove([(7, ROUND)])
    assert names(tmp_path) == []


def test_what_is_left_does_not_depend_on_when_it_was_removed(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    for client in (3, 7, 2, 5):
        one.remove([(client, ROUND)])
    two.remove((client, ROUND) for client in (2, 3, 5, 7))
    for store in (one, two):
        store.remove([], fully=True)
    ((first, ours),) = [(file.name, file.read_bytes()) for file in (tmp_path / "one").iterdir()]
    ((second, theirs),) = [(file.name, file.read_bytes()) for file in (tmp_path / "two").iterdir()]
    assert (first, ours) == (second, theirs)


def test_a_run_that_ends_while_a_file_is_written_again(tmp_path: Path) -> None:
    """Both files are there then, with the same states: one that is removed is removed from both."""
    store = saved(tmp_path)
    content = (tmp_path / "bundle-5-2-6.safetensors").read_bytes()
    store.remove((client, ROUND) for client in range(2, 6))
    (tmp_path / "bundle-5-2-6.safetensors").write_bytes(content)
    resumed = ClientStates(tmp_path)
    assert is_state_of(6, resumed.load(6, ROUND))
    resumed.remove([state for state in resumed.kept() if state != (7, ROUND)], fully=True)
    assert names(tmp_path) == ["bundle-5-7-1.safetensors"]
    assert is_state_of(7, resumed.load(7, ROUND))


def test_a_state_of_a_void_attempt_is_replaced(tmp_path: Path) -> None:
    """Whether the clients of the next attempt are trained alone or together, also for a process that begins then."""
    store = saved(tmp_path)
    store.save(3, ROUND, state_of(30))
    assert torch.equal(ClientStates(tmp_path).load(3, ROUND)["n"]["seen"], torch.tensor(30))
    store.save_all(ROUND, {client: state_of(client + 40) for client in (3, 4)})
    store.save_all(ROUND, {client: state_of(client + 50) for client in (4, 5)})
    for reader in (store, ClientStates(tmp_path)):
        assert [int(reader.load(client, ROUND)["n"]["seen"]) for client in (4, 5)] == [54, 55]


@examples(150)
@given(data=st.data())
def test_no_damage_goes_unseen(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Any byte changed, any end missing, any bytes at all: every client has its state or an error."""
    folder = tmp_path_factory.mktemp("fuzz")
    saved(folder, range(2))
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "junk"]))
    if kind == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content = bytearray(data.draw(st.binary(max_size=200)))
    file.write_bytes(content)
    store = ClientStates(folder, reset_damaged=True)
    for client, state in store.recall_all({0: ROUND, 1: ROUND}).items():
        assert state is None or is_state_of(client, state)
    store.remove([(0, ROUND)], fully=True)
    left = store.recall(1, ROUND)
    assert left is None or is_state_of(1, left)


def test_damage_concerns_the_client_whose_state_it_is(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "bundle-5-2-6.safetensors"
    content = file.read_bytes()
    wanted = dict.fromkeys(range(2, 8), ROUND)
    damaged = state_of(4)["c"]["w"].numpy().tobytes()
    assert content.count(damaged) == 1
    file.write_bytes(content.replace(damaged, bytes(len(damaged))))
    with pytest.raises(StorageError, match=r"client 4 .*bundle-5-2-6.* checksum .*--checkpoint.reset_damaged_clients"):
        ClientStates(tmp_path).recall_all(wanted)
    found = ClientStates(tmp_path, reset_damaged=True).recall_all(wanted)
    assert [client for client, state in found.items() if state is None] == [4]
    file.write_bytes(content[:50])  # nobody knows whose states these were
    store = ClientStates(tmp_path, reset_damaged=True)
    assert store.missing(wanted) == []
    assert set(store.recall_all(wanted).values()) == {None}
    with pytest.raises(StorageError, match=r"bundle-5-2-6\.safetensors cannot be read"):
        ClientStates(tmp_path).load(3, ROUND)
    ClientStates(tmp_path).save(9, ROUND, state_of(9))  # it has a file of its own in the same round
    assert is_state_of(9, ClientStates(tmp_path).load(9, ROUND))


def test_a_file_of_another_round_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "bundle-5-2-6.safetensors").rename(tmp_path / "bundle-6-2-6.safetensors")
    with pytest.raises(StorageError, match=r"round 6 but .*bundle-6-2-6.* cannot be read: its name"):
        ClientStates(tmp_path).load(3, 6)


def setting(**changes: Any) -> Experiment:
    """Seven clients, five of them in a round: files shrink and are written again."""
    return experiment(
        **{
            "data": DigitsDomains(size=8, num_clients=7),
            "backbone": "test_vector.small_net",
            "algorithm": SCAFFOLD(),
            "supervision": "base",
            "client_fraction": 0.7,
            "rounds": 6,
            "backend": VectorBackend(group=4),
            **changes,
        }
    )


class Cut(SCAFFOLD):
    """Its client 6 ends the run in round 4."""

    def local(self, task: FitTask, state: Record) -> Any:
        if task.round == 4 and Path("cut").exists():
            raise KeyboardInterrupt
        return super().local(task, state)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_that_is_cut_is_resumed_to_the_same_files(keep: int) -> None:
    run = setting(algorithm=Cut(), checkpoint=Checkpointing(keep=keep))
    fit(replace(run, run_dir="whole"))
    assert any(Path("whole/clients").glob("bundle-*"))
    Path("cut").touch()
    with pytest.raises(BaseException, match="--resume"):
        fit(replace(run, run_dir="parts"))
    Path("cut").unlink()
    fit(replace(run, run_dir=None, resume="parts"))
    assert contents("whole") == contents("parts")


def test_disk_use_is_bounded() -> None:
    """A file is at least half full, whatever the rounds were; in the end there are no states but the needed ones."""
    fit(setting(run_dir="run", rounds=8, checkpoint=Checkpointing(keep=1)))
    store = ClientStates(Path("run/clients"))
    assert len(store.kept()) == len({client for client, _ in store.kept()}) == 7


POOL = pytest.param(PoolBackend(workers=1, threads=1), marks=pytest.mark.slow)


@pytest.mark.parametrize("backend", [LocalBackend(), POOL])
def test_other_backends_read_these_states_and_the_other_way_round(backend: Any) -> None:
    """A run folder of either kind is resumed by the other, with the states that are in it."""
    fit(setting(run_dir="vector", rounds=6))
    for first, second, name in ((VectorBackend(), backend, "there"), (backend, VectorBackend(), "back")):
        fit(setting(run_dir=name, rounds=3, backend=first))
        fit(setting(resume=name, rounds=6, backend=second))
        ours, theirs = (ClientStates(Path(folder, "clients")) for folder in (name, "vector"))
        assert sorted(set(ours.kept())) == sorted(set(theirs.kept()))
        for client, number in ours.kept():
            found, expected = ours.load(client, number)["c"], theirs.load(client, number)["c"]
            torch.testing.assert_close(dict(found), dict(expected), rtol=1e-4, atol=1e-5)


def test_without_bundles_the_run_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of their own, as runs of earlier versions have them, give the same weights and metrics."""
    fit(setting(run_dir="together"))
    with monkeypatch.context() as patch:
        patch.setattr(Bundles, "save", lambda *args: False)
        fit(setting(run_dir="alone", rounds=3))
    assert not any(Path("alone/clients").glob("bundle-*"))
    fit(setting(resume="alone", rounds=6))
    assert any(Path("alone/clients").glob("bundle-*"))
    ours, theirs = (
        {name: found for name, found in contents(folder).items() if name.startswith(("checkpoints/", "rows", "last."))}
        for folder in ("together", "alone")
    )
    assert ours == theirs
