"""The report: numbers worked out by hand from small run folders, and what it refuses to say."""

from __future__ import annotations

import csv
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import examples, experiment
from jdfl_lightning import fit
from jdfl_lightning.cli import main
from jdfl_lightning.report import published, write
from jdfl_lightning.report.collect import find_run_folders, read_runs
from jdfl_lightning.report.comparison import Line, Section, compare
from jdfl_lightning.report.markup import escape_latex, escape_markdown
from jdfl_lightning.report.statistics import paired_difference
from jdfl_lightning.report.write import write_report
from jdfl_lightning.storage.checkpoint import CheckpointHeader, Checkpoints
from run_folders import config, write_run, write_study
from test_loggers import read_offline

RUNS = Path("runs")


def short(*arguments: Any, **others: Any) -> dict[str, Any]:
    """Settings of a run of three rounds."""
    return config(*arguments, **{"rounds": 3, **others})


def data(name: str, size: int, num_clients: int) -> dict[str, Any]:
    """The data of a config."""
    return {
        "class_path": f"jdfl_lightning.data.{name}",
        "init_args": {"size": size, "num_clients": num_clients, "test_fraction": 0.2},
    }


def sections(*targets: float) -> list[Section]:
    return compare(read_runs(find_run_folders([RUNS]))[0], targets)


def only_section(*targets: float) -> Section:
    (section,) = sections(*targets)
    return section


def row(section: Section, algorithm: str, supervision: str) -> Line:
    (found,) = [r for r in section.rows if (r.algorithm, r.supervision) == (algorithm, supervision)]
    return found


def write_pairs(base: list[float], other: list[float], supervision: str = "random") -> None:
    """Write a run for each seed and accuracy, of the baseline and of another supervision."""
    for name, values in (("base", base), (supervision, other)):
        for seed, best in enumerate(values):
            write_run(RUNS / f"{name}{seed}", short("FedAvg", name, seed), [0.1, best, 0.2], data=f"split {seed}")


def report(*arguments: str) -> list[dict[str, str]]:
    """Run the command and return the rows of its CSV."""
    assert main(["report", str(RUNS), *arguments]) == 0
    with Path("report/report.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_mean_deviation_and_paired_interval() -> None:
    """Base 0.50, 0.60, 0.70 and random 0.52, 0.64, 0.76: differences 0.02, 0.04, 0.06.

    Their mean is 0.04 and their deviation 0.02; Student's 97.5 % quantile for 2 degrees of freedom is
    sqrt(2) * 0.95 / sqrt(1 - 0.95**2) = 4.3027, so half the interval is 4.3027 * 0.02 / sqrt(3) = 0.04968: 0 is in it.
    Unpaired the means differ by as much, with six times the deviation.
    """
    write_pairs([0.50, 0.60, 0.70], [0.52, 0.64, 0.76])
    section = only_section()
    base, drawn = row(section, "FedAvg", "base"), row(section, "FedAvg", "random")
    assert base.mean == pytest.approx(0.6)
    assert base.std == pytest.approx(0.1)
    assert base.difference is None
    assert drawn.difference == pytest.approx(0.04)
    half = math.sqrt(2) * 0.95 / math.sqrt(1 - 0.95**2) * 0.02 / math.sqrt(3)
    assert drawn.difference_low == pytest.approx(0.04 - half)
    assert drawn.difference_high == pytest.approx(0.04 + half)
    assert (drawn.difference_seeds, drawn.verdict) == ("0 1 2", "undecided")


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ([0.52, 0.63, 0.72], "gain"),  # 0.02, 0.03, 0.02: mean 0.0233, half 0.0143
        ([0.48, 0.57, 0.68], "loss"),
        ([0.52, 0.64, 0.76], "undecided"),
        ([0.50, 0.60, 0.70], "no spread: not judged"),  # the same to the bit
        ([0.52, 0.62], "no spread: not judged"),  # 0.02 twice, but for rounding
        ([0.60, 0.79], "undecided"),  # 0.10, 0.19: with two seeds the quantile is 12.7
        ([0.90], "one seed: not judged"),
    ],
)
def test_only_what_seeds_support_is_called_a_gain(other: list[float], verdict: str) -> None:
    write_pairs([0.50, 0.60, 0.70], other)
    lines = report()
    (line,) = [line for line in lines if line["supervision"] == "random" and line["verdict"]]
    assert line["verdict"] == verdict
    table = Path("report/report.md").read_text().split("Accuracy (%) in the best round")[1].split("\n\n")[1]
    words = {cell.strip() for cell in table.split("|")}
    assert verdict in words
    assert words & {"gain", "loss"} == {verdict} & {"gain", "loss"}


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8))
def test_the_rule_of_a_gain(pairs: list[tuple[float, float]]) -> None:
    """Exchanging method and baseline exchanges gain and loss; one seed is never judged; a gain is above 0."""
    method, base = ({seed: pair[i] for seed, pair in enumerate(pairs)} for i in (0, 1))
    there, back = paired_difference(method, base), paired_difference(base, method)
    assert there is not None
    assert back is not None
    assert back.verdict == {"gain": "loss", "loss": "gain"}.get(there.verdict, there.verdict)
    assert (there.verdict == "one seed: not judged") == (len(pairs) == 1)
    differences = [method[seed] - base[seed] for seed in method]
    if len(pairs) > 1 and max(differences) - min(differences) < 1e-12:
        assert there.verdict == "no spread: not judged"
    if there.verdict == "gain":
        assert there.low is not None
        assert 0 < there.low <= there.mean


def test_no_base_no_difference() -> None:
    write_run(RUNS / "a", short("FedAvg", "random", 0), [0.1, 0.2, 0.3])
    write_run(RUNS / "b", short("FedAvg", "base", 1), [0.1, 0.2, 0.3])
    write_run(RUNS / "c", short("SCAFFOLD", "base", 0), [0.1, 0.2, 0.3])
    lines = report()
    (line,) = [line for line in lines if line["supervision"] == "random" and line["verdict"]]
    assert (line["verdict"], line["difference"]) == ("no base to compare", "")


def test_seeds_that_both_have() -> None:
    """Seeds 0, 1, 2 and base 1, 2, 3: the difference is that of 1 and 2, which are 0.1 and 0.3 better."""
    for seed, best in ((0, 0.9), (1, 0.6), (2, 0.8)):
        write_run(RUNS / f"r{seed}", short("FedAvg", "random", seed), [best] * 3, data=str(seed))
    for seed in (1, 2, 3):
        write_run(RUNS / f"b{seed}", short("FedAvg", "base", seed), [0.5] * 3)
    found = row(only_section(), "FedAvg", "random")
    assert found.difference_seeds == "1 2"
    assert found.difference == pytest.approx(0.2)
    report()
    assert "+20.00 \\[-107.06, +147.06\\] over seeds 1, 2" in Path("report/report.md").read_text()


def test_best_round_and_its_domains() -> None:
    """Domains are those of the round that is best overall, not each domain's best."""
    folder = write_run(RUNS / "a", short(), [0.3, 0.5, 0.4])
    text = (folder / "metrics.csv").read_text().splitlines()
    header = text[0].split(",")
    cells = text[3].split(",")
    cells[header.index("test/acc/photo")] = "0.9"
    (folder / "metrics.csv").write_text("\n".join([*text[:3], ",".join(cells)]) + "\n")
    section = only_section()
    assert row(section, "FedAvg", "base").mean == 0.5
    assert [line.mean for line in section.lines("main", "accuracy", "photo")] == [0.5]


def test_cost() -> None:
    """Reached in round 2 by seed 0 and in round 3 by seed 1: 2.5 rounds, 5 MB up, 2.5 MB down; not by seed 2."""
    for seed, curve in enumerate(([0.1, 0.7, 0.8], [0.1, 0.2, 0.7], [0.1, 0.2, 0.6])):
        write_run(RUNS / str(seed), short("FedAvg", "base", seed), curve)
    section = only_section(0.7)
    (rounds,), (up,), (down,) = (section.lines("main", name) for name in ("rounds", "bytes_up", "bytes_down"))
    assert (rounds.count, up.count, down.count) == (2, 2, 2)
    assert (rounds.mean, up.mean, down.mean) == (2.5, 5e6, 2.5e6)
    lines = [line for line in report("--target", "0.7,0.95") if line["target"]]
    assert [(line["quantity"], float(line["mean"]), line["target"]) for line in lines] == [
        ("rounds", 2.5, "0.7"),
        ("bytes_up", 5e6, "0.7"),
        ("bytes_down", 2.5e6, "0.7"),
    ]
    assert "| 95.00 | 0 of 3 seeds | - | - | - |" in Path("report/report.md").read_text()
    by_default = [line for line in report() if line["quantity"] == "rounds"]
    assert [float(line["target"]) for line in by_default] == [pytest.approx(0.7)]  # mean of 0.8, 0.7 and 0.6


def test_a_mean_that_rounding_lifts_above_all_its_values_is_reached() -> None:
    """Three times the same accuracy, whose mean in floating-point numbers is larger than it."""
    accuracy = next(value for k in range(1, 1000) if fmean([value := k / 1000] * 3) > value)
    for seed in range(3):
        write_run(RUNS / str(seed), short("FedAvg", "base", seed), [0.0, accuracy, 0.0])
    (line,) = [line for line in report() if line["quantity"] == "rounds"]
    assert (float(line["mean"]), line["count"]) == (2.0, "3.0")


def test_bytes_that_were_not_counted_in_a_round_have_no_sum() -> None:
    folder = write_run(RUNS / "a", short(), [0.1, 0.5, 0.2])
    text = (folder / "metrics.csv").read_text()
    (folder / "metrics.csv").write_text(text.replace("1000000,2000000", "1000000,nan", 1))
    lines = {line["quantity"]: line["mean"] for line in report() if line["target"]}
    assert lines == {"rounds": "2.0", "bytes_down": "2000000.0"}
    assert "| 2.0 | - | 2.0 |" in Path("report/report.md").read_text()


def test_a_domain_without_an_accuracy_is_a_dash() -> None:
    for seed in (0, 1):
        write_run(RUNS / str(seed), short(seed=seed), [0.5] * 3, {"ink": math.nan, "chalk": 0.25})
    lines = {line["domain"]: line["mean"] for line in report() if line["domain"]}
    assert lines == {"ink": "", "chalk": "0.25"}
    assert "| 50.00 ± 0.00 | - | 25.00 ± 0.00 |" in Path("report/report.md").read_text()


def test_settings_are_not_averaged_together() -> None:
    for seed in (0, 1):
        for alpha, best in ((0.1, 0.5), (0.01, 0.6)):
            feddyn = short("FedDyn", "base", seed)
            feddyn["algorithm"]["init_args"]["alpha"] = alpha
            write_run(RUNS / f"{alpha} {seed}", feddyn, [best] * 3)
        write_run(RUNS / f"c{seed}", short("FedAvg", "base", seed), [0.7] * 3)
        write_run(RUNS / f"d{seed}", short("FedAvg", "base", seed, lr=0.1), [0.8] * 3)
        graded = short("FedAvg", "graded", seed, tau=0.5)
        write_run(RUNS / f"e{seed}", graded, [0.9] * 3, data=str(seed))
        write_run(RUNS / f"f{seed}", short("FedAvg", "graded", seed), [0.4] * 3, data=str(seed))
    found = {(r.algorithm, r.supervision, r.settings): r for r in only_section().rows}
    assert {key: round(r.mean, 6) for key, r in found.items()} == {
        ("FedAvg", "base", "lr 0.01"): 0.7,
        ("FedAvg", "base", "lr 0.1"): 0.8,
        ("FedAvg", "graded", "lr 0.01, tau 0.5"): 0.9,
        ("FedAvg", "graded", "lr 0.01, tau 0.1"): 0.4,
        ("FedDyn", "base", "algorithm.alpha 0.1, lr 0.01"): 0.5,
        ("FedDyn", "base", "algorithm.alpha 0.01, lr 0.01"): 0.6,
    }
    difference = found["FedAvg", "graded", "lr 0.01, tau 0.5"].difference
    assert difference == pytest.approx(0.2)  # to the baseline with its own learning rate


def test_scores_are_rows_of_their_own_and_share_a_baseline() -> None:
    """With one domain max and sum are the same, so that `base` of either is the baseline of both."""
    write_run(RUNS / "base", short("FedAvg", "base", score="max"), [0.5] * 3)
    for score, best in (("max", 0.6), ("sum", 0.7)):
        write_run(RUNS / score, short("FedAvg", "random", score=score), [best] * 3)
    found = {r.settings: r for r in only_section().rows if r.supervision == "random"}
    assert set(found) == {"score max", "score sum"}
    for name, mean in (("score max", 0.1), ("score sum", 0.2)):
        assert found[name].difference == pytest.approx(mean)
    assert "score sum (not in the paper)" in found["score sum"].differs_from_paper
    assert "score" not in found["score max"].differs_from_paper


def test_data_sets_and_settings_are_sections() -> None:
    write_run(RUNS / "a", short(), [0.5] * 3)
    write_run(RUNS / "b", short(epochs=1, client_fraction=1.0), [0.5] * 3)
    office = short(client_fraction=1.0)
    office["data"] = data("OfficeCaltech", 112, 4)
    write_run(RUNS / "c", office, [0.5] * 3, dict.fromkeys(("amazon", "caltech", "dslr", "webcam"), 0.5))
    digits = short()
    digits["data"] = data("DigitsDomains", 16, 10)
    write_run(RUNS / "d", digits, [0.5] * 3, {"ink": 0.5})
    moved = short(seed=1)
    moved["data"]["init_args"]["root"] = "elsewhere"
    write_run(RUNS / "e", moved, [0.5] * 3)
    found = sections()
    assert [s.title for s in found] == ["Office-Caltech", "PACS, setting A", "PACS, setting B", "DigitsDomains"]
    assert [s.experiment for s in found] == ["office_caltech", "pacs_a", "pacs_b", None]
    assert found[2].rows[0].seeds == "0 1"
    assert [name in found[3].about for name in ("size 16", "num_clients 10", "epochs 5")] == [True] * 3


def test_data_of_ones_own_need_not_say_how_many_clients() -> None:
    own = short()
    own["data"] = {"class_path": "mine.Toy", "init_args": {"sizes": [3, 4]}}
    write_run(RUNS / "a", own, [0.5] * 3, {"only": 0.5})
    section = only_section()
    assert section.title == "Toy"
    assert "sizes [3, 4]" in section.about
    assert row(section, "FedAvg", "base").paper is None


def test_published_values_and_what_differs() -> None:
    for seed in range(3):
        write_run(RUNS / f"a{seed}", config("FedAvg", "random", seed), [0.7] * 150, data=str(seed))
    small = short("FedAvg", "random", 0, phi=0.5, num_domains=4, client_fraction=1.0)
    small["data"] = data("OfficeCaltech", 32, 4)
    write_run(RUNS / "b", small, [0.7] * 3, dict.fromkeys(("amazon", "caltech", "dslr", "webcam"), 0.5))
    office, pacs = sections()
    assert pacs.rows[0].differs_from_paper == ""
    assert (pacs.rows[0].paper, pacs.rows[0].paper_gain) == (0.7053, 0.0263)
    assert office.rows[0].differs_from_paper == (
        "rounds 3 (paper 100), size 32 (paper 112), seeds 1 (paper 3), phi 0.5 (paper 1), M 4 given (paper by elbow)"
    )
    lines = report()
    webcam = [line for line in lines if line["domain"] == "webcam"]
    assert [(line["paper"], line["paper_doubtful"]) for line in webcam] == [("0.8043", "yes")]
    assert "50.00 \\[80.43?\\]" in Path("report/report.md").read_text()


def test_settings_that_the_paper_does_not_have_are_named() -> None:
    settings = short("FedAvg", "graded", alpha=0.45, min_clients=2, trainer={"precision": "bf16-mixed"})
    settings["clustering"] |= {"fraction": 0.5, "sketch_dim": 1024, "newcomers": "update"}
    write_run(RUNS / "a", settings, [0.5] * 3)
    assert row(only_section(), "FedAvg", "graded").differs_from_paper == (
        "rounds 3 (paper 150), seeds 1 (paper 3), alpha 0.45 (paper 0.55), min_clients 2 (not in the paper), "
        "clustering.fraction 0.5 (not in the paper), clustering.sketch_dim 1024 (not in the paper), "
        "clustering.newcomers update (not in the paper), trainer.precision bf16-mixed (not in the paper)"
    )


@pytest.mark.parametrize(
    ("alpha", "found", "differs"),
    [(0.55, (4, 5), ""), (0.45, (6, 6), ""), (0.55, (6, 6), "(paper 0.45)"), (0.55, (5, 6), "(paper 0.45 or 0.55)")],
)
def test_alpha_by_the_papers_rule(alpha: float, found: tuple[int, int], differs: str) -> None:
    """0.55 up to M = 5, 0.45 above."""
    for seed, m in enumerate(found):
        settings = short("FedAvg", "graded", seed, alpha=alpha)
        write_run(RUNS / str(seed), settings, [0.5] * 3, data=str(seed), num_domains=m)
    text = row(only_section(), "FedAvg", "graded").differs_from_paper
    assert text == f"rounds 3 (paper 150), seeds 2 (paper 3){f', alpha {alpha} {differs}' if differs else ''}"


def test_a_class_of_ones_own_is_not_the_papers() -> None:
    for path, seed in (("mine.FedAvg", 0), ("jdfl_lightning.algorithms.fedavg.FedAvg", 0)):
        settings = short(seed=seed)
        settings["algorithm"]["class_path"] = path
        write_run(RUNS / path, settings, [0.5] * 3)
    own = short()
    own["data"]["class_path"] = "mine.PACS"
    write_run(RUNS / "data", own, [0.5] * 3)
    known, other = sections()
    assert {r.settings: r.paper is not None for r in known.rows} == {
        "algorithm mine.FedAvg": False,
        "algorithm jdfl_lightning.algorithms.fedavg.FedAvg": True,
    }
    assert (other.experiment, other.title, other.rows[0].paper) == (None, "PACS", None)
    assert other.about.startswith("mine.PACS, ")


def test_sweep_over_num_domains() -> None:
    """Given M = 2 and 3 beside a chosen one: the main table has the chosen one, the curve the others."""
    for name, given_domains in (("chosen", None), ("two", 2), ("three", 3)):
        settings = short("FedAvg", "graded", 0, num_domains=given_domains)
        write_run(RUNS / name, settings, [0.5] * 3, num_domains=given_domains or 4)
    section = only_section()
    assert [r.given_domains for r in section.rows] == [None]
    assert [r.given_domains for r in section.sweep] == [2, 3]
    assert [r.paper for r in section.sweep] == [0.6940, 0.6963]
    assert "given" not in section.sweep[0].differs_from_paper
    assert "settings" not in {c for r in section.sweep for c in r.settings.split()}
    lines = report()
    assert [line["num_domains"] for line in lines if line["table"] == "num_domains"] == ["2", "3"]
    assert Path("report/report-1-num-domains.png").stat().st_size > 5000
    assert not Path("report/report-1-ablation.png").exists()


def test_the_papers_curve_over_m_is_that_of_fedavg_in_setting_b() -> None:
    """Nothing is printed for another algorithm, another experiment or hard targets."""
    for algorithm, supervision, client_fraction in (
        ("FedAvg", "random", 0.5),
        ("FedAvg", "hard", 0.5),
        ("SCAFFOLD", "random", 0.5),
        ("FedAvg", "random", 1.0),
    ):
        for m in (2, 3):
            epochs = 5 if client_fraction < 1 else 1
            settings = short(algorithm, supervision, num_domains=m, client_fraction=client_fraction, epochs=epochs)
            folder = RUNS / f"{algorithm}-{supervision}-{client_fraction}-{m}"
            write_run(folder, settings, [0.5] * 3, num_domains=m)
    printed = {
        (s.experiment, r.algorithm, r.supervision, r.given_domains): r.paper for s in sections() for r in s.sweep
    }
    assert {key: value for key, value in printed.items() if value is not None} == {
        ("pacs_b", "FedAvg", "random", 2): round(published.num_domains_curve()["random", 2] / 100, 4),
        ("pacs_b", "FedAvg", "random", 3): round(published.num_domains_curve()["random", 3] / 100, 4),
    }
    assert len(printed) == 8


def test_one_given_m_is_in_the_main_table() -> None:
    write_run(RUNS / "a", short("FedAvg", "graded", 0, num_domains=4), [0.5] * 3)
    section = only_section()
    assert [r.given_domains for r in section.rows] == [4]
    assert section.sweep == []


def left_out() -> dict[str, str]:
    """Return why runs were left out, by the names of their folders."""
    return {entry.folder.name: entry.reason for entry in write_report([RUNS], Path("report")).left_out}


def test_what_is_left_out_and_why() -> None:
    for seed in (0, 1):
        write_run(RUNS / f"fine{seed}", short("FedAvg", "random", seed), [0.5] * 3, data=f"split {seed}")
    write_run(RUNS / "fine2", short("FedAvg", "graded", 0), [0.5] * 3, data="split 0")
    write_run(RUNS / "half", short("FedProx"), [0.5] * 2)
    write_run(RUNS / "other images", short("SCAFFOLD", "random", 0), [0.5] * 3, data="split 7")
    write_run(RUNS / "fine1 again", short("FedAvg", "random", 1), [0.6] * 3, data="split 1")
    (RUNS / "begun").mkdir()
    (RUNS / "begun" / "config.yaml").write_text("rounds: 3\n")
    write_run(RUNS / "no settings", short(), [0.5] * 3)
    (RUNS / "no settings" / "config.yaml").write_text("- 1\n")
    write_run(RUNS / "no table", short(), [0.5] * 3)
    (RUNS / "no table" / "metrics.csv").write_text("round,test/acc\n1,x\n")
    write_run(RUNS / "silent", short("FedDC"), [math.nan] * 3)
    (RUNS / "discovery alone").mkdir()
    for name, text in (("config.yaml", "rounds: 3\n"), ("discovery.json", '{"num_domains": 4}')):
        (RUNS / "discovery alone" / name).write_text(text)
    write_run(RUNS / "too long", short("MOON"), [0.5] * 4)
    write_run(RUNS / "too good", short("MOON"), [0.5, math.inf, 0.5])
    for name, text in (("no m", "{}"), ("no record", "[4]")):
        write_run(RUNS / name, short("MOON", "random"), [0.5] * 3)
        (RUNS / name / "discovery.json").write_text(text)
    write_run(RUNS / "no phase 1", short("MOON", "random"), [0.5] * 3)
    (RUNS / "no phase 1" / "discovery.json").unlink()
    write_run(RUNS / "endless", short(rounds=math.inf), [0.5] * 3)
    found = left_out()
    assert set(found) == {
        "discovery alone",
        "too long",
        "too good",
        "no m",
        "no record",
        "no phase 1",
        "endless",
        "half",
        "other images",
        "fine1 again",
        "begun",
        "no settings",
        "no table",
        "silent",
    }
    assert found["half"] == "unfinished: 2 of 3 rounds"
    assert "other images, or dealt out otherwise, than in the 2 runs of seed 0" in found["other images"]
    assert found["fine1 again"] == "repeats runs/fine1: the same settings and seed, with another best round"
    assert "no metrics.csv" in found["begun"]
    assert "a discovery alone" in found["discovery alone"]
    assert found["too long"] == "its metrics.csv has 4 rounds but its config.yaml 3"
    assert found["too good"] == "its metrics.csv has an accuracy that is not between 0 and 1"
    assert "no m/discovery.json cannot be read: num_domains: Field required" in found["no m"]
    assert "no record/discovery.json cannot be read" in found["no record"]
    assert found["no phase 1"] == "it has no discovery.json, which says the number of pseudo-domains"
    assert "not one of a run: OverflowError" in found["endless"]
    assert "it holds no settings" in found["no settings"]
    assert "cannot be read" in found["no table"]
    assert found["silent"] == "no round was evaluated"
    for name in ("report.md", "report.html", "report.tex"):
        text = Path("report", name).read_text()
        assert all(folder in text for folder in found), name


def test_where_images_differ_and_none_has_a_majority_none_is_kept() -> None:
    for name, data in (("random", "these"), ("graded", "those")):
        write_run(RUNS / name, short("FedAvg", name, 0), [0.5] * 3, data=data)
    write_run(RUNS / "base", short("FedAvg", "base", 0), [0.5] * 3)
    found = left_out()
    assert set(found) == {"graded", "random"}
    assert all("no majority agrees" in reason for reason in found.values())


def test_a_baseline_of_other_images_is_left_out() -> None:
    """It has no discovery.json: its checkpoint says what it was trained on."""
    for name in ("random", "graded"):
        write_run(RUNS / name, short("FedAvg", name, 0), [0.5] * 3, data="these")
    for name, data, lr in (("base", "these", 0.01), ("other", "those", 0.1)):
        folder = write_run(RUNS / name, short("FedAvg", "base", 0, lr=lr), [0.5] * 3)
        Checkpoints(folder, 1).save({"weights": {}}, CheckpointHeader(3, {}, data, None, {}, "", None, {}))
    assert list(left_out()) == ["other"]


def test_runs_at_any_depth_and_w_and_b_files() -> None:
    write_run(RUNS / "deep" / "deeper" / "a", short(), [0.5] * 3)
    write_run(RUNS / "b", short(seed=1), [0.5] * 3)
    inner = RUNS / "b" / "wandb" / "run-1" / "files"
    inner.mkdir(parents=True)
    (inner / "config.yaml").write_text("x: 1\n")
    (RUNS / "circle").symlink_to(RUNS.absolute())
    assert find_run_folders([RUNS, RUNS / "b", RUNS / "deep"]) == [RUNS / "b", RUNS / "deep" / "deeper" / "a"]


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    write_run(Path("unfinished"), short(), [0.5])
    write_run(RUNS / "a", short(), [0.5] * 3)
    Path("mine").mkdir()
    (Path("mine") / "report.html").write_text("<html>my own page</html>")
    Path("file").touch()
    before = sorted(Path.cwd().rglob("*"))
    for arguments, named in (
        ([], "RUNS"),
        (["nowhere"], "no folder nowhere"),
        (["file"], "no folder file"),
        (["empty"], "empty has no config.yaml"),
        (["unfinished"], "unfinished: 1 of 3 rounds"),
        (["runs", "nowhere"], "nowhere"),
        (["runs", "--output", "mine"], "--output"),
        (["runs", "--output", "runs/a"], "--output"),
        (["runs", "--output", "file"], "--output"),
        (["runs", "--output", "file/x"], "--output"),
        (["runs", "--target", "70"], "--target"),
        (["runs", "--target", "0"], "--target"),
        (["runs", "--target", "nan"], "--target"),
        (["runs", "--target", "much"], "--target"),
        (["runs", "--nonsense"], "--nonsense"),
    ):
        assert main(["report", *arguments]) == 2, arguments
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert named in err
        assert sorted(Path.cwd().rglob("*")) == before


def test_an_earlier_report_is_replaced_and_other_files_stay() -> None:
    write_run(RUNS / "a", short("FedAvg", "hard"), [0.5] * 3)
    write_run(Path("more") / "a", short("FedAvg", "base"), [0.5] * 3)
    report()
    assert Path("report/report-1-ablation.png").exists()
    Path("report/notes.txt").write_text("mine")
    assert main(["report", "more"]) == 0
    assert not Path("report/report-1-ablation.png").exists()
    assert Path("report/notes.txt").read_text() == "mine"
    assert "hard" not in Path("report/report.csv").read_text()


def test_a_report_that_was_cut_off_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(RUNS / "a", short(), [0.5] * 3)
    with monkeypatch.context() as patch:
        patch.setattr(write, "render", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_report([RUNS], Path("report"))
    (Path("report") / "report.md").touch()
    (Path("report") / ".report.csv.1.tmp").touch()
    report()
    assert Path("report/report.html").exists()


@pytest.mark.parametrize("names", [["report-1-accuracy.png", "notes.txt"], ["report.tex"], ["report.html"]])
def test_files_of_ones_own_are_not_taken_for_a_report_that_was_cut_off(names: list[str]) -> None:
    write_run(RUNS / "a", short(), [0.5] * 3)
    Path("mine").mkdir()
    for name in names:
        (Path("mine") / name).write_text("mine")
    assert main(["report", "runs", "--output", "mine"]) == 2
    assert [(Path("mine") / name).read_text() for name in names] == ["mine"] * len(names)


def raise_interrupt(*_: object, **__: object) -> str:
    raise KeyboardInterrupt


class Reader(HTMLParser):
    """Collects tags, cells, and what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.alts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                self.addresses.append(str(value))
            elif name == "alt":
                self.alts.append(str(value))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.slow
def test_formats_of_a_whole_study() -> None:
    write_study(RUNS)
    assert main(["report", "runs"]) == 0
    reader = Reader()
    reader.feed(Path("report/report.html").read_text())
    assert reader.tags.count("table") == 5  # accuracy, domains, M, cost, left out
    assert reader.tags.count("img") == 3
    assert not {"script", "iframe", "object"} & set(reader.tags)
    assert all(address.startswith("data:") for address in reader.addresses)
    assert all("FedAvg graded" in alt for alt in reader.alts)
    assert len(reader.alts) == 3
    markdown = Path("report/report.md").read_text()
    pictures = re.findall(r"\]\((\S+\.png)\)", markdown)
    assert len(pictures) == 3
    assert all((Path("report") / name).exists() for name in pictures)
    widths = [{line.count("|") for line in block.splitlines()} for block in markdown.split("\n\n") if block[0] == "|"]
    assert [len(counts) for counts in widths] == [1] * 5
    assert markdown.count("**") // 2 == 3 + 3 + 1  # one of each algorithm in two tables, one in the table of M
    latex = Path("report/report.tex").read_text()
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 5
    for block in re.findall(r"\\begin\{tabular\}(.*?)\\end\{tabular\}", latex, re.DOTALL):
        assert len({len(re.findall(r"(?<!\\)&", line)) for line in block.splitlines() if line.endswith(r" \\")}) == 1
    with Path("report/report.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    for line in rows:
        if line["quantity"] == "accuracy" and not line["domain"] and line["table"] == "main":
            mean = f"{100 * float(line['mean']):.2f} ± {100 * float(line['std']):.2f}"
            assert mean in markdown
            assert mean in " ".join(reader.texts)
            assert mean.replace("±", r"$\pm$") in latex


def test_a_printed_gain_of_nothing_is_a_gain_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = published.Result("FedAvg", "random", 67.9, 0.0)
    monkeypatch.setattr(published, "find_result", lambda *_: printed)
    write_run(RUNS / "a", short("FedAvg", "random"), [0.5] * 3)
    assert report()[0]["paper_gain"] == "0.0"
    assert "67.90 (+0.00)" in Path("report/report.md").read_text()


def test_latex_has_what_differs_in_notes_below() -> None:
    """Rows that differ in the same share a note; the table itself has no column of sentences."""
    for seed in (0, 1):
        write_run(RUNS / f"a{seed}", short("FedAvg", "base", seed), [0.5] * 3)
        write_run(RUNS / f"b{seed}", short("FedAvg", "random", seed), [0.5 + seed / 9] * 3, data=str(seed))
        write_run(RUNS / f"c{seed}", short("FedAvg", "random", seed, phi=0.5), [0.5] * 3, data=str(seed))
    report()
    latex = Path("report/report.tex").read_text()
    table = latex.split(r"\end{table}")[0]
    tabular, notes = table.split(r"\end{tabular}")
    assert "rounds" not in tabular
    assert re.findall(r"\^\{(\d)\}\$ \\\\", tabular) == ["1", "2", "1"]  # base, phi 0.5, phi 1
    assert "$^{1}$ differs from the paper: rounds 3 (paper 150), seeds 2 (paper 3)." in notes
    assert "$^{2}$ differs from the paper: rounds 3 (paper 150), seeds 2 (paper 3), phi 0.5 (paper 1)." in notes
    for block in latex.split(r"\begin{table}")[1:]:
        assert block.count("{") - block.count(r"\{") == block.count("}") - block.count(r"\}")


def test_several_experiments_are_in_one_table_first() -> None:
    """Setting A: base 0.5, random 0.6 and so 10 points more; setting B: base 0.7, graded with two temperatures."""
    write_run(RUNS / "a", short(epochs=1, client_fraction=1.0), [0.5] * 3)
    write_run(RUNS / "b", short("FedAvg", "random", epochs=1, client_fraction=1.0), [0.6] * 3)
    write_run(RUNS / "c", short(), [0.7] * 3)
    for tau, best in ((0.1, 0.65), (0.5, 0.72)):
        write_run(RUNS / f"d{tau}", short("FedAvg", "graded", tau=tau), [best] * 3)
    report()
    part = Path("report/report.md").read_text().split("## ")[2]
    assert part.split("\n\n")[2].splitlines() == [
        "| algorithm | supervision | settings | PACS, setting A | PACS, setting B |",
        "| :--- | :--- | :--- | ---: | ---: |",
        "| FedAvg | base | - | 50.00 | 70.00 |",
        "| FedAvg | graded | tau 0.1 | - | 65.00 (-5.00) |",
        "| FedAvg | graded | tau 0.5 | - | **72.00 (+2.00)** |",
        "| FedAvg | random | - | **60.00 (+10.00)** | - |",
    ]


def test_experiments_of_one_name_say_what_they_differ_in() -> None:
    for size in (16, 32):
        settings = short()
        settings["data"] = data("DigitsDomains", size, 10)
        write_run(RUNS / str(size), settings, [0.5] * 3)
    assert [section.title for section in sections()] == ["DigitsDomains, size 16", "DigitsDomains, size 32"]


NASTY = "<b>&_%"


def test_names_from_folders_are_escaped() -> None:
    settings = short("FedAvg$^", "base")
    write_run(RUNS / "<i>x|y", settings, [0.5] * 3, {NASTY: 0.25, "{}~\\#": 0.5})
    write_run(RUNS / "<script>alert(1)</script>".replace("/", "_"), short(), [0.5])
    report()
    reader = Reader()
    reader.feed(Path("report/report.html").read_text())
    assert not {"b", "i", "script"} & set(reader.tags)
    assert NASTY in reader.texts
    latex = Path("report/report.tex").read_text()
    assert r"\textless{}b\textgreater{}\&\_\%" in latex
    assert r"\{\}\textasciitilde{}\textbackslash{}\#" in latex
    assert r"FedAvg\$\textasciicircum{}" in latex
    markdown = Path("report/report.md").read_text()
    assert r"\<b\>\&\_%" in markdown
    assert "<script>" not in markdown
    with Path("report/report.csv").open(newline="") as lines:
        assert NASTY in {line["domain"] for line in csv.DictReader(lines)}


@given(st.text(max_size=30))
def test_escapes_leave_nothing_active(text: str) -> None:
    """Every character that means something is behind a backslash, and no text ends a line."""
    markdown, latex = escape_markdown(text), escape_latex(text)
    assert not re.search(r"[`*_{}\[\]<>|#!~&$]", re.sub(r"\\.", "", markdown))
    rest = re.sub(r"\\text\w+\{\}|\$(-|\\pm|\\surd)\$|\{[\[\]]\}|\\[&%$#_{}]|\\ldots\{\}|-\{\}", "", latex)
    assert not re.search(r"[\\&%$#_{}~^<>|\[\]]", rest)
    assert "--" not in latex
    assert all(ord(character) < 256 and character not in "«»ÐðÞþ" for character in latex)
    assert "\n" not in markdown + latex
    assert "\r" not in markdown + latex


@pytest.mark.slow
@examples(5)
@given(st.randoms(use_true_random=False))
def test_the_order_of_runs_does_not_matter(chance: random.Random) -> None:
    if not RUNS.exists():
        for seed in range(2):
            for name in ("base", "random"):
                write_run(
                    RUNS / f"{name}{seed}", short("FedAvg", name, seed), [0.1, 0.5 + seed / 9, 0.2], data=str(seed)
                )
        write_run(RUNS / "twice", short("FedAvg", "base", 0), [0.4] * 3)
        write_run(RUNS / "tie", short("SCAFFOLD", "random", 1), [0.4] * 3, data="tie")
        write_report([RUNS], Path("first"))
    folders = sorted(RUNS.iterdir())
    chance.shuffle(folders)
    write_report(folders, Path("again"))
    for file in Path("first").iterdir():
        assert file.read_bytes() == (Path("again") / file.name).read_bytes(), file.name


def test_real_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """What `fit` writes can be reported: a baseline and a joint run with the same images."""
    for name in ("base", "random"):
        fit(experiment(run_dir=f"runs/{name}", supervision=name))
    lines = report()
    *table, last = capsys.readouterr().out.splitlines()
    assert last == "runs compared: 2, left out: 0; see report/report.html"
    assert {"FedAvg base", "FedAvg random"} <= {cell.strip() for cell in re.split("[┃\n]", "\n".join(table))}
    assert {line["supervision"] for line in lines} == {"base", "random"}
    assert {line["domain"] for line in lines} == {"", "ink", "chalk", "photo", "outline"}
    (judged,) = {line["verdict"] for line in lines} - {""}
    assert judged == "one seed: not judged"
    assert set(read_runs(find_run_folders([RUNS]))[0]["data"]) != {None}


@pytest.mark.slow
def test_upload_to_weights_and_biases() -> None:
    write_pairs([0.5, 0.6], [0.6, 0.7], "hard")
    report("--wandb", "true")
    found = read_offline(Path("report"))
    assert found["name"] == "report"
    keys = {key for line in found["history"] for key in line}
    assert {key.split("/")[0] for key in keys} >= {"report", "report-1-accuracy", "report-1-ablation"}
    report()  # W&B's own folder is no obstacle
