"""Which images decide, which only measure: validation, unseen domains, and what a run says of itself."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from sklearn.metrics import balanced_accuracy_score, confusion_matrix
from torch import Tensor

from helpers import contents, digits, experiment, finished, same
from jdfl_lightning import DigitsDomains, EarlyStopping, PoolBackend, PrivateFedAvg, RoundReport, Run, fit
from jdfl_lightning.callbacks import RunCallback
from jdfl_lightning.cli import main
from jdfl_lightning.client.evaluation import Scores
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.data.loader import BatchLoader
from jdfl_lightning.federation.server import fit_federation
from jdfl_lightning.joint import class_scores, predict_class
from jdfl_lightning.report.details import details_tables, draw_confusion
from jdfl_lightning.server.events import Events
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.storage.names import Selection
from jdfl_lightning.storage.weights import load_model
from jdfl_lightning.ui.display import Display
from jdfl_lightning.ui.loggers import CSVLogger
from jdfl_lightning.ui.tables import as_text
from test_resume import CutAt, CutError

LR = 0.3  # with which a tiny network learns something in three rounds


def held(**options: Any) -> DigitsDomains:
    """Digits with validation images and an unseen domain."""
    given: dict[str, Any] = {"val_fraction": 0.1, "unseen": "ink"} | options
    return DigitsDomains(size=8, num_clients=4, **given)


def settings(**changes: Any) -> dict[str, Any]:
    """Settings of a run with all parts."""
    known = {"data": held(), "rounds": 3, "lr": LR, "client_fraction": 0.5, "supervision": "graded", "num_domains": 2}
    return known | changes


def logits(run: Run, which: Any, loader: BatchLoader) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, labels and domains of all images of a loader, from the saved weights."""
    network, batches = run.model(which), list(loader)
    with torch.inference_mode():
        outputs = torch.cat([network(images) for images, _, _ in batches])
    return outputs, torch.cat([labels for _, labels, _ in batches]), torch.cat([domains for _, _, domains in batches])


# --- which round is the best


def events(select: Selection) -> Events:
    return Events(RunCallback(), select=select)


def told(found: Events, test: float, val: float | None, round: int = 1) -> RoundReport:
    """What is told of a round with these accuracies."""
    further = {} if val is None else {"val": Scores(val, {"a": val})}
    found.round_evaluated(ServerState(round, {}, {}, {}), Scores(test, {"a": test}, further), {})
    assert found._last is not None
    return found._last


@given(st.lists(st.tuples(*[st.floats(0, 1) | st.just(math.nan)] * 2), min_size=1, max_size=6))
def test_the_best_round_is_the_first_with_the_best_validation(pairs: list[tuple[float, float]]) -> None:
    """By a slow search; and a resumed run, which is told the rows again, agrees."""
    running, resumed = events("val"), events("val")
    for number, (test, val) in enumerate(pairs, start=1):
        report = told(running, test, val, number)
        before = [v for _, v in pairs[: number - 1] if not math.isnan(v)]
        assert report.improved == (not math.isnan(val) and all(val > other for other in before))
        known = [(v, -place, t) for place, (t, v) in enumerate(pairs[:number]) if not math.isnan(v)]
        best = max(known, default=(math.nan, 0, math.nan))
        assert str((report.row["val/acc_best"], report.row["test/acc_best"])) == str((best[0], best[2]))
        resumed.repeat([report.row])
        assert resumed._last is not None
        assert resumed._last.improved == report.improved


def test_without_validation_the_test_images_decide_and_the_last_round_by_none() -> None:
    by_test, by_none = events("test"), events("last")
    assert [told(by_test, accuracy, None).improved for accuracy in (0.5, 0.5, 0.4, 0.6)] == [True, False, False, True]
    report = told(by_test, 0.1, None)
    assert list(report.row) == ["round", "test/acc", "test/acc_worst", "test/acc/a", "test/acc_best"]
    assert report.row["test/acc_best"] == 0.6
    assert not told(by_none, 0.5, 0.5).improved
    assert math.isnan(told(by_none, 0.9, 0.9).row["test/acc_best"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"select": "val"}, r"--select to be test or last without --data.val_fraction.* but got 'val'"),
        ({"select": "test", "data": held()}, r"--select to be val or last with --data.val_fraction.* but got 'test'"),
        ({"select": "first"}, r"--select.* but got 'first'"),
        (
            {"select": "test", "algorithm": PrivateFedAvg(), "supervision": "base"},
            r"--select to be last or null with PrivateFedAvg",
        ),
        (
            {"data": held(), "callbacks": [EarlyStopping("test/acc")]},
            r"--callbacks.metric to be val/acc.*as test images decide nothing.* but got 'test/acc'",
        ),
        ({"select": "last", "callbacks": [EarlyStopping()]}, r"--callbacks.metric.* but got 'test/acc'"),
        ({"data": held(), "callbacks": [EarlyStopping("unseen/acc")]}, r"unseen domains decide nothing"),
    ],
)
def test_choices_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        experiment(**changes)


def test_what_is_picked_by_default() -> None:
    assert experiment().selection == "test"
    assert experiment(data=held()).selection == "val"
    assert experiment(data=held(), select="last").selection == "last"
    assert experiment(algorithm=PrivateFedAvg(), supervision="base").selection == "last"


def test_early_stopping_looks_at_validation() -> None:
    stopping = EarlyStopping(patience=1)
    stopping.run_started(Path(), experiment(data=held()))
    for val, test in ((0.5, 0.1), (0.4, 0.9)):
        stopping.round_evaluated(RoundReport({"round": 1, "val/acc": val, "test/acc": test}, False, None))
    assert stopping.reason_to_stop() == "val/acc has not been better than 0.5 for 1 evaluated rounds"
    usual = EarlyStopping(patience=1)
    usual.run_started(Path(), experiment())
    for val, test in ((0.5, 0.1), (0.4, 0.9)):
        usual.round_evaluated(RoundReport({"round": 1, "val/acc": val, "test/acc": test}, False, None))
    assert usual.reason_to_stop() is None


# --- runs


def test_a_run_evaluates_every_part() -> None:
    """Accuracies of all parts, counted again image by image; the best round is that of the validation images."""
    finished("run", **settings())
    run, data = Run.read("run"), held()
    data.deal(0)
    assert run.select == "val"
    assert run.unseen == ["ink"]
    assert run.domains == ["chalk", "photo", "outline"]
    assert run.best["val/acc"] == max(row["val/acc"] for row in run.rows)
    for which, row in run.ends.items():
        for part, loader in (
            ("test", data.test_dataloader()),
            ("val", data.val_dataloader()),
            ("unseen", data.unseen_dataloader()),
        ):
            outputs, labels, domains = logits(run, which, loader)
            right = (predict_class(outputs, 10) == labels).double()
            assert row[f"{part}/acc"] == pytest.approx(right.mean().item(), abs=1e-6)
            for number in domains.unique().tolist():
                name = [*data.domain_names, *data.unseen_names][number]
                assert row[f"{part}/acc/{name}"] == pytest.approx(right[domains == number].mean().item(), abs=1e-6)
    header = load_model(Path("run"), "best").header
    assert header.round == run.best["round"]
    assert header.scores["val/acc"] == run.best["val/acc"]


def test_the_last_round_alone() -> None:
    run = fit(experiment(**settings(select="last", supervision="base", rounds=2, run_dir="run")))
    assert not Path("run/best.safetensors").exists()
    assert run.select == "last"
    assert run.best == run.last
    assert list(run.ends) == ["last"]
    assert json.loads(Path("run/evaluation.json").read_text())["weights"] == "last"
    with pytest.raises(InputError, match="has only its last, as a private run or one with --select last does"):
        run.model("best")


class Spoilt(DigitsDomains):
    """Digits in which some images and labels are changed, after they are loaded.

    Args:
        what: unseen, for the images and labels of ink; test, for the labels of the test images.
        **options: those of every data module.
    """

    def __init__(self, what: str, **options: Any) -> None:
        super().__init__(size=8, num_clients=4, **options)
        self.what = what

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        images, labels, domains = (part.clone() for part in super().load())
        if self.what == "unseen":
            ink = domains == 0
            images[ink] = 255 - images[ink].flip(1)
            labels[ink] = (labels[ink] * 7 + 3) % 10
        return images, labels, domains

    def deal(self, seed: int) -> Any:
        dealt = super().deal(seed)
        if self.what == "test":
            for held_out in dealt.test:
                self.labels[held_out] = (self.labels[held_out] + 5) % 10
        return dealt


@pytest.mark.parametrize("what", ["unseen", "test"])
def test_images_that_only_measure_change_no_weight(what: str) -> None:
    """An unseen domain's images and labels, and the labels of test images, are poisoned: weights are the same."""
    whole = finished("run", **settings())
    data = Spoilt(what, val_fraction=0.1, unseen="ink")
    other = fit(experiment(**settings(data=data, run_dir="spoilt")))
    for which in ("best", "last"):
        ours, theirs = (load_model(Path(folder), which) for folder in ("run", "spoilt"))
        assert ours.header.round == theirs.header.round
        assert ours.weights.keys() == theirs.weights.keys()
        assert all(torch.equal(tensor, theirs.weights[name]) for name, tensor in ours.weights.items())
    first, second = (json.loads(Path(run, "discovery.json").read_text()) for run in ("run", "spoilt"))
    assert first["assignments"] == second["assignments"]
    assert first["similarities"] == second["similarities"]
    part = "unseen/acc" if what == "unseen" else "test/acc"
    assert [row[part] for row in whole.rows] != [row[part] for row in other.rows]  # else nothing was poisoned
    same_columns = {"val/acc", "test/acc", "train/loss"} - {part}
    for column in same_columns:
        assert [row[column] for row in whole.rows] == [row[column] for row in other.rows]


def test_resumed_is_uninterrupted() -> None:
    """With all parts, rounds without evaluation, details and rows of clients."""
    changes = settings(rounds=4, evaluate_every=2, seed_everything=1)
    finished("whole", **changes)
    with pytest.raises(CutError):
        fit(experiment(run_dir="cut", **changes), CutAt(9))
    fit(experiment(resume="cut", **changes))
    ours = contents("cut")
    assert ours == contents("whole")
    assert {"data.json", "evaluation.json", "clients.csv", "confusion.csv", "confusion-unseen.csv"} <= set(ours)
    assert [math.isnan(float(row["val/acc"])) for row in ours["rows"]] == [True, False, True, False]


@pytest.mark.slow
def test_a_pool_agrees() -> None:
    changes = settings(rounds=2)
    finished("local", **changes)
    fit(experiment(run_dir="pool", **(changes | {"backend": PoolBackend(workers=2, threads=1)})))
    assert same("local", "pool")


def test_sites_refuse_what_they_cannot_evaluate() -> None:
    for options, flag in (({"unseen": None}, "val_fraction"), ({"val_fraction": 0.0}, "unseen")):
        with pytest.raises(InputError, match=f"--data.{flag} to be .* in a federation, whose sites evaluate test"):
            fit_federation(experiment(data=held(**options)), None, Display())  # type: ignore[arg-type]


# --- what a run leaves


def ece(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error, bin by bin."""
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    total = 0.0
    for number in range(bins):
        inside = (confidence > number / bins) & (confidence <= (number + 1) / bins)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return total


def test_details_are_those_of_other_libraries() -> None:
    finished("run", **settings())
    run, data = Run.read("run"), held()
    data.deal(0)
    details = json.loads(Path("run/evaluation.json").read_text())
    assert (details["weights"], details["round"], details["score"]) == ("best", run.best["round"], "max")
    for part, loader in (("test", data.test_dataloader()), ("unseen", data.unseen_dataloader())):
        outputs, labels, domains = logits(run, "best", loader)
        predicted, found = predict_class(outputs, 10), details[part]
        matrix = confusion_matrix(labels, predicted, labels=range(10))
        file = "confusion.csv" if part == "test" else "confusion-unseen.csv"
        with Path("run", file).open(newline="") as lines:
            header, *rows = list(csv.reader(lines))
        assert header[1:] == [row[0] for row in rows] == list(data.class_names)
        assert [[int(cell) for cell in row[1:]] for row in rows] == matrix.tolist()
        assert found["accuracy"] == run.best[f"{part}/acc"]
        assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, predicted), abs=1e-6)
        assert list(found["classes"].values()) == pytest.approx((matrix.diagonal() / matrix.sum(axis=1)).tolist())
        for score in ("max", "sum"):
            probabilities = class_scores(outputs, 10, score).softmax(dim=1).numpy()
            assert found["calibration_error"][score] == pytest.approx(ece(probabilities, labels.numpy()), abs=1e-5)
        names, each = [*data.domain_names, *data.unseen_names], []
        for number in domains.unique().tolist():
            chosen = outputs[domains == number].argmax(dim=1) // 10
            domain = found["domains"][names[number]]
            assert domain["pseudo_domains"] == pytest.approx([(chosen == m).double().mean().item() for m in (0, 1)])
            each.append(domain["accuracy"])
        assert found["mean_over_domains"] == pytest.approx(np.mean(each))
        assert (found["std_over_domains"] is None) == (part == "unseen")
    assert found["std_over_domains"] is None
    assert details["test"]["std_over_domains"] == pytest.approx(
        np.std([domain["accuracy"] for domain in details["test"]["domains"].values()], ddof=1)
    )


class Diary(RunCallback):
    """Writes down who took part in which round, and with what loss."""

    def round_aggregated(self, state: ServerState, metrics: dict[str, float]) -> None:
        with Path("diary.txt").open("a") as file:
            file.write(f"{json.dumps(state.taken)}\n")


def test_a_row_for_each_client() -> None:
    run = fit(experiment(**settings(run_dir="run", callbacks=[Diary()])))
    with Path("run/clients.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    data = held()
    data.deal(0)
    assert [int(row["samples"]) for row in rows] == data.partition.sizes
    assert [row["domain"] for row in rows] == data.true_domains
    assert run.discovery is not None
    assert [int(row["pseudo_domain"]) for row in rows] == run.discovery.clients["pseudo_domain"].tolist()
    assert sum(int(row["rounds"]) for row in rows) == sum(row["clients"] for row in run.rows)
    for row in rows:
        assert float(row["accuracy"]) == run.best[f"test/acc/{row['domain']}"]
    after = [json.loads(line) for line in Path("diary.txt").read_text().splitlines()]
    sizes = data.partition.sizes
    for number, (before, now) in enumerate(
        zip([{}, *after], after, strict=False)
    ):  # a round's loss is its clients' mean
        took_part = [c for c in now if now[c][0] > before.get(c, [0])[0]]
        weights = [sizes[int(client)] for client in took_part]
        mean = np.average([now[client][1] for client in took_part], weights=weights)
        assert run.rows[number]["train/loss"] == pytest.approx(mean)
    assert {c: (int(rows[int(c)]["rounds"]), float(rows[int(c)]["loss"])) for c in after[-1]} == {
        c: tuple(found) for c, found in after[-1].items()
    }


def test_a_private_run_does_not_say_who_took_part() -> None:
    fit(experiment(algorithm=PrivateFedAvg(), supervision="base", run_dir="run"))
    with Path("run/clients.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {(row["rounds"], row["loss"]) for row in rows} == {("", "")}


def test_what_a_run_is_made_of() -> None:
    finished("run", **settings())
    about = json.loads(Path("run/data.json").read_text())
    data = held()
    assert about["protocol"].pop("name") == "validation 0.1, unseen ink"
    assert about["protocol"].pop("select") == "val"
    assert about == json.loads(json.dumps(data.describe()))


def test_rows_of_clients_and_details_are_logged() -> None:
    fit(experiment(supervision="base", run_dir="run", logger=CSVLogger()))
    (file,) = Path("run").glob("csv/*/metrics.csv")
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    samples = [float(row["final/clients/0/samples"]) for row in rows if row["final/clients/0/samples"]]
    assert samples == [digits().partition.sizes[0]]
    details = json.loads(Path("run/evaluation.json").read_text())
    logged = [float(row["final/test/ece_sum"]) for row in rows if row["final/test/ece_sum"]]
    assert logged == [details["test"]["calibration_error"]["sum"]]


def test_an_evaluation_again_writes_the_details(capsys: pytest.CaptureFixture[str]) -> None:
    finished("run", **settings())
    before = {name: Path("run", name).read_bytes() for name in ("evaluation.json", "confusion.csv")}
    for name in before:
        Path("run", name).unlink()
    assert main(["test", "--run", "run"]) == 0
    assert {name: Path("run", name).read_bytes() for name in before} == before
    said = capsys.readouterr().out
    assert "balanced accuracy" in said
    assert "ink (unseen)" in said
    assert "calibration error, sum" in said


@pytest.mark.parametrize("count", [3, 30, 60])
def test_the_figure_of_a_confusion_matrix(count: int) -> None:
    """Numbers and names where they can be read."""
    matrix = torch.randint(0, 9, (count, count)).tolist()
    figure = draw_confusion({"test": matrix, "unseen": matrix}, [f"class ${n}" for n in range(count)])
    for axes in figure.axes[:2]:
        numbers = [text.get_text() for text in axes.texts]
        assert numbers == ([str(number) for row in matrix for number in row] if count <= 20 else [])
        assert len(axes.get_yticks()) == (count if count <= 40 else 0)
        (picture,) = axes.images
        shares = np.asarray(matrix) / np.maximum(1, np.sum(matrix, axis=1, keepdims=True))
        np.testing.assert_allclose(np.asarray(picture.get_array()), 100 * shares)
    figure.canvas.draw()  # a dollar sign begins no formula


def test_tables_of_details() -> None:
    part = {
        "accuracy": 0.5,
        "balanced_accuracy": 0.25,
        "mean_over_domains": 0.5,
        "std_over_domains": None,
        "calibration_error": {"max": 0.125, "sum": 0.0625},
        "classes": {"dog": 1.0, "cat": None},
        "domains": {"photo": {"images": 4, "accuracy": 0.5, "pseudo_domains": [0.75, 0.25]}},
    }
    details = {"weights": "best", "round": 7, "score": "max", "test": part}
    first, second = map(as_text, details_tables(details))
    assert "best weights, round 7" in first
    for line in ("calibration error, sum +6.25", "class dog +100.00", "class cat +-", "balanced accuracy +25.00"):
        assert re.search(line, first), line
    assert re.search("photo +4 +75.00 +25.00", second)
    plain = part | {"domains": {"photo": {"images": 4, "accuracy": 0.5, "pseudo_domains": [1.0]}}}
    assert len(details_tables(details | {"test": plain})) == 1  # there is nothing to choose


def test_tables_are_plain_text_where_colours_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, whose kernel sets this variable."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    table = Table("domain", "images", title="digits")
    table.add_row("ink", "3")
    assert [line.split() for line in as_text(table).splitlines()] == [["digits"], ["domain", "images"], ["ink", "3"]]
