"""Weights & Biases in real offline runs, whose files are read back."""

from __future__ import annotations

import csv
import struct
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml

from helpers import Lines, experiment, until
from jdfl_lightning import fit
from jdfl_lightning.config import as_dict, parse_experiment
from jdfl_lightning.core.errors import InputError, Note
from jdfl_lightning.storage.folder import read_run
from jdfl_lightning.ui.loggers import CSVLogger, TensorBoardLogger, WandbRounds

messages: Any = import_module("wandb.proto.wandb_internal_pb2")
_BLOCK = 32768


def records(file: Path) -> Iterator[Any]:
    """Read W&B's transaction log: LevelDB's log format behind a header of 7 bytes, a protobuf in each record."""
    content = file.read_bytes()
    assert content.startswith(b":W&B")
    position, parts = 7, b""
    while position + 7 <= len(content):
        if _BLOCK - position % _BLOCK < 7:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        if position + 7 + length > len(content):  # it is still being written
            return
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = messages.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def read_offline(folder: Path) -> dict[str, Any]:
    """Return history, metric definitions, config and name of the one offline run in a folder.

    W&B's service writes the log: a run that is finished has told it so, and does not wait until it has. A process waits
    at its end, and so does this.
    """
    wandb.teardown()
    (file,) = folder.rglob("*.wandb")
    until(lambda: any(record.WhichOneof("record_type") == "exit" for record in records(file)))  # another process writes
    found: dict[str, Any] = {"history": [], "metrics": {}, "config": {}, "images": set()}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row = {"/".join(i.nested_key) or i.key: yaml.safe_load(i.value_json) for i in record.history.item}
            found["history"].append(row)
            found["images"] |= {key.split("/")[0] for key in row if key.endswith("/filenames")}
        elif kind == "metric":
            metric = record.metric
            found["metrics"][metric.name or metric.glob_name] = metric.step_metric
        elif kind == "run":
            found["name"], found["group"], found["project"] = (
                record.run.display_name,
                record.run.run_group,
                record.run.project,
            )
        elif kind == "config":
            items = record.config.update
            found["config"] |= {"/".join(i.nested_key) or i.key: yaml.safe_load(i.value_json) for i in items}
    return found


@pytest.mark.slow
def test_curves_of_an_offline_run() -> None:
    run = experiment(run_dir="run", logger=WandbRounds(project="tests", group="digits"), rounds=3)
    rows = read_run(fit(run).folder).rows
    found = read_offline(Path("run"))
    curves = [row for row in found["history"] if "test/acc" in row]
    assert [row["round"] for row in curves] == [1, 2, 3]
    wanted = {"test/acc", "test/acc_best", "test/acc_worst", "test/acc/ink", "train/loss", "bytes/up", "time/fit"}
    wanted |= {"clients"}  # a number of every round, and no table at the end
    for logged, row in zip(curves, rows, strict=True):
        assert wanted <= set(logged)
        for name in wanted:
            assert logged[name] == pytest.approx(row[name])
    assert found["metrics"]["*"] == "round"
    assert (found["project"], found["group"]) == ("tests", "digits")
    assert found["name"] == "digitsdomains-fedavg-random-seed0"
    assert found["config"]["rounds"] == 3
    assert found["config"]["data"] == as_dict(run)["data"]
    assert found["images"] == {"discovery", "curves", "confusion"}
    assert not [row for row in found["history"] if "clients/nrows" in row]
    (table,) = [row for row in found["history"] if any(key.startswith("final/clients/") for key in row)]
    assert (table["final/clients/nrows"], table["final/clients/ncols"]) == (4, 7)


@pytest.mark.slow
@pytest.mark.parametrize("account", [False, True])
def test_goes_on_offline_and_says_how_to_sync(account: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without an account; and with one, but a server that nobody answers for."""
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    if account:
        (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login user password {'a' * 40}\n")
        (tmp_path / "netrc").chmod(0o600)
    wandb.teardown()
    try:
        with pytest.warns(Note, match="later: wandb sync .*offline-run") as notes:
            fit(experiment(run_dir="run", logger=True, rounds=1, supervision="base"))
    finally:
        wandb.teardown()
    reason = "cannot be reached" if account else "no account"
    assert reason in str(notes[0].message)
    assert "\n" not in str(notes[0].message)
    assert len([row for row in read_offline(Path("run"))["history"] if "test/acc" in row]) == 1


def test_a_csv_logger_logs_into_the_folder_of_each_run() -> None:
    """Without arguments; the run's own metrics.csv stays what it is, and the logger can be used again."""
    logger = CSVLogger()
    for name in ("one", "two"):
        run = fit(experiment(run_dir=name, logger=logger, supervision="base"))
        with Path(f"{name}/csv/version_0/metrics.csv").open() as file:
            logged = [(int(row["step"]), float(row["test/acc"])) for row in csv.DictReader(file) if row["test/acc"]]
        assert logged == [(row["round"], row["test/acc"]) for row in run.rows]
        assert yaml.safe_load(Path(f"{name}/config.yaml").read_text())["logger"]["init_args"]["save_dir"] == ""
    fit(experiment(resume="one", rounds=3, logger=logger, supervision="base"))
    assert sorted(path.name for path in Path("one/csv").iterdir()) == ["version_0", "version_1"]
    fit(experiment(run_dir="three", rounds=1, logger=CSVLogger("logs", "mine", "first"), supervision="base"))
    assert Path("logs/mine/first/metrics.csv").is_file()


def test_tensorboard_logs_into_the_folder_of_the_run() -> None:
    pytest.importorskip("tensorboardX" if find_spec("tensorboardX") else "tensorboard")
    fit(experiment(run_dir="run", rounds=1, logger=TensorBoardLogger(), supervision="base"))
    assert list(Path("run/tensorboard/version_0").glob("events.*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["CSVLoger"], "one of WandbRounds, .*CSVLogger, .*but got 'CSVLoger'. Did you mean 'CSVLogger'"),
        (["3"], "true, false, one of .* but got '3'"),
        (["CSVLogger", "--logger.nme", "x"], "option of CSVLogger but it has no --logger.nme"),
        (["lightning.pytorch.loggers.CSVLogger"], "Expected --logger.save_dir to be given"),
        (["nothing.Here"], "No module named 'nothing'"),
    ],
)
def test_a_logger_that_cannot_be_used(arguments: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        parse_experiment("fit", ["--logger", *arguments])
    assert "\n" not in str(error.value)


def test_a_logger_of_the_command_line_needs_no_more_than_its_name() -> None:
    Path("mine.yaml").write_text("logger: {class_path: CSVLogger, init_args: {name: mine}}")
    for arguments, name in ((["--logger", "CSVLogger"], "csv"), (["--config", "mine.yaml"], "mine")):
        logger = parse_experiment("fit", arguments).logger
        assert isinstance(logger, CSVLogger)
        assert logger.name == name


@pytest.mark.slow
def test_the_address_of_an_online_run_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B itself is not asked: a run of its client that says what an online one would say."""
    offline = wandb.init

    def init(**settings: Any) -> Any:
        assert settings["mode"] == "online"
        run = offline(**settings | {"mode": "offline"})
        monkeypatch.setattr(type(run), "url", "https://wandb.test/me/runs/1")
        return run

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb, "init", init)
    lines = Lines()
    fit(experiment(run_dir="run", rounds=1, logger=True, supervision="base"), lines)
    assert lines.said[:2] == ["run folder: run", "Weights & Biases: https://wandb.test/me/runs/1"]


@pytest.mark.slow
def test_a_failed_run_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = WandbRounds()

    def fail(*_: object) -> None:
        raise RuntimeError("the power is out")

    monkeypatch.setattr("jdfl_lightning.server.run.Rounds.run", fail)
    with pytest.raises(RuntimeError, match="power"):
        fit(experiment(run_dir="run", logger=logger, supervision="base"))
    assert logger.version is None
    assert wandb.run is None
