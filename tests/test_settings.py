"""Every setting says on its field what it is for; whoever compares settings reads it there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jdfl_lightning.config import Experiment, as_dict, free_settings, parse_experiment, parsing
from jdfl_lightning.core.errors import InputError, Note
from jdfl_lightning.core.settings import chosen, declared_settings, flat_settings
from jdfl_lightning.data import PACS, DigitsDomains
from jdfl_lightning.server.resume import fixed_settings

DECLARED = {setting.name: setting for setting in declared_settings(Experiment)}


def test_every_setting_is_declared_once() -> None:
    """All that a config can say belongs to a declared setting, and all that is declared can be said."""
    flat = dict(flat_settings(as_dict(Experiment())))
    assert [name for name in flat if name not in chosen(flat, tuple(DECLARED))] == []
    assert [name for name in DECLARED if not chosen(flat, (name,))] == []


def test_what_may_change_on_resume() -> None:
    """The rest alters a round's numbers; where images are is no such thing, which images they are is one."""
    assert set(free_settings()) == {
        *("rounds", "evaluate_every", "callbacks", "discovery", "backend", "logger", "figures", "run_dir", "resume"),
        "figure_formats",
        *("checkpoint.every", "checkpoint.keep", "checkpoint.reset_damaged_clients"),
        *("trainer.accelerator", "trainer.devices", "trainer.detect_anomaly"),
        *("data.init_args.root", "data.init_args.roots", "data.init_args.download"),
    }
    before, after = (fixed_settings(as_dict(Experiment(data=PACS(root)))) for root in ("a", "b"))
    assert before == after
    assert before["data.init_args.size"] == 112
    assert before != fixed_settings(as_dict(Experiment(data=PACS("a", size=64))))


def test_what_decides_phase_1() -> None:
    """A discovery can be reused by a run with another algorithm, supervision or number of epochs."""
    assert {name for name, setting in DECLARED.items() if setting.phase_1} == {
        *("seed_everything", "data", "model", "backbone", "backbone_args", "private"),
        *("lr", "momentum", "weight_decay", "optimizer", "lr_scheduler"),
        *("trainer.precision", "trainer.gradient_clip_val", "trainer.gradient_clip_algorithm"),
        *("trainer.accumulate_grad_batches", "trainer.limit_train_batches"),
        *("trainer.callbacks", "trainer.fast_dev_run"),
        *(
            "clustering.epochs",
            "clustering.layers",
            "clustering.labels",
            "clustering.fraction",
            "clustering.sketch_dim",
        ),
    }


@pytest.mark.parametrize("name", [name for name, setting in DECLARED.items() if not setting.in_paper])
def test_beyond_the_paper_is_off_by_default(name: str) -> None:
    flat: dict[str, Any] = dict(flat_settings(as_dict(Experiment())))
    assert DECLARED[name].default == flat[name]


def test_the_parser_keeps_nothing_of_what_it_parsed() -> None:
    """The tests of a process share one parser (`conftest.py`)."""
    assert parsing.make_parser("fit") is parsing.make_parser("fit")
    before = as_dict(parse_experiment("fit", []))
    changed = ["--supervision", "graded", "--data", "PACS", "--data.root", "/x", "--algorithm", "FedDC", "--lr", "0.2"]
    with pytest.warns(Note, match="--supervision.alpha"):
        parse_experiment("fit", [*changed, "--alpha", "0.3", "--clustering.epochs", "7"])
    with pytest.raises(InputError):
        parse_experiment("fit", [*changed, "--clustering.epochs", "0"])
    assert as_dict(parse_experiment("fit", [])) == before


@pytest.mark.parametrize(
    "args",
    [
        ["--data", "PACS", "--data.root", "/x"],
        ["--data.root", "/x", "--data=PACS"],
        ["--data.class_path", "PACS", "--data.init_args.root", "/x"],
        ["--config", "short.yaml"],
        ["--config", "name.yaml", "--data.root", "/x"],
    ],
)
def test_a_data_set_has_its_own_defaults(args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the default data set has is not kept for another that is named: not its size, not its test images."""
    monkeypatch.chdir(tmp_path)
    Path("short.yaml").write_text("data: {class_path: PACS, init_args: {root: /x}}")
    Path("name.yaml").write_text("data: PACS")
    data = parse_experiment("fit", args).data
    assert isinstance(data, PACS)
    assert (str(data.root), data.size, data.test_fraction) == ("/x", 112, 0.1)


def test_what_is_given_stays_when_another_data_set_is_named() -> None:
    found = parse_experiment("fit", ["--config", "pacs_b", "--data.size", "40", "--data", "ImageFolderDomains"]).data
    assert (type(found).__name__, found.size, found.num_clients) == ("ImageFolderDomains", 40, 10)


@pytest.mark.parametrize("args", [[], ["--data", "DigitsDomains"], ["--data.num_clients", "4"], ["--config", "digits"]])
def test_the_digits_are_small_however_they_are_named(args: list[str]) -> None:
    assert parse_experiment("fit", args).data.size == DigitsDomains().size == 16


@pytest.mark.parametrize(
    "args",
    [
        ["--config", "short.yaml", "--data", "ImageFolderDomains"],
        ["--config", "short.yaml", "--config", "name.yaml"],
        ["--data.num_clients", "6", "--data.size", "8", "--data", "ImageFolderDomains"],
        ["--data.size", "9", "--data", "{class_path: ImageFolderDomains, init_args: {size: 8, num_clients: 6}}"],
    ],
)
def test_options_of_a_data_set_that_is_named_elsewhere(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they stand they are its own; what comes later wins."""
    monkeypatch.chdir(tmp_path)
    Path("short.yaml").write_text("data: {init_args: {num_clients: 6, size: 8}}")
    Path("name.yaml").write_text("data: ImageFolderDomains")
    data = parse_experiment("fit", args).data
    assert (type(data).__name__, data.size, data.num_clients, data.test_fraction) == ("ImageFolderDomains", 8, 6, 0.2)


def test_options_of_a_class_that_another_one_replaces_are_dropped() -> None:
    """Scripts append what they change; a suite appends the supervision."""
    run = parse_experiment("fit", ["--algorithm=FedProx", "--algorithm.mu=0.5", "--algorithm=FedAvg"])
    assert type(run.algorithm).__name__ == "FedAvg"
    assert parse_experiment("fit", ["--supervision.phi=0.3", "--supervision=base"]).supervision.name == "base"


def test_a_data_set_that_cannot_be_read_is_one_line() -> None:
    for value in ("{class_path: PACS", "{", "[PACS]"):
        with pytest.raises(InputError, match="--data"):
            parse_experiment("fit", [f"--data={value}"])
    with pytest.raises(InputError, match=r"^Expected --data to be .* but got 'Pacs'\..*Known names: DigitsDomains"):
        parse_experiment("fit", ["--data", "Pacs"])
    with pytest.raises(InputError, match=r"^--data: .*there is no module nowhere"):
        parse_experiment("fit", ["--data", "nowhere.Images"])
