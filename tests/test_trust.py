"""What a run folder from somebody else can do, and what it cannot."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from helpers import Lines, contents, experiment, finished
from jdfl_lightning import SCAFFOLD, FedAvg, LocalBackend, PoolBackend, fit
from jdfl_lightning.cli import BAD_INPUT, main
from jdfl_lightning.clustering.clusters import cluster
from jdfl_lightning.clustering.updates import Updates
from jdfl_lightning.config import Checkpointing, Experiment, as_dict
from jdfl_lightning.core.errors import InputError, StorageError
from jdfl_lightning.core.files import parse_settings, read_json
from jdfl_lightning.core.tensors import Record, Tensors
from jdfl_lightning.server.resume import fixed_settings
from jdfl_lightning.storage.checkpoint import ClientStates, read_header
from jdfl_lightning.storage.details import read_findings, read_stop
from jdfl_lightning.storage.discoveries import digest_discovery, read_discovery, save_discovery
from jdfl_lightning.storage.metrics import digest_metrics, last_round
from jdfl_lightning.storage.records import load_record, save_record
from jdfl_lightning.storage.trust import PACKAGES, known_backbone, own_settings, saved_settings, settings_to_use, sign
from jdfl_lightning.storage.weights import load_model


@pytest.fixture
def own_run() -> Path:
    return finished("run", supervision="base", rounds=1, backbone="PaperCNN").folder


def from_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **settings: Any) -> None:
    """Have a run folder been made by another user, with some settings of theirs."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(config | settings))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another user"))


def change_header(file: Path, **values: Any) -> None:
    record, about = load_record(file)
    save_record(file, record, about | values)


def augmented(augment: Any) -> dict[str, Any]:
    """The settings of images with transforms."""
    return {
        "class_path": "jdfl_lightning.DigitsDomains",
        "init_args": {"size": 8, "num_clients": 4, "augment": augment},
    }


def bomb(tmp_path: Path) -> tuple[Path, Path]:
    """A module that leaves a mark when it is imported, and the mark."""
    (tmp_path / "bomb.py").write_text(
        "from pathlib import Path\n"
        "from jdfl_lightning import FedAvg\n"
        f"Path({str(tmp_path / 'mark')!r}).touch()\n"
        "class Boom(FedAvg): pass\n"
    )
    sys.modules.pop("bomb", None)
    return tmp_path / "bomb.py", tmp_path / "mark"


@pytest.mark.parametrize("trust", [False, True])
def test_metadata_of_weights_runs_nothing(
    own_run: Path, image_tree: Path, tmp_path: Path, trust: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The size is not a number, whoever trusts it; and os.system is nobody's backbone unless trusted."""
    mark = tmp_path / "mark"
    change_header(own_run / "best.safetensors", backbone="os.system", size=f"touch {mark}")
    assert main(["predict", "--run", str(own_run), str(image_tree), "--trust", str(trust).lower()]) == BAD_INPUT
    assert "size" in capsys.readouterr().err
    change_header(own_run / "best.safetensors", size=8)
    if not trust:
        assert main(["predict", "--run", str(own_run), str(image_tree)]) == BAD_INPUT
        error = capsys.readouterr().err
        assert "os.system" in error
        assert "--trust true" in error
        assert error.count("\n") == 1
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backbone", ["PaperCNN"]),
        ("backbone", "x" * 1000),
        ("size", -8),
        ("size", 8.5),
        ("class_names", "0123456789"),
        ("class_names", []),
        ("class_names", [1, 2]),
        ("score", "min"),
        ("round", "1"),
    ],
)
def test_metadata_of_weights_has_a_form(own_run: Path, name: str, value: Any) -> None:
    change_header(own_run / "last.safetensors", **{name: value})
    with pytest.raises(InputError, match=rf"last\.safetensors is something else: {name}"):
        load_model(own_run, "last")


def test_weights_that_do_not_fit_their_network(own_run: Path, image_tree: Path) -> None:
    record, about = load_record(own_run / "best.safetensors")
    for weights in ({}, {"head.weight": torch.zeros(7, 128), "head.bias": torch.zeros(7)}):
        save_record(own_run / "best.safetensors", record | {"weights": record["weights"] | weights}, about)
        if not weights:
            save_record(own_run / "best.safetensors", {"weights": {}}, about)
        assert main(["predict", "--run", str(own_run), str(image_tree)]) == BAD_INPUT


@pytest.mark.parametrize("command", ["test", "resume"])
def test_settings_from_elsewhere_import_nothing_unknown(
    own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, mark = bomb(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    from_elsewhere(own_run, monkeypatch, tmp_path, algorithm={"class_path": "bomb.Boom"})
    line = ["test", "--run", str(own_run)] if command == "test" else ["fit", "--resume", str(own_run)]
    assert main(line) == BAD_INPUT
    error = capsys.readouterr().err
    assert "bomb.Boom" in error
    assert "--trust true" in error
    assert error.count("\n") == 1
    assert not mark.exists()
    main([*line, "--trust", "true"])
    assert mark.exists()
    sys.modules.pop("bomb", None)


@pytest.mark.parametrize(
    "settings",
    [
        {"backbone": "jdfl_lightning.cli.main"},
        {"backbone": "torchvision.io.write_file"},
        {"backbone": "torchvision/models"},
        {"data": {"class_path": "jdfl_lightning.DigitsDomains", "init_args": {"size": {"class_path": "os.system"}}}},
        {"trainer": {"callbacks": [{"class_path": "timm2.Callback"}]}},
        {"data": {"class_path": ["os"]}},
        {"data": augmented(["bomb.Boom"])},
        {"data": augmented(["RandAugment", "{class_path: bomb.Boom}"])},
        {"data": augmented([{"class_path": "bomb.Boom"}])},
        {
            "data": augmented(
                [{"class_path": "RandomApply", "init_args": {"transforms": [{"class_path": "bomb.Boom"}]}}]
            )
        },
    ],
    ids=str,
)
def test_names_that_belong_to_no_known_package(
    own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    from_elsewhere(own_run, monkeypatch, tmp_path, **settings)
    with pytest.raises(InputError, match="--trust true"):
        settings_to_use(own_run, False, as_dict(Experiment()), ())
    assert settings_to_use(own_run, True, as_dict(Experiment()), ())


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "bomb.Boom"},
        {"algorithm": "more.yaml"},
        {"algorithm.class_path": "bomb.Boom"},
        {"algorithm.help": "bomb.Boom"},
        {"algorithm": {"class_path": "FedAvg", "dict_kwargs": {"class_path": "bomb.Boom"}}},
        {"algorithm": {"class_path": "jdfl_lightning.FedAvg", "init_args.weighting": "bomb.Boom"}},
        {"config": "more.yaml"},
        {"config": ["more.yaml"]},
        {"clustering": "more.yaml"},
        {"presets": {"FedAvg": {"help": "bomb.Boom"}}, "algorithm": {"class_path": "jdfl_lightning.FedAvg"}},
        {"backend": {"class_path": "bomb.Boom"}, "logger": {"class_path": "bomb.Boom"}},
        {"callbacks": ["bomb.Boom"]},
        {"callbacks": "bomb.Boom"},
        {"callbacks": "more.yaml"},
        {"callbacks": {"class_path": "bomb.Boom"}},
        {"callbacks": [{"class_path": "bomb.Boom"}]},
        {"callbacks": [{"class_path": "EarlyStopping", "dict_kwargs": {"class_path": "bomb.Boom"}}]},
        {"callbacks+": "bomb.Boom"},
        {"regularizers": ["bomb.Boom"]},
        {"optimizer": "bomb.Boom"},
        {"lr_scheduler": "bomb.Boom"},
        {"round_scheduler": "bomb.Boom"},
        {"model": "bomb.Boom"},
        {"supervision": "bomb.Boom"},
        {"clustering": {"criterion": "bomb.Boom"}},
        {7: "bomb.Boom"},
        {"data": augmented("[bomb.Boom]")},
        {"data": augmented("{class_path: bomb.Boom}")},
        {"data": augmented([{"class_path": "RandomApply", "init_args": "{transforms: [{class_path: bomb.Boom}]}"}])},
        {"data": {"class_path": "jdfl_lightning.DigitsDomains", "init_args": "{augment: [bomb.Boom]}"}},
    ],
    ids=str,
)
def test_settings_of_another_form_import_nothing(
    own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[Any, Any]
) -> None:
    """The parser reads dotted names, further files and options that ask for help; a run writes none of them."""
    _, mark = bomb(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("more.yaml").write_text("algorithm:\n  class_path: bomb.Boom\n")
    from_elsewhere(own_run, monkeypatch, tmp_path)
    config = yaml.safe_load((own_run / "config.yaml").read_text()) | settings
    (own_run / "config.yaml").write_text(yaml.safe_dump(config))
    main(["test", "--run", str(own_run)])
    main(["fit", "--resume", str(own_run), "--rounds", "2", "--backend", "LocalBackend"])
    assert not mark.exists()


def test_a_run_from_elsewhere_that_names_known_classes_needs_no_flag(
    own_run: Path, image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what says where to write, or whom to connect to, is not taken from it."""
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path / "theirs")}}
    backend = {"class_path": "jdfl_lightning.backends.ray.RayBackend", "init_args": {"address": "192.0.2.1:6379"}}
    from_elsewhere(own_run, monkeypatch, tmp_path, logger=logger, backend=backend)
    assert not own_settings(own_run)
    assert main(["test", "--run", str(own_run)]) == 0
    assert main(["predict", "--run", str(own_run), str(image_tree)]) == 0
    assert main(["fit", "--resume", str(own_run), "--rounds", "2", "--backend", "LocalBackend"]) == 0
    assert not (tmp_path / "theirs").exists()
    assert own_settings(own_run)  # it is this user's now, with settings that were looked at


def test_transforms_of_known_packages_need_no_flag(
    own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip = {"class_path": "torchvision.transforms.v2.RandomHorizontalFlip", "init_args": {"p": 0.1}}
    apply = {"class_path": "RandomApply", "init_args": {"transforms": [flip]}}
    for augment in (None, ["RandAugment", "torchvision.transforms.v2.RandomInvert", apply]):
        from_elsewhere(own_run, monkeypatch, tmp_path, data=augmented(augment))
        assert main(["test", "--run", str(own_run)]) == 0


def test_a_run_of_ones_own_may_name_anything(image_tree: Path) -> None:
    run = finished("run", supervision="base", rounds=1).folder  # helpers.tiny_net
    assert own_settings(run)
    assert main(["test", "--run", "run"]) == 0
    assert main(["predict", "--run", "run", str(image_tree)]) == 0
    secret = Path(os.environ["XDG_DATA_HOME"]) / "jdfl-lightning/trust.key"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "\n# edited\n")
    assert not own_settings(run)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_kill_while_the_secret_is_made_leaves_nothing_behind() -> None:
    folder = Path(os.environ["XDG_DATA_HOME"]) / "jdfl-lightning"
    pid = os.fork()
    if pid == 0:  # the file aside is written and not yet in place
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        sign(b"rounds: 1")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(list(folder.iterdir())) == 1
    sign(b"rounds: 1")
    assert [file.name for file in folder.iterdir()] == ["trust.key"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_all_processes_have_one_secret() -> None:
    """Eight that all find none at first: the signature of each is the one that stays right."""
    ready, go = os.pipe()
    children = []
    for number in range(8):
        if not (pid := os.fork()):
            os.close(go)
            os.read(ready, 1)  # until the other end is closed
            Path(f"{number}.txt").write_bytes(sign(b"rounds: 1"))
            os._exit(0)
        children.append(pid)
    os.close(go)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8
    assert {Path(f"{number}.txt").read_bytes() for number in range(8)} == {sign(b"rounds: 1")}


def test_where_no_secret_can_be_kept_nothing_is_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert not own_settings(fit(experiment(run_dir="run", supervision="base", rounds=1)).folder)


def test_known_names() -> None:
    assert PACKAGES == ("jdfl_lightning", "torchvision", "timm")
    assert not any(
        map(known_backbone, ("", "a b", "os.system", "timm.data.x", "torchvision.models.resnet18", 3, None, "x;y"))
    )


@pytest.mark.parametrize(
    "place", ["checkpoints", "clients", "config.yaml", "metrics.csv", "stopped.json", "checkpoints/1.safetensors"]
)
def test_links_in_a_run_folder_are_refused(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    finished("run", supervision="base", rounds=1, backbone="PaperCNN")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "7.safetensors").write_text("precious")
    victim = Path("run") / place
    if victim.exists():
        victim.rename(elsewhere / "own")
    victim.symlink_to(elsewhere / "own" if (elsewhere / "own").exists() else elsewhere)
    before = {file: file.read_bytes() for file in elsewhere.rglob("*") if file.is_file()}
    assert main(["fit", "--resume", "run", "--rounds", "2"]) == BAD_INPUT
    assert "is a link" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in elsewhere.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (["test", "--run", "run"], "metrics.csv"),
        (["test", "--run", "run"], "last.safetensors"),
        (["predict", "--run", "run", "."], "best.safetensors"),
        (["predict", "--run", "run", "."], "config.yaml"),
        (["report", "run"], "metrics.csv"),
        (["report", "run"], "checkpoints/1.safetensors"),
        (["fit", "--config", "own.yaml", "--discovery", "run"], "discovery.json"),
    ],
)
def test_commands_that_only_read_refuse_links_too(
    tmp_path: Path, command: list[str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finished("run", supervision="hard", rounds=1, backbone="PaperCNN")
    shutil.copy("run/config.yaml", "own.yaml")
    Path("run", place).rename(tmp_path / "own")
    Path("run", place).symlink_to(tmp_path / "own")
    assert main(command) == BAD_INPUT
    error = capsys.readouterr().err
    assert f"{Path('run', place)} is a link" in error
    assert error.count("\n") == 1
    assert not Path("report").exists()


def test_a_link_where_a_file_is_written_aside_is_not_followed(tmp_path: Path) -> None:
    finished("run", supervision="base", rounds=1)
    victim = tmp_path / "precious"
    victim.write_text("precious")
    for name in ("config.yaml", "metrics.csv", "last.safetensors"):  # names that were predictable once
        Path(f"run/checkpoints/.{name}.tmp").symlink_to(victim)
    Path("run/checkpoints/.1.safetensors.tmp").unlink(missing_ok=True)
    with pytest.raises(InputError, match="is a link"):
        fit(experiment(resume="run", supervision="base", rounds=2))
    assert victim.read_text() == "precious"


def test_only_files_of_its_own_names_are_removed() -> None:
    finished("run", supervision="base", rounds=1)
    strange = [Path("run/checkpoints/notes.txt"), Path("run/checkpoints/7.safetensors.bak"), Path("run/clients/x.txt")]
    Path("run/clients").mkdir(exist_ok=True)
    for file in strange:
        file.write_text("precious")
    left_by_a_kill = Path("run/checkpoints/.1.safetensors.0123456789abcdef.tmp")
    left_by_a_kill.touch()
    fit(experiment(resume="run", supervision="base", rounds=2))
    assert all(file.exists() for file in strange)
    assert not left_by_a_kill.exists()


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 10)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    "text", [ALIASES, "a: " + "[" * 5000 + "]" * 5000, "a: " + "x" * 2_000_000, "[1, 2]", "a: [", "x: !!python/none 1"]
)
def test_settings_that_are_too_much(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text(text)
    Path("run/metrics.csv").write_text("round\n1\n")
    for command in (["fit", "--resume", "run"], ["test", "--run", "run"], ["fit", "--config", "run/config.yaml"]):
        assert main(command) == BAD_INPUT
        assert capsys.readouterr().err.count("\n") == 1


def test_aliases_are_for_ones_own_configs() -> None:
    text = "epochs: &n 3\nrounds: *n\n"
    assert parse_settings(text, aliases=True) == {"epochs": 3, "rounds": 3}
    with pytest.raises(ValueError, match="alias"):
        parse_settings(text)


def test_json_that_is_too_deep(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match="nested"):
        read_json(tmp_path / "deep.json")
    (tmp_path / "large.json").write_text("[" + "0," * 40_000_000 + "0]")
    with pytest.raises(ValueError, match="larger than"):
        read_json(tmp_path / "large.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [("assignments", {"0": "x"}), ("assignments", {"a": 0}), ("num_domains", 0), ("left_out", []), ("picks", 3)],
)
def test_a_discovery_has_a_form(name: str, value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    finished("run", supervision="hard", rounds=1, backbone="PaperCNN")
    record = json.loads(Path("run/discovery.json").read_text())
    Path("run/discovery.json").write_text(json.dumps(record | {name: value}))
    assert main(["fit", "--resume", "run", "--rounds", "2"]) == BAD_INPUT
    assert "discovery.json" in capsys.readouterr().err


def resumes(**settings: Any) -> None:
    fit(experiment(resume="run", supervision="base", rounds=3, **settings))


def test_settings_that_were_edited_are_named() -> None:
    finished("run", supervision="base", rounds=2)
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("lr: 0.05", "lr: 0.01"))
    with pytest.raises(InputError, match=r"--lr to be 0\.05 as in run/checkpoints/2\.safetensors but got 0\.01"):
        resumes(lr=0.01)


@pytest.mark.parametrize("value", ["0.999", "nan"])
@pytest.mark.parametrize("row", [1, 2])
def test_an_accuracy_that_was_edited_is_noticed(row: int, value: str) -> None:
    """The row of a round before the checkpoint's is refused; the checkpoint's own is evaluated again."""
    finished("whole", supervision="base", rounds=3)
    finished("run", supervision="base", rounds=2)
    table = Path("run/metrics.csv")
    lines = table.read_text().splitlines()
    cells = lines[row].split(",")
    cells[1:] = [
        value if name.startswith("test/acc") else cell
        for name, cell in zip(lines[0].split(",")[1:], cells[1:], strict=True)
    ]
    table.write_text("\n".join([*lines[:row], ",".join(cells), *lines[row + 1 :]]) + "\n")
    if row == 1:
        with pytest.raises(InputError, match=r"metrics\.csv .*rows up to round 1 have changed"):
            resumes()
        return
    resumes()
    assert [line.split(",")[:4] for line in table.read_text().splitlines()] == [
        line.split(",")[:4] for line in Path("whole/metrics.csv").read_text().splitlines()
    ]


def test_a_discovery_that_was_edited_is_noticed() -> None:
    finished("run", supervision="hard", rounds=1)
    record = json.loads(Path("run/discovery.json").read_text())
    record["assignments"]["0"] = (record["assignments"]["0"] + 1) % 3
    Path("run/discovery.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"discovery\.json has changed"):
        fit(experiment(resume="run", supervision="hard", rounds=2))


FORGERIES: list[Callable[[Record], object]] = [
    lambda record: record["weights"].pop("head.weight"),
    lambda record: record["weights"].update({"head.weight": torch.zeros(())}),
    lambda record: record["weights"].update({"head.bias": record["weights"]["head.bias"][:1]}),
    lambda record: record["weights"].update({"head.bias": record["weights"]["head.bias"].long()}),
    lambda record: record["buffers"].update({"backbone.x": torch.zeros(1)}),
]
"""Well-formed records, their checksums right, that are not of this network."""


@pytest.mark.parametrize("forge", FORGERIES)
def test_weights_of_another_network_are_named(
    own_run: Path, forge: Callable[[Record], object], capsys: pytest.CaptureFixture[str]
) -> None:
    record, about = load_record(own_run / "best.safetensors")
    record.setdefault("buffers", {})
    forge(record)
    save_record(own_run / "best.safetensors", record, about)
    assert main(["test", "--run", str(own_run)]) == BAD_INPUT
    assert "Expected the best weights of run to be a PaperCNN's but" in capsys.readouterr().err


@pytest.mark.parametrize("forge", [*FORGERIES, lambda record: record.pop("server.c")])
def test_a_checkpoint_of_another_network_or_algorithm_is_named(forge: Callable[[Record], object]) -> None:
    finished("run", supervision="base", rounds=2, algorithm=SCAFFOLD())
    record, about = load_record(Path("run/checkpoints/2.safetensors"))
    record.setdefault("buffers", {})
    forge(record)
    save_record(Path("run/checkpoints/2.safetensors"), record, about)
    with pytest.raises(InputError, match="Expected a checkpoint of this network and algorithm but"):
        resumes(algorithm=SCAFFOLD())


READERS: dict[str, Callable[[Path], object]] = {
    "config.yaml": saved_settings,
    "metrics.csv": last_round,
    "discovery.json": read_discovery,
    "discovery.safetensors": digest_discovery,
    "best.safetensors": lambda folder: load_record(folder / "best.safetensors"),
    "checkpoints/1.safetensors": lambda folder: read_header(folder / "checkpoints/1.safetensors"),
    "diagnosis.csv": read_findings,
    "stopped.json": read_stop,
}


@pytest.mark.skipif(os.name != "posix", reason="named pipes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_not_read(name: str, kind: str, trained: Path) -> None:
    """A pipe that nobody writes to is never read to its end, and neither is /dev/zero."""
    shutil.copytree(trained, "run")
    file = Path("run", name)
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(StorageError, match=rf"{file.name}.*not a regular file"):
        READERS[name](Path("run"))
    assert not own_settings(Path("run"))  # looks into config.yaml; here, the secret is another as well


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with pseudo-domains, made once; whoever wants to change it takes a copy."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        yield fit(experiment(run_dir=str(folder / "run"), supervision="hard", rounds=1)).folder


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("assignments", {"0": 0, "1": 1, "2": 2, "3": 3}),  # there are 3 pseudo-domains, from 0
        ("similarities", []),
        ("similarities", [[1.0, 0.0, 0.0], [0.0, 1.0], [0.0, 0.0, 1.0]]),
        ("similarities", [[1.0, 0.0, 0.0], [0.0, 1.0, NAN], [0.0, 0.0, 1.0]]),
        ("similarities", 1.0),
        ("projection", {}),
        ("projection", {"0": [0.0, 0.0], "1": [0.0, 0.0], "2": [0.0, 0.0], "3": [0.0]}),
        ("projection", {"0": [0.0, 0.0], "1": [0.0, 0.0], "2": [0.0, 0.0], "3": [0.0, NAN]}),
        ("projection", {"0": [0.0, 0.0], "1": [0.0, 0.0], "2": [0.0, 0.0], "7": [0.0, 0.0]}),
        ("projection", {"0": [0.0, 0.0], "1": [0.0, 0.0], "2": [0.0, 0.0], "03": [0.0, 0.0]}),
        ("criterion", "\x1b[2J"),
        ("criterion", "$\\frac$"),  # a formula in a picture's title
        ("true_domains", None),
        ("true_domains", {"0": "ink"}),
        ("ari", None),
        ("nmi", "x"),
        ("inertias", {"1": NAN}),
    ],
)
def test_parts_of_a_discovery_agree(name: str, value: Any, trained: Path) -> None:
    """In a run that was cut after Phase 1, so that no checkpoint vouches for what it found."""
    shutil.copytree(trained, "run")
    shutil.rmtree("run/checkpoints")
    Path("run/metrics.csv").unlink()
    record = json.loads(Path("run/discovery.json").read_text())
    Path("run/discovery.json").write_text(json.dumps(record | {name: value}))
    with pytest.raises(StorageError, match=rf"discovery\.json cannot be read: {name}"):
        fit(experiment(resume="run", supervision="hard", rounds=1))
    with pytest.raises(StorageError, match=rf"discovery\.json cannot be read: {name}"):
        fit(experiment(discovery="run", run_dir="new", supervision="hard", rounds=1))


def test_the_note_of_a_discovery_is_shown_as_one_line(trained: Path) -> None:
    shutil.copytree(trained, "run")
    shutil.rmtree("run/checkpoints")
    Path("run/metrics.csv").unlink()
    record = json.loads(Path("run/discovery.json").read_text())
    note = "no\x1b[2J elbow\n\x07" + "x" * 1000
    Path("run/discovery.json").write_text(json.dumps(record | {"note": note}))
    said = Lines()
    fit(experiment(resume="run", supervision="hard", rounds=1), said)
    (line,) = [line for line in said.said if line.startswith("pseudo-domains: M = 3 (given: no [2J elbow  xxx")]
    assert line.isprintable()
    assert len(line) < 400


def test_messages_are_one_line_of_printable_letters(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever they quote: here, the name of a folder."""
    assert main(["test", "--run", "a\x1b[2J\nb\x07" + "x" * 5000]) == BAD_INPUT
    error = capsys.readouterr().err
    assert error[:-1].isprintable()
    assert error.startswith("jdfl-lightning: Expected a run folder but a [2J b x")
    assert len(error) < 2100


def test_notes_are_one_line_of_printable_letters(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/odd").mkdir(parents=True)
    Path("runs/odd/config.yaml").write_text("lr: [\n\n")
    Path("runs/o\x1b[2Jd\n").mkdir()
    Path("runs/o\x1b[2Jd\n/config.yaml").write_text("lr: [")
    options = ["--data.size", "8", "--data.num_clients", "4", "--rounds", "1", "--epochs", "1", "--supervision", "base"]
    assert main(["fit", *options, "--resume", "auto", "--backend", "LocalBackend"]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert [note.partition(":")[0] for note in notes] == ["note", "note"]
    assert all(note.isprintable() for note in notes)


@pytest.mark.parametrize(
    ("group", "tensors"),
    [
        ("joined", {"client": torch.tensor([4]), "value": torch.tensor([0])}),
        ("joined", {"client": torch.tensor([-1]), "value": torch.tensor([0])}),
        ("joined", {"client": torch.tensor([3]), "value": torch.tensor([3])}),
        ("joined", {"client": torch.tensor([3]), "value": torch.tensor([-2])}),
        ("domains", {"mu": torch.zeros(2, 5)}),
        ("domains", {"mu": torch.tensor(0)}),
    ],
)
def test_pseudo_domains_of_a_checkpoint_are_those_of_the_run(group: str, tensors: Tensors, trained: Path) -> None:
    shutil.copytree(trained, "run")
    record, about = load_record(Path("run/checkpoints/1.safetensors"))
    save_record(Path("run/checkpoints/1.safetensors"), record | {group: tensors}, about)
    with pytest.raises(StorageError, match=r"Expected a checkpoint of .* pseudo-domains but it has"):
        fit(experiment(resume="run", supervision="hard", rounds=2))


@pytest.mark.parametrize("round", [0, -5])
def test_a_checkpoint_is_of_a_round(round: int, trained: Path) -> None:
    shutil.copytree(trained, "run")
    change_header(Path("run/checkpoints/1.safetensors"), round=round)
    with pytest.raises(StorageError, match="cannot be read: round"):
        fit(experiment(resume="run", supervision="hard", rounds=2))


@pytest.mark.parametrize("row", ["1", "1,2,3,4"])
def test_a_row_with_other_cells_than_the_first_line_is_named(row: str) -> None:
    Path("metrics.csv").write_text(f"round,test/acc,train/loss\n{row}\n")
    with pytest.raises(StorageError, match=r"metrics\.csv .*more or fewer cells"):
        digest_metrics(Path(), 1)


@pytest.mark.parametrize(
    "forge",
    [
        lambda updates, mu: updates.update(clients=updates["clients"].float()),
        lambda updates, mu: updates.update(clients=updates["clients"] + 1),  # there is no client 4
        lambda updates, mu: updates.update(clients=updates["clients"] * 0),
        lambda updates, mu: updates.update(u=updates["u"][:1]),
        lambda updates, mu: updates.update(u=updates["u"] * float("nan")),
        lambda updates, mu: mu.update(mu=mu["mu"].long()),
        lambda updates, mu: mu.update(mu=mu["mu"][:1]),
        lambda updates, mu: mu.update(mu=mu["mu"][:, 1:]),
    ],
)
def test_vectors_of_another_discovery_are_named(forge: Callable[[Tensors, Tensors], object], trained: Path) -> None:
    shutil.copytree(trained, "run")
    record, about = load_record(Path("run/discovery.safetensors"))
    forge(record["updates"], record["centroids"])
    save_record(Path("run/discovery.safetensors"), record, about)
    with pytest.raises(StorageError, match=r"discovery\.safetensors (has|is)"):
        fit(experiment(discovery="run", supervision="hard", rounds=1))


def test_other_versions_are_a_note() -> None:
    finished("run", supervision="base", rounds=2)
    change_header(Path("run/checkpoints/2.safetensors"), versions={"torch": "1.0", "jdfl-lightning": "0.0.1"})
    with pytest.warns(UserWarning, match=r"made with torch 1\.0, jdfl-lightning 0\.0\.1; from here on with torch"):
        resumes()


@pytest.mark.parametrize("how", ["missing", "damaged", "another"])
def test_lost_best_weights_are_noticed(how: str) -> None:
    finished("run", supervision="base", rounds=2)
    best = Path("run/best.safetensors")
    if how == "missing":
        best.unlink()
    elif how == "damaged":
        best.write_bytes(best.read_bytes()[:-7])
    else:
        change_header(best, round=0)
    with pytest.warns(UserWarning, match=r"best\.safetensors is"):
        resumes()


def test_checkpoints_and_states_are_for_their_owner_alone() -> None:
    fit(experiment(run_dir="run", supervision="base", rounds=1, algorithm=SCAFFOLD()))
    files = [*Path("run/checkpoints").iterdir(), *Path("run/clients").iterdir()]
    assert files
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_resume_reads_no_state_that_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"supervision": "base", "algorithm": SCAFFOLD(), "client_fraction": 0.25}
    finished("run", rounds=4, **changes)
    read: list[tuple[int, int]] = []
    load = ClientStates.load

    def watched(self: ClientStates, client: int, round: int) -> Record:
        read.append((client, round))
        return load(self, client, round)

    monkeypatch.setattr(ClientStates, "load", watched)
    fit(experiment(resume="run", rounds=5, **changes))
    assert len(read) <= 1  # the one client of round 5


@pytest.mark.parametrize("backend", ["local", pytest.param("pool", marks=pytest.mark.slow)])
def test_a_damaged_state_can_be_started_afresh(backend: str) -> None:
    changes: dict[str, Any] = {"supervision": "base", "algorithm": SCAFFOLD()}
    changes["backend"] = LocalBackend() if backend == "local" else PoolBackend(workers=2)
    finished("run", rounds=2, **changes, checkpoint=Checkpointing(keep=1))
    Path("run/clients/1-2.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"1-2\.safetensors .*--checkpoint\.reset_damaged_clients true"):
        fit(experiment(resume="run", rounds=3, **changes))
    display = Lines()
    reset = Checkpointing(keep=1, reset_damaged_clients=True)
    run = fit(experiment(resume="run", rounds=3, **changes, checkpoint=reset), display)
    assert run.last["round"] == 3
    assert any("client 1" in line and "afresh" in line for line in display.said)


def test_a_missing_state_is_named_before_anything_is_trained() -> None:
    changes: dict[str, Any] = {"supervision": "base", "algorithm": SCAFFOLD()}
    finished("run", rounds=2, **changes)
    Path("run/clients/1-2.safetensors").unlink()
    with pytest.raises(InputError, match=r"client 1, .*--resume run/checkpoints/1\.safetensors"):
        fit(experiment(resume="run", rounds=3, **changes))


def test_the_baseline_has_no_discovery_to_bind() -> None:
    finished("run", supervision="base", rounds=1, algorithm=FedAvg())
    assert load_record(Path("run/checkpoints/1.safetensors"))[1]["discovery"] is None


def test_an_interrupt_between_checkpoints_leaves_a_run_that_can_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round that is saved then was evaluated already, and its row written."""
    changes: dict[str, Any] = {"supervision": "base", "rounds": 4, "lr": 1e-9, "checkpoint": Checkpointing(every=10)}
    finished("whole", **changes)

    class Interrupting(Lines):
        def step(self, what: str, done: int, total: int) -> None:
            if what == "round 3":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(experiment(run_dir="run", **changes), Interrupting())
    assert Path("run/checkpoints/2.safetensors").exists()
    fit(experiment(resume="run", **changes))
    assert contents("run")["rows"] == contents("whole")["rows"]


def test_a_long_error_in_phase_1_can_be_read_back() -> None:
    run = finished("run", supervision="hard", num_domains=2, rounds=1, algorithm=FedAvg())
    updates = Updates([0, 1], torch.eye(2), left_out={2: "Traceback\n" + "x" * 20_000})
    found = cluster(updates, 2, "elbow", 2, seed=0)
    save_discovery(run.folder, updates, found, None, "data")
    assert len(read_discovery(run.folder)["left_out"]["2"]) <= 300


def test_a_shared_run_that_downloaded_its_images_can_be_resumed() -> None:
    settings = {"data": {"class_path": "x.PACS", "init_args": {"root": "a", "download": True}}, "lr": 0.1}
    other = {"data": {"class_path": "x.PACS", "init_args": {"root": "b", "download": False}}, "lr": 0.1}
    assert fixed_settings(settings) == fixed_settings(other)
