"""A matrix of runs: each once, whatever happens in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers import contents, digits, discovered, experiment, finished
from jdfl_lightning import Experiment, fit
from jdfl_lightning.cli import main
from jdfl_lightning.config import parse_experiment
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.server.run import discover
from jdfl_lightning.storage.folder import lock_run
from jdfl_lightning.studies.suite import Combinations, arrange, plan, run_suite
from jdfl_lightning.ui.display import Display, PlainDisplay
from jdfl_lightning.ui.loggers import WandbRounds
from test_loggers import read_offline

COMMON = ["--data.size", "8", "--data.num_clients", "4", "--backbone", "helpers.tiny_net", "--rounds", "2"]
COMMON += ["--epochs", "1", "--batch_size", "192", "--clustering.epochs", "1", "--client_fraction", "1.0"]
COMMON += ["--backend", "LocalBackend", "--run_dir", "suite"]

parse = partial(parse_experiment, "suite")


def names(runs: Sequence[Experiment]) -> list[str]:
    return [Path(str(run.run_dir)).name for run in runs]


def test_two_supervisions_of_one_name() -> None:
    """A class of the user's own that has the name of another gets a folder of its own."""
    matrix = Combinations(supervisions=["graded", "mine.Graded"], seeds=[0])
    _, runs = arrange(dict.fromkeys([("", "graded"), ("", "mine.Graded")], experiment(run_dir="suite")), matrix)
    assert names(runs) == ["fedavg-graded-seed0", "fedavg-mine-graded-seed0"]


def test_plan() -> None:
    """Seeds first, and a baseline once, whatever M is tried."""
    matrix = Combinations(("FedAvg", "FedDC"), ("base", "graded"), (0, 1), (2, 3))
    folder, runs = plan(parse, ["--config", "pacs_b", "--run_dir", "suite"], matrix)
    assert folder == Path("suite")
    assert names(runs) == [
        f"{algorithm}-{rest}-seed{seed}"
        for seed in (0, 1)
        for algorithm in ("fedavg", "feddc")
        for rest in ("base", "graded-m2", "graded-m3")
    ]
    assert {run.algorithm.alpha for run in runs[3:6]} == {0.1}  # type: ignore[attr-defined]
    assert [run.num_domains for run in runs[:3]] == [None, 2, 3]
    assert [run.seed_everything for run in runs] == [0] * 6 + [1] * 6
    assert len({id(run.data) for run in runs}) == 1
    assert not folder.exists()
    assert plan(parse, [], Combinations(seeds=(0,)))[0] == Path("runs/suite-digitsdomains")
    assert plan(parse, ["--config=pacs_c.yaml"], Combinations(seeds=(0,)))[0] == Path("runs/suite-pacs_c")


def test_algorithms_of_a_suite() -> None:
    """By default the config's; options of one are for all; two of one name are told apart by their modules."""
    Path("mine.yaml").write_text("algorithm: SCAFFOLD")
    matrix = Combinations(None, ("base",), (0,))
    (run,) = plan(parse, ["--config", "mine.yaml"], matrix)[1]
    assert (names([run]), type(run.algorithm).__name__) == (["scaffold-base-seed0"], "SCAFFOLD")
    (run,) = plan(parse, ["--config", "pacs_a", "--algorithm.alpha", "0.5"], Combinations(("FedDC",), ("base",), (0,)))[
        1
    ]
    assert run.algorithm.alpha == 0.5  # type: ignore[attr-defined]
    twice = Combinations(("FedAvg", "jdfl_lightning.algorithms.FedAvg", "FedDyn"), ("base",), (0,))
    assert names(plan(parse, [], twice)[1]) == [
        "fedavg-base-seed0",
        "jdfl_lightning-algorithms-fedavg-base-seed0",
        "feddyn-base-seed0",
    ]


def test_the_images_are_described_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Not again for every run, unless its images are others."""
    folder, runs = plan(parse, [*COMMON, "--rounds", "1"], Combinations(("FedAvg", "FedDC"), ("base",), (0,)))
    run_suite(folder, runs, PlainDisplay())
    assert capsys.readouterr().out.count("DigitsDomains: images") == 1
    args = [*COMMON, "--rounds", "1", "--run_dir", "left_out"]
    folder, runs = plan(parse, args, Combinations(("FedAvg",), ("base",), (0,), None, ("ink", "chalk")))
    run_suite(folder, runs, PlainDisplay())
    out = capsys.readouterr().out
    assert out.count("DigitsDomains: images") == 2
    assert all(f"{name} (unseen)" in out for name in ("ink", "chalk"))


def test_a_suite_is_its_runs() -> None:
    """Every run is what `fit` alone gives, though all of a seed share one discovery."""
    matrix = Combinations(("FedAvg", "SCAFFOLD"), ("base", "graded", "random"), (0,), None)
    folder, runs = plan(parse, COMMON, matrix)
    outcomes = run_suite(folder, runs)
    assert [outcome.failure for outcome in outcomes] == [""] * 6
    assert [path.name for path in (folder / "discovery").iterdir()] == ["seed0"]
    for run, outcome in zip(runs, outcomes, strict=True):
        alone = fit(replace(run, run_dir=f"alone-{outcome.name}"))
        ours, theirs = contents(str(outcome.folder)), contents(str(alone.folder))
        ours.pop("config.yaml"), theirs.pop("config.yaml")  # which names the shared discovery
        assert ours == theirs


class CutError(BaseException):
    """Not an `Exception`: the process ends."""


class CutAt(Display):
    """Ends everything at a round of a run; takes down what was trained."""

    def __init__(self, run: str = "", round: int = 0) -> None:
        self.cut, self.now = (run, round), ""
        self.trained: list[str] = []

    def run(self, number: int, total: int, name: str) -> None:
        self.now = name

    def step(self, what: str, done: int, total: int) -> None:
        if done == 1:
            self.trained.append(f"{self.now} {what}")

    def round(self, number: int, total: int, metrics: Any) -> None:
        if (self.now, number) == self.cut:
            raise CutError


@pytest.mark.slow
def test_a_suite_goes_on_where_it_was_cut() -> None:
    matrix = Combinations(("FedAvg",), ("base", "graded"), (0, 1))
    with pytest.raises(CutError):
        run_suite(*plan(parse, COMMON, matrix), CutAt("fedavg-graded-seed0", 1))
    display = CutAt()
    outcomes = run_suite(*plan(parse, COMMON, matrix), display)
    assert display.trained == [
        "fedavg-graded-seed0 round 2",
        "fedavg-base-seed1 round 1",
        "fedavg-base-seed1 round 2",
        "fedavg-graded-seed1 discovery",
        "fedavg-graded-seed1 round 1",
        "fedavg-graded-seed1 round 2",
    ]
    whole = run_suite(*plan(parse, [*COMMON, "--run_dir", "whole"], matrix))
    for ours, theirs in zip(outcomes, whole, strict=True):
        mine, other = contents(str(ours.folder)), contents(str(theirs.folder))
        mine.pop("config.yaml"), other.pop("config.yaml")
        assert mine == other
    again = CutAt()
    run_suite(*plan(parse, COMMON, matrix), again)
    assert again.trained == []


def test_what_counts_as_finished() -> None:
    """A run without its curves, which come last, is gone on with; so is one that is to have more rounds."""
    matrix = Combinations(("FedAvg",), ("base",), (0,))
    run_suite(*plan(parse, COMMON, matrix))
    curves = Path("suite/fedavg-base-seed0/curves.png")
    curves.unlink()
    run_suite(*plan(parse, COMMON, matrix), display := CutAt())
    assert display.trained == []
    assert curves.exists()
    run_suite(*plan(parse, [*COMMON, "--rounds", "3"], matrix), display := CutAt())
    assert display.trained == ["fedavg-base-seed0 round 3"]


def test_a_damaged_run_is_a_failure_of_its_own() -> None:
    matrix = Combinations(("FedAvg",), ("base",), (0, 1))
    run_suite(*plan(parse, COMMON, matrix))
    Path("suite/fedavg-base-seed0/metrics.csv").write_text("?")
    Path("suite/fedavg-base-seed1/config.yaml").write_text("[")
    outcomes = run_suite(*plan(parse, COMMON, matrix))
    assert "Expected the rounds up to 1 in suite/fedavg-base-seed0/metrics.csv" in outcomes[0].failure
    assert outcomes[1].failure == ""  # it is finished, and what it left is not needed


def test_files_of_others_stay() -> None:
    strange = Path("suite/discovery/seed0/thesis.txt")
    strange.parent.mkdir(parents=True)
    strange.write_text("mine")
    outcomes = run_suite(*plan(parse, COMMON, Combinations(("FedAvg",), ("random",), (0,))))
    assert "thesis.txt" in outcomes[0].failure
    assert strange.read_text() == "mine"
    run = finished("a_run")
    with pytest.raises(InputError, match="--run_dir to be a folder for runs but got 'a_run, which is that of a run'"):
        plan(parse, [*COMMON, "--run_dir", str(run.folder)], Combinations(seeds=(0,)))


def test_one_suite_at_a_time() -> None:
    folder, runs = plan(parse, COMMON, Combinations(("FedAvg",), ("base",), (0,)))
    folder.mkdir()
    with lock_run(folder), pytest.raises(InputError, match="another process"):
        run_suite(folder, runs)
    assert run_suite(folder, runs)[0].failure == ""


def test_ctrl_c_ends_the_suite(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jdfl_lightning.server.rounds.Rounds.evaluate", interrupt)
    assert main(["suite", *COMMON, "--supervisions", "base", "--seeds", "0,1"]) == 130
    shown = capsys.readouterr()
    assert "resume with: the same command" in shown.out
    assert "fit --resume" not in shown.out
    assert not Path("suite/fedavg-base-seed1").exists()


def test_failures_are_listed_even_if_there_can_be_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    Path("suite/report").mkdir(parents=True)
    Path("suite/report/notes").write_text("mine")
    discovered("other", lr=0.3)
    args = [*COMMON, "--discovery", "other", "--supervisions", "graded,base", "--seeds", "0"]
    assert main(["suite", *args]) == 2
    shown = capsys.readouterr().err
    assert "fedavg-graded-seed0 failed: Expected --lr to be 0.3 as in other" in shown
    assert "holds other files" in shown


def test_a_discovery_that_was_cut_off_is_made_again() -> None:
    half = Path("suite/discovery/seed0")
    half.mkdir(parents=True)
    (half / "config.yaml").write_text("half: written")
    outcomes = run_suite(*plan(parse, COMMON, Combinations(("FedAvg",), ("random",), (0,))))
    assert [outcome.failure for outcome in outcomes] == [""]
    assert (half / "discovery.json").is_file()


def test_images_that_are_missing_end_a_suite_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of its runs would fail with the same words."""
    options = ["--data", "ImageFolderDomains", "--data.root", "nowhere", "--seeds", "0..9", "--run_dir", "suite"]
    assert main(["suite", *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    [line] = shown.err.splitlines()
    assert line.startswith("jdfl-lightning: Expected --data.root to be a folder")


def test_a_failed_run_does_not_end_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    """A discovery that does not fit the settings; the others go on, the table is of those."""
    discovered("other", lr=0.3)
    args = [*COMMON, "--discovery", "other", "--supervisions", "graded,base"]
    assert main(["suite", *args, "--seeds", "0"]) == 1
    shown = capsys.readouterr()
    assert "fedavg-graded-seed0 failed: Expected --lr to be 0.3 as in other" in shown.err
    assert "runs compared: 1, left out: 0; see suite/report/report.html" in shown.out
    assert "FedAvg" in Path("suite/report/report.md").read_text()


def test_whatever_a_run_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Experiment, display: Display) -> None:
        raise RuntimeError("no\nmemory")

    monkeypatch.setattr("jdfl_lightning.studies.suite.fit", fail)
    outcomes = run_suite(*plan(parse, COMMON, Combinations(("FedAvg",), ("base",), (0, 1))))
    assert [outcome.failure for outcome in outcomes] == ["RuntimeError: no memory"] * 2


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--seeds", "0,0"], "--seeds to be different values"),
        (["--seeds=-1"], "--seeds to be 0 or more"),
        (["--seeds", "x"], "--seeds"),
        (["--algorithms", "FedAvg,Nothing"], "--algorithm to be the name"),
        (["--supervisions", "soft"], "--supervisions to be one of 'base', 'hard', 'graded', 'random'"),
        (["--num_domains", "0..2"], "--num_domains to be 1 or more"),
        (["--num_domains", "7"], "--num_domains to be between 1 and the number of clients"),
        (["--num_domains", "5..2"], "--num_domains to be numbers such as 0,1,2 or 2..7 but got '5..2'"),
        (["--resume", "auto"], "--resume to be left out"),
        (["--algorithm", "SCAFFOLD"], "--algorithm to be left out: --algorithms says it"),
        (["--supervision=graded"], "--supervision to be left out: --supervisions says it"),
        (["--seed_everything", "3"], "--seed_everything to be left out: --seeds says it"),
        (["--lr", "0"], "--lr"),
    ],
)
def test_bad_input_is_found_before_anything_is_run(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["suite", *COMMON, *args]) == 2
    assert named in capsys.readouterr().err
    assert not Path("suite").exists()


def test_a_suite_of_other_settings_is_refused() -> None:
    matrix = Combinations(("FedAvg",), ("base",), (0,))
    run_suite(*plan(parse, COMMON, matrix))
    with pytest.raises(InputError, match=r"--lr to be .* Another --run_dir is another suite\."):
        plan(parse, [*COMMON, "--lr", "0.2"], matrix)
    run_suite(*plan(parse, COMMON, Combinations(("FedAvg",), ("random",), (0,))))
    with pytest.raises(InputError, match=r"--lr to be .* other updates in Phase 1"):  # no run yet, but a discovery
        plan(parse, [*COMMON, "--lr", "0.2"], Combinations(("FedDyn",), ("random",), (0,)))


def test_a_discovery_of_the_users_is_taken() -> None:
    found = discover(experiment(data=digits(4), backbone="helpers.tiny_net", num_domains=None))
    folder, runs = plan(parse, [*COMMON, "--discovery", str(found)], Combinations(("FedAvg",), ("hard",), (0,)))
    outcomes = run_suite(folder, runs)
    assert [outcome.failure for outcome in outcomes] == [""]
    assert not (folder / "discovery").exists()


@pytest.mark.slow
def test_runs_share_a_group_on_wandb() -> None:
    args = [*COMMON, "--logger", "true", "--supervisions", "base,random", "--seeds", "0"]
    assert main(["suite", *args]) == 0
    found = {name: read_offline(Path("suite") / name) for name in ("fedavg-base-seed0", "fedavg-random-seed0")}
    for name, run in found.items():
        assert (run["name"], run["group"]) == (f"digitsdomains-{name}", "suite")
    table = read_offline(Path("suite/report"))
    assert (table["name"], table["group"]) == ("report", "suite")
    own = plan(parse, [*COMMON, "--logger", "WandbRounds", "--logger.group", "mine"], Combinations(seeds=(0,)))[1][
        0
    ].logger
    assert isinstance(own, WandbRounds)
    assert own.group == "mine"
