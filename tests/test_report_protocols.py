"""Reports of runs with different protocols: never mixed, and each labelled; leave-one-domain-out by hand."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from helpers import experiment
from jdfl_lightning import suite
from jdfl_lightning.cli import main
from jdfl_lightning.config import parse_experiment
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.report.collect import find_run_folders, read_runs
from jdfl_lightning.report.comparison import Section, compare
from jdfl_lightning.report.write import leave_one_out, write_report
from jdfl_lightning.storage.metrics import read_rows, write_metrics
from jdfl_lightning.studies.suite import Combinations, plan
from run_folders import DOMAINS, config, write_run

RUNS = Path("runs")


def write(name: str, test: list[float], supervision: str = "base", seed: int = 0, **changes: Any) -> None:
    """Write a run of the paper's setting B, with other data options, and validation or unseen accuracies.

    Args:
        name: its folder.
        test: accuracies on the test images.
        supervision: the supervision.
        seed: the seed.
        changes: val, the accuracies on validation images; unseen, those on an unseen domain by its name; select;
            others are options of the data.
    """
    val, unseen, select = changes.pop("val", None), changes.pop("unseen", {}), changes.pop("select", None)
    settings = config("FedAvg", supervision, seed, rounds=len(test), select=select)
    options = ({"val_fraction": 0.1} if val else {}) | ({"unseen": next(iter(unseen))} if unseen else {})
    settings["data"]["init_args"] |= options | changes
    seen = {domain: test[-1] for domain in DOMAINS if domain not in unseen}
    folder = write_run(RUNS / name, settings, test, seen, data=f"split {seed} {sorted(unseen)}")
    rows = read_rows(folder)
    for number, row in enumerate(rows):
        row |= {"val/acc": val[number]} if val else {}
        for domain, found in unseen.items():
            row |= {"unseen/acc": found[number], f"unseen/acc/{domain}": found[number]}
        row["test/acc_best"] = "nan" if select == "last" else 0.5
    write_metrics(folder, rows)


def sections() -> dict[str, Section]:
    return {section.protocol.name: section for section in compare(read_runs(find_run_folders([RUNS]))[0])}


def test_protocols_are_apart_and_labelled() -> None:
    """The paper's value stands beside the runs that follow its protocol, and nowhere else."""
    write("paper", [0.5, 0.7, 0.6])
    write("last", [0.5, 0.7, 0.6], select="last")
    write("val", [0.5, 0.7, 0.6], val=[0.2, 0.3, 0.4])
    write("mixed", [0.5, 0.7, 0.6], domain_mix=0.5)
    write("skewed", [0.5, 0.7, 0.6], label_skew=0.3)
    found = sections()
    assert set(found) == {"paper", "last round", "validation 0.1", "mixed 0.5", "skewed 0.3"}
    accuracies = {name: section.rows[0].mean for name, section in found.items()}
    assert accuracies == {
        "paper": 0.7,
        "last round": 0.6,
        "validation 0.1": 0.6,
        "mixed 0.5": 0.7,
        "skewed 0.3": 0.7,
    }
    assert {name for name, section in found.items() if section.rows[0].paper is not None} == {"paper"}
    assert found["paper"].title == "PACS, setting B"
    assert found["paper"].lines("main", "accuracy_picked_on_test") == []
    for name in ("last round", "validation 0.1"):
        (line,) = found[name].lines("main", "accuracy_picked_on_test")
        assert line.mean == 0.7
    (line,) = found["validation 0.1"].lines("main", "validation_accuracy")
    assert line.mean == 0.4
    text = (write_report(RUNS).folder / "report.md").read_text()
    assert "in the best round, picked on the test images, as in the paper; mean" in text
    assert "in the best round, picked on validation images; mean" in text
    assert "in the last round; mean" in text
    assert text.count("if picked on test images") == 2
    assert text.count("paper (gain)") == 1
    with (Path("report") / "report.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {row["protocol"] for row in rows} == set(found)


def test_leave_one_domain_out() -> None:
    """Each domain, their mean and the worst, over two seeds, by hand."""
    values = {"photo": (0.25, 0.75), "sketch": (0.5, 0.25)}
    for seed in (0, 1):
        for domain, by_seed in values.items():
            unseen = {domain: [0.9, by_seed[seed], 0.0]}  # the second round is the best on the test images
            write(f"base-{domain}-{seed}", [0.5, 0.7, 0.6], seed=seed, unseen=unseen)
    write("graded-photo-0", [0.5, 0.7, 0.6], "graded", unseen={"photo": [0.1, 0.125, 0.1]})
    found = compare(read_runs(find_run_folders([RUNS]))[0])
    (group,) = leave_one_out(found)
    mean, worst = group.results
    assert mean["mean"] == pytest.approx((0.375 + 0.5) / 2)  # seeds: (0.25 + 0.5) / 2 and (0.75 + 0.25) / 2
    assert mean["std"] == pytest.approx(0.125 / 2**0.5)
    assert worst["mean"] == 0.375
    cells = {column.name: column.cells for column in group.table.columns}
    assert list(cells) == ["algorithm", "supervision", "seeds", "photo", "sketch", "mean", "worst"]
    assert cells["supervision"] == ["base", "graded"]
    assert cells["photo"] == ["50.00 ± 35.36", "12.50"]
    assert cells["sketch"][0] == "37.50 ± 17.68"
    assert cells["sketch"][1] == cells["mean"][1] == cells["worst"][1]  # none
    assert cells["mean"][0] == "43.75 ± 8.84"
    assert cells["worst"][0] == "37.50"
    report = write_report(RUNS)
    text = (report.folder / "report.md").read_text()
    assert "## Leave one domain out: PACS" in text
    assert "photo (unseen)" in text
    assert "domains [" not in text
    results = report.results[report.results["table"] == "leave_one_out"]
    assert dict(zip(results["quantity"], results["mean"], strict=True)) == {
        "unseen_mean": pytest.approx(0.4375),
        "unseen_worst": 0.375,
    }
    assert report.results["paper"].isna().all()


def test_a_suite_leaves_out_each_domain(image_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command: a run for each domain, supervision and seed; a discovery for each domain; the table."""
    common = ["--data", "ImageFolderDomains", "--data.root", str(image_tree), "--data.size", "8"]
    common += ["--data.num_clients", "3", "--backbone", "helpers.tiny_net", "--rounds", "1", "--epochs", "1"]
    common += ["--clustering.epochs", "1", "--client_fraction", "1.0", "--backend", "LocalBackend"]
    common += ["--run_dir", "suite", "--supervisions", "base,graded", "--seeds", "0", "--unseen", "each"]
    assert main(["suite", *common]) == 0
    names = [f"fedavg-{kind}-without_{domain}-seed0" for domain in ("bright", "dark") for kind in ("base", "graded")]
    assert {path.name for path in Path("suite").iterdir()} == {*names, "discovery", "report"}
    found = {path.name for path in Path("suite/discovery").iterdir()}
    assert found == {"without_bright-seed0", "without_dark-seed0"}
    text = Path("suite/report/report.md").read_text()
    assert "## Leave one domain out: ImageFolderDomains" in text
    assert "| algorithm | supervision | seeds | bright | dark | mean | worst |" in text
    with Path("suite", names[1], "metrics.csv").open(newline="") as lines:
        (row,) = csv.DictReader(lines)
    assert "unseen/acc/bright" in row
    assert "test/acc/dark" in row
    assert "test/acc/bright" not in row
    assert main(["suite", *common]) == 0  # nothing is left to do
    assert "4 of 4 runs are finished" in capsys.readouterr().out


def test_domains_to_leave_out() -> None:
    def names(*args: str, **options: Any) -> list[str]:
        matrix = Combinations(("FedAvg",), ("base",), (0,), **options)
        runs = plan(lambda given: parse_experiment("suite", given), ["--config", "pacs_b", *args], matrix)[1]
        return [f"{Path(str(run.run_dir)).name} {run.data.unseen}" for run in runs]

    assert names(unseen=("photo", "sketch")) == [
        "fedavg-base-without_photo-seed0 photo",
        "fedavg-base-without_sketch-seed0 sketch",
    ]
    assert len(names(unseen=("each",))) == 4
    with pytest.raises(InputError, match=r"--data.unseen to be left out: --unseen says it"):
        names("--data.unseen", "photo", unseen=("sketch",))
    with pytest.raises(InputError, match=r"--data.unseen to be one of .*'phot'"):
        names(unseen=("phot",))
    data = experiment().data
    data.unseen = "ink"
    with pytest.raises(InputError, match="--unseen says it"):
        suite(experiment(data=data, run_dir="suite"), supervisions=["base"], seeds=[0], unseen="each")
