"""Whole runs: what they leave behind, that they repeat to the bit, and what a user can do with them."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console

from helpers import digits, examples, experiment
from jdfl_lightning import SCAFFOLD, Experiment, FedAvg, ImageFolderDomains, TrainerOptions, fit
from jdfl_lightning.cli import main
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.clustering.criteria import Elbow
from jdfl_lightning.config import as_dict, parse_experiment, save_config, shipped_configs
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.storage.folder import make_run_folder, read_run
from jdfl_lightning.storage.metrics import append_metrics
from jdfl_lightning.storage.names import METRICS
from jdfl_lightning.storage.records import load_record
from jdfl_lightning.storage.weights import load_model
from jdfl_lightning.supervision import Random, supervision_name
from jdfl_lightning.ui.display import PlainDisplay

FILES = {"config.yaml", "metrics.csv", "curves.png", "best.safetensors", "last.safetensors", "checkpoints"}
FILES |= {"data.json", "evaluation.json", "confusion.csv", "confusion.png", "clients.csv"}
DISCOVERY_FILES = {"discovery.json", "discovery.png", "discovery.safetensors"}


def timeless(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(lines)]


@pytest.mark.parametrize("supervision", ["base", "hard", "graded", "random"])
def test_a_run_and_its_repetition(supervision: str) -> None:
    folders = []
    for name in ("first", "second"):
        run = fit(experiment(supervision=supervision, run_dir=name, client_fraction=0.5))
        folders.append(run.folder)
        expected = FILES | (set() if supervision == "base" else DISCOVERY_FILES)
        assert {path.name for path in run.folder.iterdir()} == expected
    first, second = folders
    assert timeless(first / METRICS) == timeless(second / METRICS)
    for file in ("best.safetensors", "last.safetensors", "config.yaml"):
        assert (first / file).read_bytes() == (second / file).read_bytes()
    other = fit(experiment(supervision=supervision, run_dir="other", client_fraction=0.5, seed_everything=1))
    assert timeless(first / METRICS) != timeless(other.folder / METRICS)

    rows = read_run(first).rows
    assert [row["round"] for row in rows] == [1, 2]
    for row in rows:
        each = [row[f"test/acc/{name}"] for name in ("ink", "chalk", "photo", "outline")]
        assert row["test/acc"] == pytest.approx(sum(each) / 4)  # 90 images are held out of each domain
        assert row["test/acc_worst"] == min(each)
        assert row["clients"] == 2
        assert row["bytes/up"] > 0
    model = load_model(first, "last")
    m = 1 if supervision == "base" else 3
    assert model.weights["head.weight"].shape == (m * 10, 12)
    assert supervision_name(read_run(first).config["supervision"]) == supervision


def test_discovery_file() -> None:
    run = fit(experiment(supervision="graded", run_dir="run", rounds=1))
    record = json.loads((run.folder / "discovery.json").read_text())
    assert record["num_domains"] == 3
    assert record["criterion"] == "given"
    assert sorted(set(record["assignments"].values())) == [0, 1, 2]
    assert record["true_domains"] == {"0": "ink", "1": "chalk", "2": "photo", "3": "outline"}
    assert -1 <= record["ari"] <= 1
    centroids = load_record(run.folder / record["vectors"])[0]["centroids"]["mu"].double()
    unit = centroids / centroids.norm(dim=1, keepdim=True)
    torch.testing.assert_close(torch.tensor(record["similarities"]).double(), unit @ unit.T, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "supervision", ["graded", *(pytest.param(name, marks=pytest.mark.slow) for name in ("base", "hard", "random"))]
)
def test_a_run_learns(supervision: str) -> None:
    """5 rounds on the digits at 8 px: every mode gets far above the 10 % of chance."""
    changes: dict[str, Any] = {"backbone_args": {"stride": 1}, "batch_size": 32, "lr": 0.2}
    run = fit(experiment(supervision=supervision, rounds=5, epochs=5, run_dir="run", **changes))
    assert run.best["test/acc"] > 0.5
    assert run.best["test/acc"] == max(row["test/acc"] for row in run.rows) == run.last["test/acc_best"]


def test_saved_config_repeats_the_run() -> None:
    run = fit(experiment(run_dir="first", algorithm=FedAvg(weighting="uniform")))
    again = parse_experiment("fit", ["--config", "first/config.yaml", "--run_dir", "second"])
    assert again.algorithm == FedAvg(weighting="uniform")
    assert timeless(fit(again).folder / METRICS) == timeless(run.folder / METRICS)


def test_existing_folder_is_not_touched() -> None:
    Path("full").mkdir()
    (Path("full") / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="--run_dir"):
        fit(experiment(run_dir="full"))
    assert [path.name for path in Path("full").iterdir()] == ["thesis.tex"]
    Path("empty").mkdir()
    assert fit(experiment(run_dir="empty", rounds=1)).folder == Path("empty")


def test_default_folder_is_new() -> None:
    run = fit(experiment(rounds=1, supervision="base"))
    assert run.folder.parent == Path("runs")
    assert run.folder.name.endswith("digitsdomains-fedavg-base-seed0")


def test_any_lightning_logger_works() -> None:
    fit(experiment(run_dir="run", logger=CSVLogger("logs", name="mine", version=0)))
    with Path("logs/mine/version_0/metrics.csv").open(newline="") as lines:
        logged = list(csv.DictReader(lines))
    assert [row["step"] for row in logged] == ["0", "1", "2", "2", "2"]  # Phase 1 is round 0; at the end, the details
    assert float(logged[0]["discovery/num_domains"]) == 3
    assert float(logged[0]["discovery/bytes_up"]) == 4 * 1298 * 4  # 8 x 16 x 9 + 16 of the last block, 130 of the head
    assert [float(row["test/acc"]) for row in logged[1:3]] == [row["test/acc"] for row in read_run(Path("run")).rows]


def test_test_command_gives_the_same_accuracies(capsys: pytest.CaptureFixture[str]) -> None:
    run = fit(experiment(run_dir="run", rounds=4, batch_size=96, lr=0.3, backbone_args={"stride": 1}))
    assert main(["test", "--run", "run"]) == 0
    out = capsys.readouterr().out
    for row in (run.best, run.last):
        for name in ("test/acc", "test/acc_worst", "test/acc/photo"):
            assert f"{100 * row[name]:.2f}" in out
    (Path("run") / "last.safetensors").write_bytes((Path("run") / "best.safetensors").read_bytes())
    assert run.best["test/acc"] != run.last["test/acc"]  # so that exchanged weights are noticed
    assert main(["test", "--run", "run"]) == 1
    assert "last" in capsys.readouterr().err


def test_the_score_alters_the_evaluation_alone(image_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One training, evaluated by max and by sum; `test` and `predict` take either, whatever the run's is."""
    common = experiment(supervision="hard", batch_size=96, lr=0.2, backbone_args={"stride": 1})
    largest = fit(replace(common, run_dir="max"))
    summed = fit(replace(common, run_dir="sum", score="sum"))
    assert [row["train/loss"] for row in summed.rows] == [row["train/loss"] for row in largest.rows]
    weights = {score: load_model(Path(score), "last").weights for score in ("max", "sum")}
    assert all(torch.equal(weights["max"][name], weights["sum"][name]) for name in weights["max"])
    assert summed.last["test/acc"] != largest.last["test/acc"]

    capsys.readouterr()
    for run in ("max", "sum"):
        for score, told in (("max", largest), ("sum", summed)):
            assert main(["test", "--run", run, "--score", score]) == 0
            assert f"{100 * told.last['test/acc']:.2f}" in capsys.readouterr().out
        assert main(["test", "--run", run]) == 0  # the run's own score
        capsys.readouterr()

    for own, other in (("max", "sum"), ("sum", "max")):
        command = ["predict", "--weights", "last", str(image_tree), "--output"]
        assert main([*command, f"{own}.csv", "--run", own]) == 0
        assert main([*command, f"{own} of {other}.csv", "--run", other, "--score", own]) == 0
        assert Path(f"{own}.csv").read_text() == Path(f"{own} of {other}.csv").read_text()
    assert load_model(Path("sum"), "best").header.score == "sum"
    with pytest.raises(InputError, match="--score to be 'max'"):  # else its best round would be evaluated by two scores
        fit(replace(common, resume="max", rounds=3, score="sum"))


def test_one_domain_has_one_score() -> None:
    runs = [fit(experiment(run_dir=score, supervision="base", score=score)) for score in ("max", "sum")]
    assert [row["test/acc"] for row in runs[0].rows] == [row["test/acc"] for row in runs[1].rows]


def test_test_command_notices_other_data(image_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ImageFolderDomains(root=str(image_tree), size=8, num_clients=2)
    fit(experiment(data=data, run_dir="run", rounds=1, num_domains=2))
    capsys.readouterr()
    assert main(["test", "--run", "run"]) == 0
    shutil.copytree(image_tree, "moved")
    assert main(["test", "--run", "run", "--data.root", "moved"]) == 0
    Path("moved/dark").rename("moved/dusk")
    assert main(["test", "--run", "run", "--data.root", "moved"]) == 2
    assert "dusk" in capsys.readouterr().err
    for domain in ("bright", "dark"):
        shutil.copytree(image_tree / domain / "class0", image_tree / domain / "class9")
    assert main(["test", "--run", "run"]) == 2
    assert "class9" in capsys.readouterr().err
    Path("run/metrics.csv").write_text("round,accuracy\n1,0.5\n")
    assert main(["test", "--run", "run"]) == 2


def test_metrics_keep_their_columns() -> None:
    """An algorithm may start to report something later; nothing slips into another column."""
    folder = make_run_folder("run", "x")
    always = {"test/acc": 0.5, "test/acc_worst": 0.5, "train/loss": 1.0}
    for row in ({"round": 1}, {"round": 2, "norm/new": 7.0}, {"norm/new": 8.0, "round": 3}, {"round": 4}):
        append_metrics(folder, row | always)
    Path("run/config.yaml").write_text("a: 1\n")
    rows = read_run(folder).rows
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert [row["norm/new"] for row in rows] == pytest.approx([math.nan, 7, 8, math.nan], nan_ok=True)
    assert [row["train/loss"] for row in rows] == [1] * 4


def test_runs_of_one_second_have_their_own_folders() -> None:
    assert len({make_run_folder(None, "same") for _ in range(4)}) == 4


def test_a_run_that_never_finished_a_round_leaves_nothing() -> None:
    with pytest.raises(InputError, match="lower --lr"):
        fit(experiment(run_dir="run", lr=1e20))
    assert not Path("run").exists()


def test_frozen_layers_stay_and_are_saved(image_tree: Path) -> None:
    run = experiment(run_dir="run", rounds=1, backbone="helpers.frozen_net", algorithm=SCAFFOLD())
    fit(run)
    model = load_model(Path("run"), "last")
    start, beside = Workspace(run).initial(3)
    assert set(beside) == {"backbone.0.0.weight", "backbone.0.0.bias"}
    assert all(torch.equal(model.buffers[name], tensor) for name, tensor in beside.items())
    assert not torch.equal(model.weights["backbone.1.0.weight"], start["backbone.1.0.weight"])
    assert main(["predict", "--run", "run", str(image_tree), "--output", "out.csv"]) == 0


def test_whole_precisions_can_be_used_afterwards(image_tree: Path) -> None:
    for precision in ("64-true", "bf16-true"):
        options = TrainerOptions(precision=precision, accelerator="cpu")
        fit(experiment(run_dir=precision, rounds=1, supervision="base", trainer=options))
        assert main(["predict", "--run", precision, str(image_tree), "--output", "out.csv"]) == 0
        assert len(Path("out.csv").read_text().splitlines()) == 37


def test_configs_are_complete_and_the_papers() -> None:
    """Every shipped file sets every field, so that nothing depends on what came before it; but for three to add."""
    added = {"fedbn", "fedper", "lg_fedavg"}
    shipped = {name: file for name, file in shipped_configs().items() if name not in added}
    assert added < set(shipped_configs())
    papers = ["office_caltech", "pacs_a", "pacs_b", "pacs_c"]
    others = ["camelyon17", "digits", "digits_real", "domainnet", "office_home", "pacs_hub", "pacs_pretrained"]
    assert list(shipped) == sorted([*papers, *others, "terra_incognita", "vlcs"])
    for name, file in shipped.items():
        settings = yaml.safe_load(file.read_text())
        run = parse_experiment("fit", ["--config", name])
        full = as_dict(run)
        assert settings.keys() == full.keys()
        for key, value in settings.items():
            if isinstance(value, dict) and "init_args" in value:
                assert value["init_args"].keys() == full[key]["init_args"].keys(), (name, key)
            elif isinstance(value, dict) and "class_path" not in value:
                assert value == full[key] | ({"criterion": "elbow"} if key == "clustering" else {})
                assert run.clustering.criterion == Elbow()
        assert run.logger is False  # nothing is uploaded unless the user says so
        if name in papers:
            assert (run.lr, run.momentum, run.weight_decay, run.supervision) == (0.01, 0, 0, Random(phi=1.0))
            assert (run.clustering.epochs, run.clustering.layers, run.data.size) == (3, "B", 112)
    facts = {
        name: (run.data.num_clients, run.client_fraction, run.epochs, run.rounds, run.data.test_fraction)
        for name in shipped
        for run in [parse_experiment("fit", ["--config", name])]
    }
    assert facts["office_caltech"] == (4, 1.0, 5, 100, 0.2)
    assert facts["pacs_a"] == (10, 1.0, 1, 200, 0.1)
    assert facts["pacs_b"] == (10, 0.5, 5, 150, 0.1)
    assert facts["pacs_c"] == (40, 0.5, 3, 200, 0.1)
    assert as_dict(parse_experiment("fit", ["--config", "digits.yaml"])) == as_dict(Experiment())


def test_two_configs_and_overrides() -> None:
    Path("mine.yaml").write_text("rounds: 7\nalgorithm:\n  class_path: FedAvg\n  init_args:\n    weighting: uniform\n")
    run = parse_experiment("fit", ["--config", "pacs_b", "--config=mine.yaml", "--data.size", "32", "--lr", "0.1"])
    assert (run.rounds, run.lr, run.epochs, run.data.size, run.data.num_clients) == (7, 0.1, 5, 32, 10)
    assert run.algorithm == FedAvg(weighting="uniform")
    assert parse_experiment("fit", ["--config", "mine.yaml", "--algorithm", "FedAvg"]).rounds == 7
    switched = parse_experiment("fit", ["--config", "pacs_b", "--data", "DigitsDomains", "--logger", "false"])
    assert type(switched.data).__name__ == "DigitsDomains"
    assert switched.logger is False


def test_config_of_an_experiment_made_in_python(tmp_path: Path) -> None:
    run = experiment(data=digits(5), supervision="hard", num_domains=2)
    save_config(run, tmp_path / "config.yaml")
    assert as_dict(parse_experiment("fit", ["--config", str(tmp_path / "config.yaml")])) == as_dict(run)


@pytest.mark.slow
def test_two_rounds_on_real_office_caltech(real_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(real_data / "office_caltech_10")
    arguments = ["--config", "office_caltech.yaml", "--data.root", root, "--data.size", "8", "--rounds", "2"]
    assert main(["fit", *arguments, "--epochs", "1", "--clustering.epochs", "1", "--run_dir", "run"]) == 0
    assert "amazon" in capsys.readouterr().out
    run = read_run(Path("run"))
    sizes = {"amazon": 192, "caltech": 225, "dslr": 32, "webcam": 59}
    for row in run.rows:
        for domain, size in sizes.items():
            count = row[f"test/acc/{domain}"] * size
            assert count == pytest.approx(round(count), abs=1e-4)  # a count of that many held-out images
        correct = sum(row[f"test/acc/{domain}"] * size for domain, size in sizes.items())
        assert row["test/acc"] == pytest.approx(correct / 508)
    image = next((real_data / "office_caltech_10" / "dslr" / "mug").iterdir())
    assert main(["predict", "--run", "run", str(image)]) == 0
    assert str(image) in capsys.readouterr().out


def test_evaluation_every_few_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    """Rounds 2, 4 and the last one are evaluated; what is trained is the same."""
    with PlainDisplay(Console(width=200)) as display:
        run = fit(experiment(run_dir="seldom", rounds=5, evaluate_every=2), display)
    often = fit(experiment(run_dir="often", rounds=5))
    evaluated = [row["round"] for row in run.rows if not math.isnan(row["test/acc"])]
    assert evaluated == [2, 4, 5]
    for row, full in zip(run.rows, often.rows, strict=True):
        assert row["train/loss"] == full["train/loss"]
        if row["round"] in evaluated:
            assert row["test/acc/ink"] == full["test/acc/ink"]
    assert run.best["test/acc"] == max(often.rows[i]["test/acc"] for i in (1, 3, 4))
    assert Path("seldom/last.safetensors").read_bytes() == Path("often/last.safetensors").read_bytes()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round ")]
    assert ["not evaluated" in line for line in lines] == [True, False, True, False, False]


SETTINGS = st.dictionaries(
    st.sampled_from([field.name for field in dataclasses.fields(Experiment)] + ["junk", "data.size", ""]),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=2),
            st.dictionaries(st.sampled_from(["class_path", "init_args", "every", "clip_norm", "x"]), inner, max_size=2),
        ),
        max_leaves=4,
    ),
    min_size=1,
    max_size=3,
)


@examples(60)
@given(content=SETTINGS)
def test_fuzzed_configs(content: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever a YAML file says: settings, or an `InputError`."""
    file = tmp_path_factory.mktemp("fuzz") / "fuzzed.yaml"
    file.write_text(yaml.safe_dump(content))
    with warnings.catch_warnings(), suppress(InputError):
        warnings.simplefilter("ignore")
        assert isinstance(parse_experiment("fit", ["--config", str(file)]), Experiment)
