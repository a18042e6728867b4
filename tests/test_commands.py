"""The commands around a run: its folder listed, shown, compared, deleted; settings and data checked; completion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import contents, experiment, finished
from jdfl_lightning import fit, validate
from jdfl_lightning.cli import main
from jdfl_lightning.data.folder import KnownDomains
from jdfl_lightning.report.listing import differences
from jdfl_lightning.storage.folder import is_locked, lock_run, read_run
from run_folders import config, write_run

TINY = ["--data.size", "8", "--data.num_clients", "4", "--epochs", "1", "--batch_size", "64", "--client_fraction", "1"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Run a command that prints JSON and nothing else to its standard output."""
    assert main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail with one line, and return it."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    return err


# --- runs ------------------------------------------------------------------------------------------------------------


def write_two() -> None:
    write_run(Path("runs/one"), config("FedAvg", "base", 0, rounds=2, lr=0.1), [0.5, 0.4])
    write_run(Path("runs/two"), config("SCAFFOLD", "graded", 1, rounds=3), [0.6, 0.7], {"photo": 0.25, "sketch": 0.75})


def test_runs_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list"]) == 0
    assert capsys.readouterr().out == "no runs\n"
    assert printed(capsys, "runs", "list", "--json") == []
    write_two()
    Path("runs/broken").mkdir()
    Path("runs/broken/config.yaml").write_text("lr: [")
    by_name = {Path(run["folder"]).name: run for run in printed(capsys, "runs", "list", "--json", "true")}
    assert list(by_name["one"].items())[2:10] == [
        *(("data", "PACS"), ("algorithm", "FedAvg"), ("supervision", "base"), ("seed", 0)),
        *(("round", 2), ("rounds", 2), ("accuracy", 0.5), ("worst", 0.5)),
    ]
    files = [file.stat().st_size for file in Path("runs/one").iterdir()]
    assert by_name["one"]["bytes"] == sum(files)
    assert (by_name["two"]["state"], by_name["two"]["num_domains"]) == ("unfinished", 4)
    assert by_name["broken"]["state"] == "damaged"
    assert "cannot be read" in by_name["broken"]["problem"]
    assert main(["runs", "list", "runs/two"]) == 0
    out = capsys.readouterr().out
    assert "SCAFFOLD" in out
    assert "FedAvg" not in out


def test_folders_are_listed_once_where_a_table_is_in_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that `fit` gives a folder takes most of a line."""
    names = [f"runs/20261118-00340{place}-digitsdomains-fedavg-graded-seed0" for place in range(2)]
    for name in names:
        write_run(Path(name), config("FedAvg", "base", 0, rounds=2), [0.5, 0.4])
    for width, numbered in ((80, True), (200, False)):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["runs", "list"]) == 0
        out = capsys.readouterr().out
        assert [out.count(name) for name in names] == [1, 1]
        assert (f"1: {names[0]}" in out or f"1: {names[1]}" in out) == numbered
        assert max(map(len, out.splitlines())) <= width
        assert all(word in out for word in ("finished", "FedAvg", "50.00"))


def test_the_state_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    finished("runs/done", rounds=1, supervision="base")
    with lock_run(Path("runs/done")):
        assert is_locked(Path("runs/done"))
        assert [run["state"] for run in printed(capsys, "runs", "list", "--json")] == ["running"]
        assert "another process" in refused(capsys, "runs", "rm", "runs/done", "--yes")
    assert [run["state"] for run in printed(capsys, "runs", "list", "--json")] == ["finished"]
    found = printed(capsys, "test", "--run", "runs/done", "--json")
    assert found["same_as_metrics"] is True
    assert found["evaluation"]["test"]["accuracy"] == found["weights"]["best"]["test/acc"]


def test_runs_show_and_compare(capsys: pytest.CaptureFixture[str]) -> None:
    write_two()
    [shown] = printed(capsys, "runs", "show", "runs/two", "--json")
    assert shown["settings"]["lr"] == 0.01
    assert (shown["best"]["round"], shown["last"]["round"], shown["select"]) == (2, 2, "test")
    assert main(["runs", "show", "runs/two"]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in ("75.00", "algorithm", "SCAFFOLD", "70.00"))
    compared = printed(capsys, "runs", "compare", "runs", "--json")
    assert [run["accuracy"] for run in compared["runs"]] == [0.5, 0.7]
    assert compared["settings"] == {
        "algorithm": ["jdfl_lightning.algorithms.FedAvg", "jdfl_lightning.algorithms.SCAFFOLD"],
        "lr": [0.1, 0.01],
        "rounds": [2, 3],
        "seed_everything": [0, 1],
        "supervision": ["jdfl_lightning.supervision.plain.Plain", "jdfl_lightning.supervision.graded.Graded"],
        "supervision.tau": [None, 0.1],
    }
    assert main(["runs", "compare", "runs"]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in ("FedAvg", "SCAFFOLD", "seed_everything", "accuracy (%)", "50.00", "70.00"))


def test_compare_leaves_out_where_runs_were_trained() -> None:
    for name, place in (("one", "cpu"), ("two", "gpu")):
        settings = config("FedAvg", "base", 0, rounds=1) | {"trainer": {"accelerator": place}}
        settings["data"]["init_args"] |= {"roots": [name], "download": name == "two"}
        write_run(Path(name), settings, [0.5])
    assert differences([read_run(Path("one")), read_run(Path("two"))]) == {}


def test_rm_deletes_runs_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_two()
    elsewhere = Path("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("here")
    Path("link").symlink_to("runs/one")
    cases = [
        ("elsewhere", "config.yaml"),  # no run
        ("runs", "config.yaml"),  # a folder of runs
        ("nowhere", "config.yaml"),
        ("link", "is a link"),
    ]
    for folder, named in cases:
        assert named in refused(capsys, "runs", "rm", "runs/one", folder, "--yes")
    # settings that are not those of a run; files that no run writes; a folder that a run does not make
    (elsewhere / "config.yaml").write_text("lr: 0.1")
    assert "algorithm" in refused(capsys, "runs", "rm", "elsewhere", "--yes")
    (Path("runs/two") / "notes.txt").write_text("mine")
    assert "notes.txt" in refused(capsys, "runs", "rm", "runs/one", "runs/two", "--yes")
    (Path("runs/two") / "notes.txt").unlink()
    (Path("runs/two") / "images").symlink_to(elsewhere.absolute())
    assert "images" in refused(capsys, "runs", "rm", "runs/two", "--yes")
    (Path("runs/two") / "images").unlink()
    # the working folder, which could only be emptied
    before = contents("runs/one")
    with monkeypatch.context() as there:
        there.chdir("runs/one")
        for folder in (".", "../one", str(Path.cwd())):
            assert "Nothing was deleted" in refused(capsys, "runs", "rm", folder, "--yes")
    assert contents("runs/one") == before
    # asks, or needs --yes
    assert "--yes true" in refused(capsys, "runs", "rm", "runs/one")
    monkeypatch.setattr(sys, "stdin", Terminal())
    for answer, left in (("", 2), ("n", 2), ("y", 1)):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert main(["runs", "rm", "runs/one"]) == 0
        assert len(list(Path("runs").iterdir())) == left
    # a link inside is removed, and what it leads to stays
    (Path("runs/two") / "checkpoints").mkdir()
    (Path("runs/two") / "checkpoints" / "out").symlink_to(elsewhere.absolute())
    assert main(["runs", "rm", "runs/two", str(Path("runs/two").absolute()), "--yes", "true"]) == 0  # twice the same
    assert not list(Path("runs").iterdir())
    assert (elsewhere / "precious").read_text() == "here"


class Terminal:
    """A standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_rm_takes_every_file_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a run writes is known as its own, with figures, learned targets and a logger."""
    finished("run", rounds=1, supervision="em")
    Path("run/csv/version_0").mkdir(parents=True)
    Path("run/federation.json").write_text("{}")  # `test_federation.py` deletes one that a server wrote
    assert main(["runs", "rm", "run", "--yes"]) == 0
    assert not Path("run").exists()


# --- validate and download -------------------------------------------------------------------------------------------


def test_validate_counts_what_a_round_sends(capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes are those of a real round, and nothing is left behind."""
    arguments = [*TINY, "--algorithm", "SCAFFOLD", "--num_domains", "3", "--rounds", "2"]
    found = printed(capsys, "validate", *arguments, "--json")["estimates"]
    assert list(Path.cwd().iterdir()) == []
    assert main(["fit", *arguments, "--clustering.epochs", "1", "--run_dir", "run"]) == 0
    capsys.readouterr()
    [shown] = printed(capsys, "runs", "show", "run", "--json")
    assert found["bytes_down_a_round"]["value"] == shown["last"]["bytes/down"]
    assert found["bytes_up_a_round"]["value"] == shown["last"]["bytes/up"]
    assert found["bytes_of_all_rounds"]["value"] == 2 * (shown["last"]["bytes/down"] + shown["last"]["bytes/up"])
    # 4 clients of 6 batches and a step's time each; 1,797 images of 8 x 8 pixels
    assert found["memory_of_images"]["value"] == 1797 * 8 * 8 * 3
    assert found["round"]["value"] >= 4 * 6 * found["step"]["value"]
    assert all(estimate["how"] for estimate in found.values())
    assert all(0 < estimate["value"] < 1e9 for estimate in found.values())


def test_validate_refuses_what_fit_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--data.num_clients" in refused(capsys, "validate", "--data.num_clients", "3")
    assert "--data.root" in refused(capsys, "validate", "--config", "pacs_b", "--data.root", "nowhere")


def test_validate_changes_no_result() -> None:
    """A run after a measurement in the same process is the run without one."""
    run = experiment(run_dir="after", rounds=1)
    sizes = run.data.partition.sizes
    validate(run, progress=False)
    assert run.data.partition.sizes == sizes
    fit(run, progress=False)
    finished("without", rounds=1)
    ours, theirs = contents("after"), contents("without")
    assert ours["rows"] == theirs["rows"]
    assert ours["last.safetensors"] == theirs["last.safetensors"]


def test_download(
    image_tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A known data set is fetched into the root and counted; one that is there is not fetched again."""
    classes = ("class0", "class1", "class2")

    class Toy(KnownDomains):
        domain_names, class_names = ("bright", "dark"), classes
        counts = {"bright": (6, 6, 6), "dark": (6, 6, 7)}
        mirrors = ()
        terms = "none"

    monkeypatch.setattr(Toy, "__module__", "jdfl_lightning.data.toy")
    monkeypatch.setattr(Toy, "fetch", lambda data: shutil.copytree(image_tree, str(data.root), dirs_exist_ok=True))
    for _ in range(2):
        assert main(["download", "--data", "Toy", "--root", str(tmp_path / "toy")]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "bright: 18 images of 3 classes",
            "dark: 18 images of 3 classes (19 as published)",
            f"--data Toy --data.root {tmp_path / 'toy'}",
        ]
    assert "Did you mean 'PACS'" in refused(capsys, "download", "--data", "PACK", "--root", "x")


# --- completion ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_completion_in_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "work" / "photo.png").touch()
    cases = {
        "": "validate fit discover diagnose suite test predict export report watch runs download completion",
        "ru": "runs",
        "runs ": "list show compare rm",
        "runs list --": "--json --help",
        "fit --data.roo": "--data.root --data.roots",
        "fit --supervision ": "base hard graded random uniform em online",
        "suite --config pacs_": "pacs_a pacs_b pacs_c",
        "fit --config ph": "photo.png",
        "fit --clustering.criterion ": "elbow silhouette",
        "test --score ": "max sum",
        "predict --run run ph": "photo.png",
        "fit --figures ": "true false",
    }
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    for line, expected in cases.items():
        words = f"jdfl-lightning {line}".split(" ")
        ask = f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; _jdfl_lightning"
        command = ["bash", "-c", f"{script}\n{ask}; echo ${{COMPREPLY[@]}}"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
        assert done.stderr == ""
        assert done.stdout.strip().startswith(expected), line
    assert main(["completion", "--shell", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out
