"""The published values: complete, consistent with each other, and marked where they cannot be right."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from jdfl_lightning.config import Experiment, parse_experiment
from jdfl_lightning.data import PACS, OfficeCaltech
from jdfl_lightning.report import published
from jdfl_lightning.supervision import Graded

PACS_SIZES = {"art_painting": 205, "cartoon": 235, "photo": 167, "sketch": 393}
OFFICE_SIZES = {"amazon": 192, "caltech": 225, "dslr": 32, "webcam": 59}
SIZES = {"office_caltech": OFFICE_SIZES} | {f"pacs_{name}": PACS_SIZES for name in "abc"}
ALGORITHMS = ["FedAvg", "SCAFFOLD", "FedDyn", "FedDC", "FedProc"]
ROUNDING = 0.01 + 1e-9
"""A seed's accuracy is rounded to 0.01, and so is the mean of three: each is off by half of that at most."""


@pytest.mark.parametrize("experiment", published.TITLES)
def test_tables_are_complete(experiment: str) -> None:
    rows = published.domain_results(experiment)
    assert [(row.algorithm, row.supervision) for row in rows] == [
        (algorithm, supervision) for algorithm in ALGORITHMS for supervision in ("base", "graded", "random")
    ]
    names = (OfficeCaltech if experiment == "office_caltech" else PACS).domain_names
    assert all(tuple(row.domains) == tuple(names) for row in rows)


def test_grids_are_complete() -> None:
    assert set(published.ablation()) == {
        (e, s) for e in ("office_caltech", "pacs_b") for s in ("base", "hard", "graded", "random")
    }
    curve = published.num_domains_curve()
    assert set(curve) == {("base", 1)} | {(s, m) for s in ("graded", "random") for m in range(2, 8)}
    grid = {(e, b, layers) for e in range(1, 6) for b in (16, 32, 64) for layers in "ABC"}
    assert set(published.ari_grid()) == grid
    assert all(0.6 < value < 1 for value in published.ari_grid().values())
    elbow = published.elbow_grid()
    assert set(elbow) == {(n, *key) for n in (10, 40) for key in grid}
    seeds = published.DISCOVERY_SEEDS
    assert all(abs(value * seeds - round(value * seeds)) < 1e-9 for value in elbow.values())


def test_tables_agree_with_each_other() -> None:
    main = published.main_table()
    assert len(main) == 60
    for experiment in published.TITLES:
        for row in published.domain_results(experiment):
            assert main[experiment, row.algorithm, row.supervision] == (row.overall, row.gain)
            base = main[experiment, row.algorithm, "base"][0]
            assert row.gain == (None if row.supervision == "base" else pytest.approx(row.overall - base, abs=1e-9))
    for (experiment, supervision), value in published.ablation().items():
        if supervision != "hard":
            assert main[experiment, "FedAvg", supervision][0] == value
    assert published.num_domains_curve()["base", 1] == main[published.M_CURVE, "FedAvg", "base"][0]


def recomputed_marks(row: published.Result, sizes: dict[str, int]) -> set[str]:
    """Cells that are no count of images over three seeds; if all are, whether they add up."""

    def is_count(value: float, images: int) -> bool:
        return abs(100 * round(value * 3 * images / 100) / (3 * images) - value) <= ROUNDING

    total = sum(sizes.values())
    cells = [("overall", row.overall, total), *((name, row.domains[name], size) for name, size in sizes.items())]
    marks = {name for name, value, images in cells if not is_count(value, images)}
    mean = sum(size * row.domains[name] for name, size in sizes.items()) / total
    return marks or ({"sum"} if abs(mean - row.overall) > 2 * ROUNDING else set())


@pytest.mark.parametrize("experiment", published.TITLES)
def test_marks_are_exactly_what_cannot_be_right(experiment: str) -> None:
    for row in published.domain_results(experiment):
        assert row.doubtful == recomputed_marks(row, SIZES[experiment]), row


def test_marks_catch_a_wrong_digit() -> None:
    """SCAFFOLD's base in B: 46.99 % of 615 is 289 images, 47.99 would be 295.1, 46.83 is 288 and adds up to less."""
    row = published.find_result("pacs_b", "SCAFFOLD", "base")
    assert row is not None
    assert not row.doubtful
    for value, marks in ((47.99, {"art_painting"}), (46.83, {"sum"})):
        wrong = published.Result("SCAFFOLD", "base", row.overall, None, {**row.domains, "art_painting": value})
        assert recomputed_marks(wrong, PACS_SIZES) == marks


def test_heads_and_not_captions_name_the_columns() -> None:
    """The captions of B and C say photo, art, cartoon, sketch: so weighted, every row is off by more than 0.4."""
    sizes = [PACS_SIZES[name] for name in ("photo", "art_painting", "cartoon", "sketch")]
    for experiment in ("pacs_b", "pacs_c"):
        for row in published.domain_results(experiment):
            mean = sum(size * value for size, value in zip(sizes, row.domains.values(), strict=True)) / 1000
            assert abs(mean - row.overall) > 0.4


def test_doubts() -> None:
    webcam = published.find_result("office_caltech", "FedAvg", "base")
    assert webcam is not None
    assert webcam.doubts("webcam")
    assert not webcam.doubts("overall")
    unclear = published.find_result("pacs_c", "FedProc", "base")
    assert unclear is not None
    assert unclear.doubts("overall")
    assert unclear.doubts("photo")


def test_what_is_not_published() -> None:
    assert published.find_result("pacs_a", "FedAvg", "hard") is None
    assert published.find_result("pacs_b", "SCAFFOLD", "hard") is None
    assert published.find_result("pacs_b", "FedAvg", "hard") == published.Result("FedAvg", "hard", 67.80)
    assert published.find_experiment("PACS", 10, 3, 0.5) is None
    assert published.find_experiment("DigitsDomains", 10, 5, 0.5) is None
    assert "algorithm.alpha" not in published.stated_settings("pacs_c", "FedDC")


@pytest.mark.parametrize("name", published.TITLES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_settings_are_those_of_the_configs(name: str, algorithm: str, tmp_path: Path) -> None:
    """The config files say what the paper says; more rounds with FedProc and FedDC's alpha are comments there."""
    arguments = ["--config", name, "--algorithm", algorithm, "--data.root", str(tmp_path)]
    if (name, algorithm) == ("pacs_a", "FedDC"):
        arguments += ["--algorithm.alpha", "0.01"]
    experiment = parse_experiment("test", arguments)
    for setting, value in published.stated_settings(name, algorithm).items():
        if setting == "seeds" or (setting == "rounds" and algorithm == "FedProc"):
            continue
        assert _value_of(experiment, setting) == value, setting
    key = (type(experiment.data).__name__, experiment.data.num_clients, experiment.epochs, experiment.client_fraction)
    assert published.find_experiment(*key) == name


def _value_of(experiment: Experiment, setting: str) -> object:
    value: object = experiment
    if setting == "clustering.criterion":
        return experiment.clustering.criterion.name
    if setting == "supervision.tau":
        return Graded().tau
    for part in setting.split("."):
        value = getattr(value, part)
    return type(value).__name__ if setting == "data" else value


@pytest.fixture
def paper() -> str:
    """The paper's source, if `JDFL_PAPER` names it."""
    file = os.environ.get("JDFL_PAPER")
    if not file:
        pytest.skip("JDFL_PAPER does not name the paper's .tex file")
    return Path(file).read_text()


def part(text: str, begin: str, end: str) -> str:
    return text[text.index(begin) :].partition(end)[0]


def test_paper_domain_tables(paper: str) -> None:
    labels = {"office_caltech": "office_e1", "pacs_a": "pacs_e1", "pacs_b": "pacs_e2", "pacs_c": "pacs_e3"}
    for experiment, label in labels.items():
        lines = part(paper, f"label{{tab:{label}}}", "end{tabular}").splitlines()
        printed = [re.findall(r"\d+\.\d+", line) for line in lines if "standalone" in line or "JDFL" in line]
        rows = published.domain_results(experiment)
        assert len(printed) == len(rows)
        for row, cells in zip(rows, printed, strict=True):
            gain = [] if row.gain is None else [row.gain]
            assert [float(cell) for cell in cells] == [row.overall, *gain, *row.domains.values()]


def test_paper_main_table(paper: str) -> None:
    lines = [
        line for line in part(paper, "label{tab:all_exp}", "end{tabular*}").splitlines() if re.search(r"\d\.", line)
    ]
    assert len(lines) == 15
    main = published.main_table()
    kinds = [(algorithm, s) for algorithm in ALGORITHMS for s in ("base", "graded", "random")]
    for (algorithm, supervision), line in zip(kinds, lines, strict=True):
        assert line.split()[0 if supervision == "base" else 1] == (algorithm if supervision == "base" else supervision)
        for experiment, cell in zip(published.TITLES, line.split("&")[1:], strict=True):
            accuracy, gain = main[experiment, algorithm, supervision]
            assert [float(n) for n in re.findall(r"\d+\.\d+", cell)] == [accuracy] + ([] if gain is None else [gain])


def test_paper_figures(paper: str) -> None:
    bars = [
        re.findall(r", (\d+\.\d+)\)", plot) for plot in re.findall(r"addplot coordinates \{(.*?)\};", paper, re.DOTALL)
    ]
    assert [float(value) for plot in bars for value in plot] == list(published.ablation().values())
    plots = re.findall(
        r"coordinates \{(.*?)\};", part(paper, "Number of Pseudo-Domains (M)}", "legend{Random"), re.DOTALL
    )
    points = [[(int(m), float(v)) for m, v in re.findall(r"\((\d),([\d.]+)\)", plot)] for plot in plots]
    curve = published.num_domains_curve()
    for supervision, found in zip(("random", "graded"), points[:2], strict=True):
        assert found == [(m, curve[supervision, m]) for m in range(2, 8)]
    assert {value for _, value in points[2]} == {curve["base", 1]}


def test_paper_grids(paper: str) -> None:
    columns = [(batch, layers) for batch in (16, 32, 64) for layers in "ABC"]
    heat = re.findall(r"(?m)^\s*(\d) (&.*?)\\\\", part(paper, "& b16-A", "bottomrule"), re.DOTALL)
    read = {
        (int(epochs), *column): float(value)
        for epochs, cells in heat
        for column, value in zip(columns, re.findall(r"\}(0\.\d+)", cells), strict=True)
    }
    assert read == published.ari_grid()
    table = part(paper, "label{tab:elbow_reliability_compact}", "bottomrule")
    elbow = {}
    for clients, block in ((10, part(table, "{10 clients}", "{40 clients}")), (40, part(table, "{40 clients}", "end"))):
        for epochs, cells in re.findall(r"(?m)^\s*(\d) (&.*?)\\\\$", block):
            for column, value in zip(columns, re.findall(r"(\d+)\\%", cells), strict=True):
                elbow[(clients, int(epochs), *column)] = int(value) / 100
    assert elbow == published.elbow_grid()
