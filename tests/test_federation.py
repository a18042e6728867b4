"""Sites that keep their images: what crosses, who may take part, what happens to those who are away."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("flwr needs Python 3.11", allow_module_level=True)

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Error, Message
from flwr.proto.node_pb2 import NodeInfo
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from flower_grid import FakeGrid, on_grid, over_the_wire, run_on_grid, serve, write_config
from helpers import contents, every, experiment
from jdfl_lightning import SCAFFOLD, Experiment, FedDyn, ImageFolderDomains, SiteFolders, TrainerOptions, fit
from jdfl_lightning.cli import main
from jdfl_lightning.client.evaluation import Evaluation, Scores
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.config import Checkpointing, as_dict
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask
from jdfl_lightning.federation import members
from jdfl_lightning.federation.flower import FlowerTransport, arguments, from_records, make_client_app, to_records
from jdfl_lightning.federation.members import Federation, Member, Transport, read_roster
from jdfl_lightning.federation.runner import SitesRunner
from jdfl_lightning.federation.server import SitesBackend
from jdfl_lightning.federation.site import SiteWorker
from jdfl_lightning.federation.wire import (
    Answer,
    Payload,
    Request,
    RequestHeader,
    SiteInfo,
    read_answer,
    read_info,
    read_request,
    write_answer,
    write_info,
    write_request,
)
from jdfl_lightning.server.resume import fixed_settings
from jdfl_lightning.storage.checkpoint import ClientStates

RUN = {"run_dir": "flower"}


# ------------------------------------------------------------------------------------------------------- the wire

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.builds(
        lambda shape, dtype: torch.rand(shape).mul(9).to(dtype),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from(DTYPES),
    ),
    max_size=3,
)
RECORDS = st.dictionaries(st.sampled_from(["c", "h.x", "mean"]), TENSORS, max_size=2)


def equal(ours: Any, theirs: Any) -> bool:
    """Whether two messages are the same, to the bit and in the same order."""
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)
    if isinstance(ours, Mapping):
        return list(ours) == list(theirs) and all(equal(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    if hasattr(ours, "__dataclass_fields__"):
        return type(ours) is type(theirs) and equal(vars(ours), vars(theirs))
    return bool(ours == theirs)


def sent(payload: Payload) -> Payload:
    """What the other end of Flower's wire reads."""
    grid = FakeGrid("digits", {}, {})  # gives messages a sender
    assert not grid.present
    return from_records(over_the_wire(Message(to_records(payload), 1, "train")).content)


@given(weights=TENSORS, buffers=TENSORS, record=RECORDS, learned=RECORDS, since=st.integers(0, 9))
def test_requests_cross_unchanged(weights: Any, buffers: Any, record: Any, learned: Any, since: int) -> None:
    task = FitTask(3, 2, 7, weights, buffers, record, 5, 1.25, -1, since, 1, True, learned)
    other = replace(task, client=8, weight=1 / 3, since=0)
    models = {"": weights, "mean": {"w": torch.ones(2)}}
    for request in (
        Request([task, other]),
        Request([task], models, buffers),
        Request((), models, {"b": torch.ones(1)}),
    ):
        back = read_request(sent(write_request(request)))
        assert equal(back, replace(request, tasks=list(request.tasks)))
        assert write_request(request).notes == write_request(back).notes


def test_a_model_that_is_the_tasks_own_crosses_once() -> None:
    weights, buffers = {"w": torch.ones(3)}, {"b": torch.ones(1)}
    payload = write_request(Request([FitTask(0, 1, 0, weights, buffers)], {"": weights}, buffers))
    assert set(payload.tensors) == {"weights", "buffers"}


@given(
    weights=TENSORS, buffers=TENSORS, record=RECORDS, loss=st.floats(width=32, allow_nan=False, allow_infinity=False)
)
def test_answers_cross_unchanged(weights: Any, buffers: Any, record: Any, loss: float) -> None:
    metrics_of = {"train/loss": loss, "norm/client/c_1": 2.0}
    result = FitResult(4, 10, 3, 0.1, weights, buffers, record, metrics_of, True, learned={"supervision": weights})
    answer = Answer(
        [result, FitFailure(2, "no luck")], {"": {"ink": (3, 4), "photo": (0, 9)}, "mean": {"ink": (1, 1)}}, 0.5
    )
    metrics = ("train/loss", "norm/client/c_1")
    assert equal(read_answer(sent(write_answer(answer)), [4, 2], ["", "mean"], metrics), answer)


def test_facts_cross_unchanged_and_hold_no_true_domain() -> None:
    info = SiteInfo(1, False, [1, 3], [10, 12], ["a", "b"], ["x"], [7], "ff", "1")
    assert read_info(sent(write_info(info))) == info
    assert {name for name in vars(info) if "domain" in name} == {"domains"}  # the groups that accuracy is told of


@pytest.mark.parametrize(
    "payload",
    [
        Payload(),
        Payload(notes={"info": {"site": "x"}}),
        Payload(notes={"info": {"site": float("inf")}}),
        write_info(SiteInfo(0, True, [], [], ["a"], ["site0"], [1], "", "")),
        write_info(SiteInfo(0, True, [0, 1], [5], ["a"], ["site0"], [1], "", "")),
        write_info(SiteInfo(0, True, [0, 0], [5, 5], ["a"], ["site0"], [1], "", "")),
        write_info(SiteInfo(0, False, [0, -7], [5, 5], ["a"], ["x"], [1], "", "")),
        write_info(SiteInfo(0, True, [0], [0], ["a"], ["site0"], [1], "", "")),
        write_info(SiteInfo(0, True, [0], [2**40], ["a"], ["site0"], [1], "", "")),
        write_info(SiteInfo(0, True, [0], [5], ["a"], ["site1"], [1], "", "")),
        write_info(SiteInfo(0, False, [0], [5], ["a"], ["overall"], [1], "", "")),
        write_info(SiteInfo(0, False, [0], [5], ["a", "a"], ["x"], [1], "", "")),
        write_info(SiteInfo(-1, False, [0], [5], ["a"], ["x"], [1], "", "")),
        write_info(SiteInfo(0, False, [0], [5], ["a"], ["x"], [1, 1], "", "")),
        write_info(SiteInfo(0, False, [0], [5], ["a\x1b[31m"], ["x"], [1], "", "")),
        write_info(SiteInfo(0, False, [0], [5], ["a"], ["x\u202e"], [1], "", "")),
        write_info(SiteInfo(0, False, [0], [5], ["a" * 201], ["x"], [1], "", "")),
        write_info(SiteInfo(0, False, [0], [5], ["a"], ["x"], [1], "", "1\n2")),
        write_info(SiteInfo(0, False, list(range(100_001)), [5] * 100_001, ["a"], ["x"], [1], "", "")),
    ],
)
def test_info_that_cannot_be_used(payload: Payload) -> None:
    with pytest.raises(InputError, match="Expected a site"):
        read_info(payload)


def test_an_answer_that_is_none() -> None:
    for payload in (Payload(), Payload(notes={"evaluated": {"seconds": 1.0}}), write_answer(Answer([]))):
        with pytest.raises(InputError, match="site's answer"):
            read_answer(payload, [0])


def test_run_config_is_the_command_line() -> None:
    given = {
        "lr": 0.1,
        "algorithm.weighting": "uniform",
        "algorithm": "FedAvg",
        "logger": True,
        "run-dir": "",
        "resume": "x",
    }
    assert arguments("c", given) == [
        "--config=c",
        "--algorithm=FedAvg",
        "--algorithm.weighting=uniform",
        "--logger=true",
        "--lr=0.1",
        "--resume=x",
    ]
    assert arguments("c", given, at_site=True) == [
        "--config=c",
        "--algorithm=FedAvg",
        "--algorithm.weighting=uniform",
        "--lr=0.1",
    ]


# -------------------------------------------------------------------------------------------------- sites' own folders


def make_site(root: Path, clients: int, shade: int) -> Path:
    """The folder of a site: 3 classes of 5 images; with several clients, a folder for each."""
    rng = np.random.default_rng(shade)
    for client in range(clients):
        for label in range(3):
            folder = (root / f"client{client}" if clients > 1 else root) / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(5):
                pixels = rng.integers(0, 60, (8, 8, 3), dtype=np.uint8) + np.uint8(shade)
                pixels[..., label] += 90
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


@pytest.fixture
def roots(tmp_path: Path) -> list[str]:
    """Three sites: with two clients, one, and one."""
    return [str(make_site(tmp_path / f"site{site}", clients, 40 * site)) for site, clients in enumerate((2, 1, 1))]


def own_folders(roots: list[str] | None, **settings: Any) -> Experiment:
    defaults = {"data": SiteFolders(roots, size=8, num_clients=4), "algorithm": SCAFFOLD(), "rounds": 3}
    return experiment(**(defaults | settings))


def own_grid(config: str, roots: list[str], run_config: Mapping[str, Any] = RUN) -> FakeGrid:
    nodes = {
        7 - site: {"partition-id": site, "data-root": root, "state-dir": str(Path(f"states{site}").absolute())}
        for site, root in enumerate(roots)
    }
    return FakeGrid(config, nodes, run_config)


@pytest.mark.parametrize("supervision", every(3, ["random", "graded", "base"]))
def test_a_federation_is_its_local_rehearsal(roots: list[str], supervision: str) -> None:
    run = own_folders(roots, supervision=supervision, num_domains=2)
    fit(replace(run, run_dir="local"))
    config = write_config(own_folders(None, supervision=supervision, num_domains=2))
    grid = own_grid(config, roots)
    serve(config, grid, RUN)
    ours, theirs = contents("local"), contents("flower")
    assert ours["rows"] == theirs["rows"]
    assert {"test/acc/site0", "test/acc/site1", "test/acc/site2"} < set(ours["rows"][0])
    assert ours["last.safetensors"] == theirs["last.safetensors"]
    for name, content in ours.items():
        if name.startswith("clients/"):
            site = 0 if name[8] in "01" else int(name[8]) - 1
            (file,) = Path(f"states{site}").glob(f"*/site{site}/{name[8:]}")
            assert file.read_bytes() == content
    assert len(grid.pushed) == 3 * (1 + (supervision != "base") + 3 + 1)  # who, discovery, rounds, the last model


def test_nobody_tells_the_server_true_domains(roots: list[str]) -> None:
    """Neither names of folders nor anything of images is in what crosses; and no ARI comes of it."""
    config = write_config(own_folders(None, num_domains=2))
    grid = own_grid(config, roots)
    replies: list[str] = []

    def listen(message: Message, reply: Message) -> Message:
        replies.append(str(reply.content))
        return reply

    grid.tamper = listen
    serve(config, grid, RUN)
    for text in [*replies, *(str(message.content) for message in grid.pushed)]:
        assert not any(root in text for root in roots)
        assert "client1" not in text
    found = json.loads(Path("flower/discovery.json").read_text())
    assert not {"ari", "nmi", "true_domains"} & set(found)
    shared = run_on_grid(write_config(experiment(rounds=1)), {"run_dir": "shared"}, sites=2)
    assert not any("ink" in str(message.content) for message in shared.pushed)


def test_site_folders_that_cannot_be_used(roots: list[str], tmp_path: Path) -> None:
    def load(given: list[str] | None = roots, **options: Any) -> SiteFolders:
        data = SiteFolders(given, size=8, **({"num_clients": 4} | options))
        data.deal(0)
        return data

    assert load().partition.client_domains == [0, 0, 1, 2]
    assert load(classes=["class2", "class0", "class1"]).class_names == ("class2", "class0", "class1")
    (tmp_path / "empty/class0").mkdir(parents=True)
    for options, message in (
        ({"given": None}, "Expected --data.roots"),
        ({"num_clients": 3}, "--data.num_clients to be 4, the clients in --data.roots, but got 3"),
        ({"given": [*roots[:2], str(tmp_path / "nowhere")]}, "folder of a site but found none at"),
        ({"given": [*roots[:2], str(tmp_path / "empty")]}, "in .*empty but found no image there"),
        ({"classes": ["class0"]}, "folders of --data.classes in"),
        ({"test_fraction": 0.99}, "site0, client 0"),
    ):
        with pytest.raises(InputError, match=message):
            load(**options)
    for file in Path(roots[1], "class1").iterdir():
        file.unlink()
    with pytest.raises(InputError, match=r"no image of class1: name them all in --data\.classes"):
        load()
    few = load(classes=["class0", "class1", "class2"])
    assert len(few.partition.clients[2]) == 8


# ---------------------------------------------------------------------------------------------------- coming and going


class Away:
    """Makes nodes unavailable in some rounds: their messages are answered by an error, under another's name."""

    def __init__(self, grid: FakeGrid, rounds: Mapping[int, set[int]]) -> None:
        self.grid, self.rounds = grid, rounds
        grid.tamper = self

    def __call__(self, message: Message, reply: Message) -> Message | None:
        notes = from_records(message.content).notes
        tasks = [note for name, note in notes.items() if name.startswith("task.")]
        if tasks and message.metadata.dst_node_id in self.rounds.get(int(tasks[0]["round"]), set()):
            error = Message(Error(5, "Node Unavailable"), reply_to=message)
            error.metadata.__dict__["_src_node_id"] = 1
            return error
        return reply


def test_a_site_whose_answers_are_lost_goes_back_to_the_state_that_counts() -> None:
    """It trained and wrote a state that the server never saw: the run is that of a client that was away."""
    run = experiment(algorithm=SCAFFOLD(), rounds=4, supervision="base")
    config = write_config(run)
    grid = on_grid(config, RUN, sites=4)
    Away(grid, {2: {101}, 3: {101}})
    serve(config, grid, RUN)
    fit(replace(run, algorithm=Absent(1, (2, 3)), run_dir="local"))
    ours, theirs = contents("local"), contents("flower")
    assert ours["last.safetensors"] == theirs["last.safetensors"]
    assert [(row["clients"], row["refused"]) for row in theirs["rows"]] == [
        (r["clients"], r["refused"]) for r in ours["rows"]
    ]
    assert [row["refused"] for row in theirs["rows"]] == ["0.0", "1.0", "1.0", "0.0"]
    names = [file.name for file in Path("states").rglob("1-*")]
    assert sorted(names) == ["1-1.safetensors", "1-4.safetensors"]


class Absent(SCAFFOLD):
    """SCAFFOLD with a client that fails in some rounds."""

    def __init__(self, client: int, rounds: tuple[int, ...]) -> None:
        super().__init__()
        self.client, self.rounds = client, rounds

    def local(self, task: FitTask, state: Any) -> Any:
        if task.client == self.client and task.round in self.rounds:
            raise RuntimeError("away")
        return super().local(task, state)


def test_a_run_goes_on_where_it_was() -> None:
    """A second `flwr run` continues from the server's checkpoint and the sites' states; also from an earlier one."""
    settings = {"algorithm": FedDyn(), "checkpoint": Checkpointing(keep=2)}
    config = write_config(experiment(rounds=4, **settings))
    fit(experiment(rounds=4, run_dir="local", **settings))
    run_on_grid(config, RUN | {"rounds": 3}, sites=2)
    Path("flower/checkpoints/3.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="round 2 is whole"):
        run_on_grid(config, {"resume": "flower", "rounds": 4}, sites=2)
    run_on_grid(config, {"resume": "flower/checkpoints/2.safetensors", "rounds": 4}, sites=2)
    assert contents("local")["rows"] == contents("flower")["rows"]
    assert contents("local")["last.safetensors"] == contents("flower")["last.safetensors"]
    assert Path("flower/federation.json").is_file()
    assert main(["runs", "rm", "flower", "--yes"]) == 0
    assert not Path("flower").exists()
    assert list(Path("states").iterdir())  # what sites keep is theirs


def test_a_site_that_has_lost_its_state_is_absent() -> None:
    config = write_config(experiment(algorithm=SCAFFOLD(), rounds=2, supervision="base"))
    grid = run_on_grid(config, RUN | {"rounds": 1}, sites=2)
    for file in Path("states").rglob("1-*"):
        file.unlink()
    run_on_grid(config, {"resume": "flower"}, sites=2)
    assert [row["refused"] for row in contents("flower")["rows"]] == ["0.0", "1.0"]
    assert grid.present == {100, 101}


def test_states_that_nobody_will_ask_for_go() -> None:
    states = ClientStates(Path("states"))
    for client in (1, 11):
        for number in (1, 3, 4, 7, 9):
            states.save(client, number, {"c": {"w": torch.ones(1)}})
    states.settle(1, since=7, oldest=4)
    assert sorted(file.name for file in Path("states").glob("1-*")) == [f"1-{n}.safetensors" for n in (3, 4, 7)]
    states.settle(1, since=0, oldest=0)
    assert not list(Path("states").glob("1-*"))
    assert len(list(Path("states").glob("11-*"))) == 5


def test_a_node_that_comes_back_under_another_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without authentication a restarted SuperNode is a new one; it says who it is and takes the old one's place."""
    config = write_config(experiment(rounds=3, supervision="base"))
    grid = on_grid(config, RUN, sites=2)

    def restart(message: Message, reply: Message) -> Message:
        if message.metadata.dst_node_id == 101 and any(n == "note.task.1" for n in message.content):
            grid.present.discard(101)
            grid.contexts[205] = grid.contexts[101]
            grid.present.add(205)
        return reply

    grid.tamper = restart
    serve(config, grid, RUN)
    assert [row["clients"] for row in contents("flower")["rows"]] == ["4.0", "4.0", "4.0"]
    assert {message.metadata.dst_node_id for message in grid.pushed} == {100, 101, 205}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition-id": -1}, "partition-id to be a number from 0 but got -1"),
        ({"partition-id": 5}, "partition-id to be below num-partitions, 2, but got 5"),
        ({"num-partitions": 1, "partition-id": 0}, "site 0 is there already"),
        ({"num-partitions": 3, "partition-id": 2}, "it has clients that site 0 has too"),
    ],
)
def test_a_site_that_cannot_take_part_is_told(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may come back with its node-config mended: the run begins then, and not before."""
    monkeypatch.setattr(members, "_AGAIN", 0.2)
    config = write_config(experiment(rounds=1, supervision="base"))
    grid = on_grid(config, RUN, sites=2)
    right = dict(grid.contexts[101].node_config)
    grid.contexts[101].node_config.update(changes)
    asked = []

    def mend(request: Message, reply: Message) -> Message:
        if request.metadata.dst_node_id == 101:
            asked.append(time.monotonic())
            grid.contexts[101].node_config.clear()
            grid.contexts[101].node_config.update(right)
        return reply

    grid.tamper = mend
    serve(config, grid, RUN)
    said = " ".join(capsys.readouterr().out.split())
    assert "node 101 cannot take part" in said
    assert re.search(message, said)
    assert asked[1] - asked[0] >= 0.2


def test_other_settings_at_a_site_are_refused() -> None:
    config = write_config(experiment(rounds=1, supervision="base"))
    Path("other.yaml").write_text(Path(config).read_text().replace("lr: 0.05", "lr: 0.07"))
    grid = on_grid("other.yaml", RUN, sites=1)
    with pytest.raises(InputError, match=r"--lr to be 0.05 as in the server's run but got 0.07"):
        serve(config, grid, RUN)


def test_a_probe_leaves_a_clients_states_alone() -> None:
    """A client whose probe was lost trains without a pseudo-domain, and is asked again in the next round."""
    run = experiment(algorithm=SCAFFOLD(), rounds=4, supervision="graded", num_domains=2)
    config = write_config(run)
    grid = on_grid(config, RUN, sites=4)
    lost = [0]

    def lose(message: Message, reply: Message) -> Message:
        tasks = [note for name, note in from_records(message.content).notes.items() if name.startswith("task.")]
        if message.metadata.dst_node_id == 101 and tasks and tasks[0]["round"] == 0 and lost[0] < 2:
            lost[0] += 1
            return Message(Error(5, "Node Unavailable"), reply_to=message)
        return reply

    grid.tamper = lose
    serve(config, grid, RUN)
    rows = contents("flower")["rows"]
    assert [(row["clients"], row["joined"]) for row in rows] == [("4.0", "0.0"), *[("4.0", "1.0")] * 3]


@pytest.mark.parametrize("precision", ["64-true", pytest.param("bf16-true", marks=pytest.mark.slow)])
def test_precision_survives_new_processes(precision: str) -> None:
    """Flower starts a process for each message: nothing that counts may be in one."""
    run = experiment(rounds=2, supervision="base", trainer=TrainerOptions(precision=precision))  # type: ignore[arg-type]
    fit(replace(run, run_dir="local"))
    config = write_config(run)
    grid = on_grid(config, RUN, sites=2)

    def forget(message: Message, reply: Message) -> Message:
        grid.apps.clear()
        return reply

    grid.tamper = forget
    serve(config, grid, RUN)
    assert contents("local")["last.safetensors"] == contents("flower")["last.safetensors"]


def test_the_best_round_is_one_that_all_have_judged() -> None:
    """Three of four sites do not evaluate the first model, and the fourth finds no fault with it."""
    config = write_config(experiment(rounds=3, supervision="base"))
    grid = on_grid(config, RUN, sites=4)

    def praise(message: Message, reply: Message) -> Message:
        payload, asked = from_records(reply.content), from_records(message.content).notes
        if not any(note.get("round") == 2 for note in asked.values()):
            return reply
        notes = {name: note for name, note in payload.notes.items() if not name.startswith("counts.")}
        if message.metadata.dst_node_id == 100:
            notes["counts."] = {**payload.notes["counts."], "right": payload.notes["counts."]["seen"]}
        return Message(to_records(Payload(payload.tensors, notes)), reply_to=message)

    grid.tamper = praise
    serve(config, grid, RUN)
    rows = [{name: float(value) for name, value in row.items()} for row in contents("flower")["rows"]]
    assert rows[0]["test/acc/ink"] == 1
    assert math.isnan(rows[0]["test/acc"])
    assert math.isnan(rows[0]["test/acc_best"])
    assert rows[-1]["test/acc_best"] == max(row["test/acc"] for row in rows[1:]) < 1


def test_a_site_that_cannot_judge_has_trained_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("jdfl_lightning.federation.site.count", fail)
    config = write_config(experiment(rounds=2, supervision="base"))
    run_on_grid(config, RUN, sites=2)
    rows = contents("flower")["rows"]
    assert [(row["clients"], row["test/acc"]) for row in rows] == [("4.0", "nan")] * 2


def test_different_copies_of_a_data_set_are_refused(image_tree: Path, tmp_path: Path) -> None:
    shutil.copytree(image_tree, tmp_path / "other")
    Image.fromarray(np.zeros((16, 16, 3), dtype=np.uint8)).save(tmp_path / "other/bright/class0/0.png")
    run = experiment(data=ImageFolderDomains("nowhere", size=8, num_clients=4), supervision="base", rounds=1)
    config = write_config(run)
    grid = on_grid(config, RUN, sites=2)
    for node, root in ((100, image_tree), (101, tmp_path / "other")):
        grid.contexts[node].node_config["data-root"] = str(root)
    said: list[str] = []
    federation = Federation(FlowerTransport(grid), 60, 0.01, said.append)
    federation.meet()
    assert said[-1] == "node 101 cannot take part: its copy of the data set is not that of site 0."


def test_before_a_run_begins_a_site_may_come_back_as_another() -> None:
    transport = Silent()
    said: list[str] = []
    federation = Federation(transport, 0.2, 0.01, said.append)
    federation._gathering = 3
    federation.meet()
    assert set(federation.sites) == {0, 1}
    transport.present = {1}
    federation.meet()
    assert set(federation.sites) == {1}
    transport.present, transport.size = {0, 1}, 7
    federation.meet()
    assert federation.sites[0].sizes == [7]


def test_a_number_that_is_taken_is_refused() -> None:
    config = write_config(experiment(rounds=1, supervision="base"))
    grid = on_grid(config, RUN, sites=2)
    grid.contexts[101].node_config["partition-id"] = 0
    said: list[str] = []
    federation = Federation(FlowerTransport(grid), 60, 0.01, said.append)
    federation.meet()
    assert said[-1] == "node 101 cannot take part: site 0 is there already, as node 100: look at partition-id."


@pytest.mark.parametrize(
    "task", [{"client": "../../x"}, {"client": 3}, {"client": -1}, {"round": "x"}, {"weight": "heavy"}]
)
def test_a_server_that_asks_for_what_is_not_its_business(task: dict[str, Any], tmp_path: Path) -> None:
    """Nothing outside a site's own folder is touched, and no client that is not the site's."""
    config = write_config(experiment(rounds=1, supervision="base"))
    grid = on_grid(config, {}, sites=2)
    precious = tmp_path / "x-1.safetensors"
    precious.touch()
    worker = SiteWorker(arguments(config, {}, at_site=True), grid.contexts[100].node_config)
    weights, buffers = Workspace(worker.experiment).initial(1)
    payload = write_request(Request([FitTask(0, 1, 0, weights, buffers)]))
    settings = json.dumps(fixed_settings(as_dict(worker.experiment)))
    header = RequestHeader("0" * 32, 0, 0, worker.fingerprint, settings)
    good = Payload(payload.tensors, {**payload.notes, "header": vars(header)})
    assert isinstance(read_answer(worker.answer(good, print), [0]).results[0], FitResult)
    bad = Payload(good.tensors, {**good.notes, "task.0": {**good.notes["task.0"], **task}})
    with pytest.raises((InputError, ValueError)):
        worker.answer(bad, print)
    assert precious.exists()


def test_other_images_at_a_site_are_refused(roots: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that restarts with another folder is not the one that began."""
    config = write_config(own_folders(None, supervision="base", rounds=2))
    grid = own_grid(config, roots)

    def swap(message: Message, reply: Message) -> Message:
        if any(name.startswith("note.task.2") for name in message.content):
            grid.contexts[6].node_config["data-root"] = roots[2]
        return reply

    grid.tamper = swap
    serve(config, grid, RUN)
    assert [row["clients"] for row in contents("flower")["rows"]] == ["4.0", "3.0"]


def test_more_clients_than_expected(roots: list[str]) -> None:
    config = write_config(own_folders(None, data=SiteFolders(None, size=8, num_clients=3), num_domains=2))
    with pytest.raises(InputError, match=r"--data\.num_clients to be 4, the clients of all sites, but got 3"):
        serve(config, own_grid(config, roots), RUN)
    assert not Path("flower").exists()


KEYS = {0: "ecdsa-sha2-nistp384 AAAA0", 1: "ecdsa-sha2-nistp384 AAAA1"}


class Silent(Transport):
    """Sites that are there and answer when they are told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Payload]] = []
        self.answers: dict[str, Payload | str] = {}
        self.present = {0, 1}
        self.size = 5

    def nodes(self) -> dict[int, str]:
        return {node: KEYS.get(node, "") for node in self.present}

    def send(self, payloads: Mapping[int, Payload], question: bool, seconds: float) -> dict[int, str]:
        ids = {}
        for node, payload in payloads.items():
            ids[node] = str(len(self.sent))
            self.sent.append((node, payload))
            if question:
                info = SiteInfo(node, True, [0], [self.size], ["a"], [f"site{node}"], [4], "ff", "1")
                self.answers[ids[node]] = write_info(info)
        return ids

    def receive(self, ids: Any) -> dict[str, Payload | str]:
        return {payload: self.answers.pop(payload) for payload in ids if payload in self.answers}


def make_runner(transport: Silent, **settings: Any) -> tuple[SitesRunner, list[str]]:
    said: list[str] = []
    federation = Federation(transport, 0.2, 0.01, said.append)
    federation.gather(2)
    return SitesRunner(experiment(**settings), federation, "0" * 32, max_weight=10.0), said


def test_a_site_that_is_late_is_absent_and_left_alone_until_it_answers() -> None:
    transport = Silent()
    runner, _ = make_runner(transport)
    tasks = [FitTask(client, 1, 0, {}) for client in range(2)]
    transport.answers["2"] = write_answer(Answer([FitResult(0, 1, 1)]))
    good, late = runner.fit(tasks)
    assert isinstance(good, FitResult)
    assert late == FitFailure(1, "its site did not answer within 0.2 s")
    transport.answers["4"] = write_answer(Answer([FitResult(0, 1, 1)]))
    assert list(runner.fit(tasks))[1] == FitFailure(1, "its site, 1, is not there or still at an earlier task")
    assert [node for node, _ in transport.sent] == [0, 1, 0, 1, 0]
    transport.answers |= {"3": write_answer(Answer([FitResult(1, 9, 9)]))}  # that of the round before: nobody wants it
    transport.answers |= {
        "5": write_answer(Answer([FitResult(0, 1, 1)])),
        "6": write_answer(Answer([FitResult(1, 2, 2)])),
    }
    assert [result.num_steps for result in runner.fit(tasks) if isinstance(result, FitResult)] == [1, 2]


def test_a_site_that_comes_after_the_beginning_is_told() -> None:
    transport = Silent()
    runner, said = make_runner(transport)
    transport.present = {0, 1, 2}
    transport.answers |= {"3": write_answer(Answer([FitResult(0, 1, 1)]))}
    assert isinstance(next(iter(runner.fit([FitTask(0, 1, 0, {})]))), FitResult)
    assert said[-1] == "node 2 cannot take part: site 2 comes too late: the run has begun without it."


def test_a_round_waits_for_sites_to_come_back() -> None:
    transport = Silent()
    runner, said = make_runner(transport)
    transport.present = set()
    gone = list(runner.fit([FitTask(0, 1, 0, {})]))
    assert isinstance(gone[0], FitFailure)
    assert said[-1] == "waiting for sites to come back: too few of this round's are there"
    assert len(transport.sent) == 2


def test_models_are_judged_with_the_next_rounds_tasks() -> None:
    transport = Silent()
    runner, said = make_runner(transport)
    told: list[Evaluation] = []
    weights: dict[str, torch.Tensor] = {"w": torch.ones(1)}
    runner.evaluate({"": weights}, {}, told.append)
    assert len(transport.sent) == 2
    transport.answers["2"] = write_answer(Answer([FitResult(0, 1, 1)], {"": {"site0": (3, 4)}}, 0.5))
    transport.answers["3"] = write_answer(Answer([], {"": {"site1": (1, 4)}}, 0.7))
    assert len(list(runner.fit([FitTask(0, 2, 0, weights)]))) == 1
    assert not told
    runner._experiment.data.domain_names = ("site0", "site1")
    runner.finish()
    assert told == [Evaluation({"": Scores(0.5, {"site0": 0.75, "site1": 0.25})}, 0.7)]
    # nobody takes them along: they are sent alone, and a site that does not answer has no say
    runner.evaluate({"": weights}, {}, told.append)
    transport.answers["5"] = write_answer(Answer([], {"": {"site1": (2, 4)}}, 0.1))
    runner.finish()
    scores = told[1].scores[""]
    assert scores.domains["site1"] == 0.5
    assert all(map(math.isnan, (scores.overall, scores.worst, scores.domains["site0"])))  # of one site: not comparable
    assert said[-1].startswith("1 of 2 sites evaluated the model")
    assert "site 0 did not evaluate the model: its site did not answer within 0.2 s" in said


class Broken(SCAFFOLD):
    """SCAFFOLD that fails at every client."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason

    def local(self, task: FitTask, state: Any) -> Any:
        raise KeyError(self.reason)


@pytest.mark.parametrize("reason", ["no luck", "/data/jane.png", "jane.png", "C:jane", "jane\u2215doe.png"])
def test_of_an_exception_at_a_site_the_kind_alone_is_told(reason: str) -> None:
    config = write_config(experiment(rounds=1, supervision="base", algorithm=Broken(reason)))
    with pytest.raises(
        InputError, match=r"3 attempts were void. Client \d: KeyError, of which the log of the site has"
    ):
        run_on_grid(config, RUN, sites=1)


def test_names_of_images_do_not_leave_a_site(roots: list[str]) -> None:
    Path(roots[1], "class0", "jane.png").write_bytes(b"no image")
    config = write_config(own_folders(None, supervision="base"))
    grid = own_grid(config, roots)
    replies: list[str] = []

    def listen(message: Message, reply: Message) -> Message:
        replies.append(str(reply.content))
        if message.metadata.dst_node_id == 6:  # its operator mends it
            Path(roots[1], "class0", "jane.png").unlink(missing_ok=True)
        return reply

    grid.tamper = listen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "_AGAIN", 0.1)
        serve(config, grid, RUN)
    assert "InputError, of which the log of the site has more" in "".join(replies)
    assert not any("jane" in reply for reply in replies)


def test_a_server_that_names_its_run_strangely() -> None:
    config = write_config(experiment(rounds=1, supervision="base"))
    Path("run").mkdir()
    grid = on_grid(config, {}, sites=1)
    app = make_client_app(config)
    payload = write_request(Request())
    header = {"run": "../../etc", "site": 0, "first": 0, "fingerprint": "x", "settings": "{}"}
    message = Message(to_records(Payload({}, {**payload.notes, "header": header})), 100, "train")
    message.metadata.__dict__["_message_id"] = "1"
    answer = from_records(app(message, grid.contexts[100]).content)
    assert "32 hexadecimal digits" in answer.notes["error"]["reason"]


def test_only_a_server_can_use_sites() -> None:
    with pytest.raises(InputError, match=r"docs/flower\.md"):
        fit(experiment(supervision="base", backend=SitesBackend(), run_dir="run"))
    assert not Path("run").exists()
    wrong: dict[str, Any] = {"timeout": 0.0, "poll": 0.0, "max_weight": 0.5}
    for option, value in wrong.items():
        with pytest.raises(InputError, match=f"--backend.{option}"):
            SitesBackend(**{option: value})


def test_a_copy_of_a_data_set_at_every_site(image_tree: Path) -> None:
    """Each site says where its copy is; the digits, which are no folder, take no notice."""
    run = experiment(data=ImageFolderDomains(str(image_tree), size=8, num_clients=4), supervision="base")
    fit(replace(run, run_dir="local"))
    config = write_config(replace(run, data=ImageFolderDomains("nowhere", size=8, num_clients=4)))
    grid = on_grid(config, RUN, sites=2)
    for context in grid.contexts.values():
        context.node_config["data-root"] = str(image_tree)
    serve(config, grid, RUN)
    assert contents("local")["rows"] == contents("flower")["rows"]
    config = write_config(experiment(rounds=1, supervision="base"))
    grid = on_grid(config, {"run_dir": "digits"}, sites=1)
    grid.contexts[100].node_config["data-root"] = "nowhere"
    serve(config, grid, {"run_dir": "digits"})


def test_text_from_a_site_is_one_line_of_printable_letters() -> None:
    """Whatever a site writes where a reason is expected, a terminal and a log show it as what it is."""
    evil = "fine\x1b[2J\x1b[31m\nround 3: all is well\r\u202e\x07" + "x" * 5000
    payload = Payload({}, {"failure.0": {"reason": evil}, "evaluated": {"seconds": 0.0}})
    (failure,) = read_answer(payload, [0]).results
    assert isinstance(failure, FitFailure)
    assert failure.reason.isprintable()
    assert failure.reason.startswith("fine [2J [31m round 3")
    assert len(failure.reason) <= 300
    transport = Silent()
    runner, said = make_runner(transport)
    transport.answers |= {"2": evil, "3": Payload({}, {"evaluated": {"seconds": 0.0, evil: 1}})}
    told = list(runner.fit([FitTask(client, 1, 0, {}) for client in range(2)]))
    assert all(isinstance(each, FitFailure) and each.reason.isprintable() and len(each.reason) < 400 for each in told)
    transport.present = {0, 1, 2}
    runner._federation.meet()
    transport.answers["4"] = evil
    runner._federation.meet()
    assert all(line.isprintable() and len(line) < 400 for line in said)


NOTES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=4)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


def read_or_why(read: Callable[[], Any]) -> Any:
    """What was read, or the line that says why not."""
    try:
        return read()
    except InputError as error:
        return str(error)


@given(st.data())
def test_payloads_with_anything_in_them_are_read_or_refused(data: st.DataObject) -> None:
    """One entry of an honest payload is replaced: what is read has the right types, else an `InputError`."""
    info = SiteInfo(1, True, [0, 1], [10, 12], ["a", "b"], ["site1"], [7], "ff", "1")
    note = {**write_info(info).notes["info"], data.draw(st.sampled_from(sorted(vars(info)))): data.draw(NOTES)}
    found = read_or_why(lambda: read_info(Payload(notes={"info": note})))
    if isinstance(found, str):
        assert found.isprintable()
    else:
        assert all(type(size) is int and 0 < size < 2**31 for size in found.sizes)
        assert all(type(name) is str and name.isprintable() and len(name) <= 200 for name in found.classes)
    result = FitResult(0, 10, 3, 0.1, {"w": torch.ones(1)}, {}, {"c": {"w": torch.ones(1)}}, {"train/loss": 1.0})
    payload = write_answer(Answer([result], {"": {"site1": (1, 2)}}))
    name = data.draw(st.sampled_from(sorted(payload.notes)))
    entry = data.draw(st.sampled_from(sorted(payload.notes[name])))
    notes = {**payload.notes, name: {**payload.notes[name], entry: data.draw(NOTES)}}
    answer = read_or_why(lambda: read_answer(Payload(payload.tensors, notes), [0], [""], ["train/loss"]))
    if isinstance(answer, str):
        assert answer.isprintable()
    else:
        (back,) = answer.results
        assert all(type(value) is float and math.isfinite(value) for value in back.metrics.values())
        assert type(back.num_examples) is int
        assert 0 <= answer.seconds < 2**31
        assert all(0 <= right <= seen < 2**31 for pairs in answer.counts.values() for right, seen in pairs.values())


def test_a_client_tells_its_own_metrics_and_not_many() -> None:
    result = FitResult(0, 10, 3, metrics={"train/loss": 1.0, "norm/client/c": math.inf, "norm/client/h": 1.0, "x": 1.0})
    (back,) = read_answer(write_answer(Answer([result])), [0], metrics=["train/loss", "norm/client/c"]).results
    assert isinstance(back, FitResult)
    assert back.metrics == {"train/loss": 1.0}
    many = FitResult(0, 10, 3, metrics={f"norm/client/x{n}": 1.0 for n in range(17)})
    with pytest.raises(InputError, match="more than 16 metrics"):
        read_answer(write_answer(Answer([many])), [0])


# ------------------------------------------------------------------------------------------------------- the roster


def write_roster(text: str) -> str:
    Path("roster.yaml").write_text(text)
    return "roster.yaml"


@pytest.mark.parametrize(
    ("roster", "refusal"),
    [
        ("1: {}", "node 0 cannot take part: site 0 is not on the roster."),
        ("0: {key: ecdsa-sha2-nistp384 AAAA1}\n1:", "node 0 cannot take part: site 0 has another key in the roster."),
        ("0: {images: 8}\n1:", "node 0 cannot take part: site 0 says that it has 9 images, the roster says 8."),
        ("0: {clients: 1, images: 9, key: ecdsa-sha2-nistp384 AAAA0 me@here}\n1: {}", None),
        ('{"0": {"key": "ecdsa-sha2-nistp384 AAAA0"}, "1": {"clients": 1}}', None),
    ],
)
def test_a_site_that_is_not_as_listed_is_refused(roster: str, refusal: str | None) -> None:
    """Site 0 has a client with 5 images to train on, and 4 to test on."""
    said: list[str] = []
    federation = Federation(Silent(), 0.2, 0.01, said.append, read_roster(write_roster(roster)))
    federation.meet()
    assert set(federation.sites) == ({0, 1} if refusal is None else {1})
    assert said[0] == refusal or refusal is None


def test_a_site_with_more_clients_than_listed_is_refused() -> None:
    info = SiteInfo(3, True, [0, 1], [5, 5], ["a"], ["site3"], [2], "ff", "1")
    assert Member(clients=2).reason_refused(info, "") is None
    assert Member(clients=1).reason_refused(info, "") == "site 3 says that it has 2 clients, the roster says 1."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no settings"),
        ("{}", "has none"),
        ("[1, 2]", "holds no settings"),
        ("{", "roster.yaml is not"),
        ("a: {}", "a.*integer"),
        ("true: {}", "true.*integer"),
        ("-1: {}", "-1.*greater than or equal to 0"),
        ("0: 5", "0: .*object"),
        ("0: {picture: 5}", "0.picture: Unexpected keyword"),
        ("0: {images: many}", "0.images: .*integer"),
        ("0: {clients: 0}", "0.clients: .*greater than or equal to 1"),
        ("0: {key: site0.key.pub}", "0.key: .*pattern"),
    ],
)
def test_a_roster_that_cannot_be_used(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_roster(write_roster(text))
    with pytest.raises(InputError, match=r"nowhere\.yaml"):
        read_roster("nowhere.yaml")


def test_flower_tells_the_keys_that_nodes_have_proved() -> None:
    """A node's key comes from Flower as PEM; the roster has it as `ssh-keygen` wrote it."""
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    line = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    config = write_config(experiment(rounds=1, supervision="base"))

    class Known(FakeGrid):
        def get_nodes(self) -> list[NodeInfo]:
            keys = {100: pem, 101: b"none"}
            return [NodeInfo(node_id=node, public_key=keys[node]) for node in self.get_node_ids()]

    grid = Known(config, on_grid(config, RUN, sites=2).contexts_config(), RUN)
    assert FlowerTransport(grid).nodes() == {100: line, 101: ""}
    said: list[str] = []
    roster = read_roster(write_roster(f"0: {{key: {line} of site 0}}\n1: {{key: {line}}}"))
    Federation(FlowerTransport(grid), 60, 0.01, said.append, roster).meet()
    assert said[0].startswith("site 0: 2 clients")
    assert said[1] == "node 101 cannot take part: site 1 has another key in the roster."


class Boastful(FakeGrid):
    """Sites of which the last says that it has as many images as can be said."""

    def __init__(self, config: str, sites: int) -> None:
        super().__init__(config, on_grid(config, RUN, sites).contexts_config(), RUN)
        self.tamper = self.boast

    def boast(self, message: Message, reply: Message) -> Message:
        payload = from_records(reply.content)
        if message.metadata.dst_node_id != max(self.contexts) or "info" not in payload.notes:
            return reply
        info = {**payload.notes["info"], "sizes": [2**31 - 1] * len(payload.notes["info"]["sizes"])}
        return Message(to_records(Payload({}, {**payload.notes, "info": info})), reply_to=message)


def test_a_site_that_claims_all_images_counts_for_ten_clients(capsys: pytest.CaptureFixture[str]) -> None:
    """FedAvg of 4 clients: the boaster's weight is 10 times the median's, and the others are still heard."""
    run = experiment(rounds=1, supervision="base")
    config = write_config(run)
    serve(config, Boastful(config, 4), RUN)
    said = " ".join(capsys.readouterr().out.split())
    median = sorted(run.data.client_sizes)[1]
    assert f"client 3 of site 3 says it has 2147483647 images and counts for {10 * median}, 10 times" in said
    Path("backend.yaml").write_text(f"backend:\n  class_path: {SitesBackend.__module__}.SitesBackend\n")
    roster = {"run_dir": "listed", "backend.roster": write_roster("{0: , 1: , 2: , 3: {images: 2000}}")}
    Path(config).write_text(Path(config).read_text() + Path("backend.yaml").read_text())
    grid, refused = Boastful(config, 4), []

    def mend(message: Message, reply: Message) -> Message:
        refused.append(message.metadata.dst_node_id)
        return reply if refused.count(103) > 1 else grid.boast(message, reply)

    grid.tamper = mend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "_AGAIN", 0.1)
        serve(config, grid, roster)
    assert "site 3 says that it has 2147483" in " ".join(capsys.readouterr().out.split())
    fit(replace(run, run_dir="local"))
    assert contents("local")["last.safetensors"] == contents("listed")["last.safetensors"]
    assert contents("local")["last.safetensors"] != contents("flower")["last.safetensors"]


def test_a_site_judges_by_the_images_that_it_said_it_holds_out() -> None:
    transport = Silent()
    runner, said = make_runner(transport)
    told: list[Evaluation] = []
    runner.evaluate({"": {"w": torch.ones(1)}}, {}, told.append)
    transport.answers["2"] = write_answer(Answer([], {"": {"site0": (3000, 3000)}}))
    transport.answers["3"] = write_answer(Answer([], {"": {"site1": (1, 4)}}))
    runner._experiment.data.domain_names = ("site0", "site1")
    runner.finish()
    assert math.isnan(told[0].scores[""].overall)
    assert told[0].scores[""].domains["site1"] == 0.25
    assert "site 0 evaluated a model by other images than it said: it does not count" in said


def test_a_site_that_claims_all_held_out_images_counts_for_ten_clients() -> None:
    """Two sites hold out 4 images, of which 1 is right; a third says 2,000,000, all right: they count as 40."""

    class Boasting(Silent):
        def send(self, payloads: Mapping[int, Payload], question: bool, seconds: float) -> dict[int, str]:
            ids = super().send(payloads, question, seconds)
            if question:
                info = SiteInfo(2, True, [0], [5], ["a"], ["site2"], [2_000_000], "ff", "1")
                self.answers[ids[2]] = write_info(info)
            return ids

    def evaluated(roster: dict[int, Member] | None) -> tuple[Scores, list[str]]:
        transport, said, told = Boasting(), list[str](), list[Evaluation]()
        transport.present = {0, 1, 2}
        federation = Federation(transport, 0.2, 0.01, said.append, roster)
        federation.gather(3)
        backend = SitesBackend()
        backend.federation = federation
        run = experiment(supervision="base")
        run.data.domain_names = ("site0", "site1", "site2")
        with backend.open(run, ClientStates(Path("clients"))) as runner:
            runner.evaluate({"": {"w": torch.ones(1)}}, {}, told.append)
            for site, counts in enumerate([(1, 4), (1, 4), (2_000_000, 2_000_000)]):
                transport.answers[str(3 + site)] = write_answer(Answer([], {"": {f"site{site}": counts}}))
            runner.finish()
        return told[0].scores[""], said

    scores, said = evaluated(None)
    assert scores.overall == pytest.approx(42 / 48)
    assert scores.domains == {"site0": 0.25, "site1": 0.25, "site2": 1.0}
    assert any(
        line.startswith("site 2 says it holds out 2000000 images and they count for 40, 10 times") for line in said
    )
    scores, said = evaluated({0: Member(), 1: Member(), 2: Member(images=2_000_005)})
    assert scores.overall == pytest.approx(2_000_002 / 2_000_008)
    assert not any("holds out" in line for line in said)


def test_a_site_cannot_change_what_it_said_when_a_run_is_continued() -> None:
    config = write_config(experiment(rounds=2, supervision="base"))
    run_on_grid(config, RUN | {"rounds": 1}, sites=4)
    with pytest.raises(InputError, match="images"):
        serve(config, Boastful(config, 4), {"resume": "flower"})


def shorten(payload: Payload) -> Payload:
    """Send shorter update vectors, and weights of another shape."""
    return Payload(
        {group: {n: t.reshape(-1)[:3] for n, t in named.items()} for group, named in payload.tensors.items()},
        payload.notes,
    )


def boast(payload: Payload) -> Payload:
    """Claim more right images than there are."""
    notes = {
        n: {**note, "right": [10**9] * len(note["right"])} if n.startswith("counts.") else note
        for n, note in payload.notes.items()
    }
    return Payload(payload.tensors, notes)


def tell_metrics(payload: Payload) -> Payload:
    """Tell metrics that are not its business, and such as are no numbers."""
    lies = {"test/acc": 1.0, "clients": 99.0, "train/loss": math.inf, "norm/client/c": math.nan, "norm/client/x": 1.0}
    notes = {n: {**note, **lies} if n.endswith(".metrics") else note for n, note in payload.notes.items()}
    return Payload(payload.tensors, notes)


LIES: dict[str, Callable[[Payload], Payload]] = {
    "shorter": shorten,
    "no tensors": lambda payload: Payload({}, payload.notes),
    "no notes": lambda payload: Payload(payload.tensors, {}),
    "nothing": lambda payload: Payload(),
    "boast": boast,
    "metrics": tell_metrics,
    "other types": lambda payload: Payload(
        {group: {n: t.half() for n, t in named.items()} for group, named in payload.tensors.items()}, payload.notes
    ),
    "long": lambda payload: Payload(
        {g: {n: t * (9 if "upload.update" in g else 1) for n, t in ts.items()} for g, ts in payload.tensors.items()},
        payload.notes,
    ),
    "complex": lambda payload: Payload(
        {g: {n: t.to(torch.complex64) for n, t in named.items()} for g, named in payload.tensors.items()}, payload.notes
    ),
    "integers": lambda payload: Payload(
        {g: {n: t.long() if ".upload." in g else t for n, t in named.items()} for g, named in payload.tensors.items()},
        payload.notes,
    ),
    "texts": lambda payload: Payload({}, {name: {"x": "y"} for name in payload.notes}),
}


@pytest.mark.parametrize("lie", every(3, LIES))
def test_a_site_that_lies_does_no_harm(lie: str) -> None:
    """What its answers cannot be used for, they are not; nobody else notices."""
    run = experiment(algorithm=SCAFFOLD(), rounds=2, supervision="graded", num_domains=2)
    config = write_config(run)
    grid = on_grid(config, RUN, sites=4)

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.dst_node_id != 102 or not len(message.content):
            return reply
        return Message(to_records(LIES[lie](from_records(reply.content))), reply_to=message)

    grid.tamper = tamper
    serve(config, grid, RUN)
    rows = contents("flower")["rows"]
    expected = {
        "metrics": ["4.0", "4.0"],
        "long": ["4.0", "4.0"],
        "boast": ["4.0", "3.0"],
    }  # counts come with the second round's answer
    assert [row["clients"] for row in rows] == expected.get(lie, ["3.0", "3.0"])
    honest = lie not in ("boast", "no notes", "nothing", "texts")  # its counts are; else not all have evaluated
    assert all(math.isnan(float(row["test/acc"])) != honest for row in rows[: 2 - (lie == "boast")])
    assert not any(float(row["test/acc"]) >= 1 for row in rows)
    assert {name for row in rows for name in row if name.startswith("norm/client/")} == {"norm/client/c"}
    assert all(math.isfinite(float(row[name])) for row in rows for name in ("train/loss", "norm/client/c"))
