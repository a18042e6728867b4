"""The package as a Python user meets it: functions with plain arguments, and what they return."""

from __future__ import annotations

import csv
import pkgutil
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import IPython.display
import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import jdfl_lightning
import run_folders
from helpers import digits, experiment, finished, tiny_net
from jdfl_lightning import (
    Discovery,
    EarlyStopping,
    FedAvg,
    FedProx,
    PoolBackend,
    Run,
    discover,
    evaluate,
    fit,
    predict,
    suite,
    tensors,
    to_input,
    write_report,
)
from jdfl_lightning.cli import main
from jdfl_lightning.cli.main import add_own_modules
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.data.cache import decode
from jdfl_lightning.report.run import Drawing
from jdfl_lightning.storage.records import load_record
from jdfl_lightning.ui.display import NotebookDisplay, default_display, open_display
from test_cli import METRICS

STUB = Path(jdfl_lightning.__file__).with_suffix(".pyi").read_text()


def stranger(folder: str) -> Path:
    """Make a run folder look as if it came from somebody else."""
    config = Path(folder) / "config.yaml"
    config.write_bytes(config.read_bytes().partition(b"\n")[2])
    return Path(folder)


# --- names ----------------------------------------------------------------------------------------------------------


def test_one_list_of_names() -> None:
    exported = re.findall(r"^    (\w+) as (\w+),$|import (.*)$", STUB, re.MULTILINE)
    names = [first for first, _, _ in exported if first]
    names += [name for *_, line in exported for name in re.findall(r"(\w+) as \1", line)]
    assert sorted(names) == jdfl_lightning.__all__
    assert tensors.add is jdfl_lightning.core.tensors.add


def test_no_name_is_that_of_a_subpackage() -> None:
    """`from jdfl_lightning import report` would give the subpackage, once something has imported it."""
    assert not {module.name for module in pkgutil.iter_modules(jdfl_lightning.__path__)} & set(jdfl_lightning.__all__)


# --- a run ----------------------------------------------------------------------------------------------------------


def test_a_run_is_tables_and_figures() -> None:
    finished("run")
    run = Run.read("run")
    with Path("run/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert run.metrics.index.name == "round"
    assert run.metrics.index.tolist() == [1, 2]
    assert run.metrics["test/acc"].tolist() == [float(row["test/acc"]) for row in rows]
    assert run.metrics.loc[2].to_dict() == {name: value for name, value in run.last.items() if name != "round"}
    assert run.best["test/acc"] == run.metrics["test/acc"].max()
    assert run.config["rounds"] == 2
    assert isinstance(run.plot(), Drawing)
    assert isinstance(run.discovery, Discovery)
    assert repr(run).startswith("Run(run, 2 rounds")


def test_a_run_in_a_notebook_is_a_table_and_a_picture() -> None:
    """Names of domains are somebody's folders: they are escaped."""
    settings = run_folders.config() | {"supervision": "base"}
    run_folders.write_run(Path("run"), settings, [0.5, 0.625, 0.6], {"<script>": 0.25})
    shown = Run.read("run")._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert re.findall(r"<t[dh]>(.*?)</t[dh]>", shown)[-10:] == [
        *("best", "2", "62.50", "62.50", "25.00"),
        *("last", "3", "60.00", "60.00", "25.00"),
    ]
    (picture,) = re.findall(r'<img alt="curves" src="data:image/png;base64,([^"]*)">', shown)
    assert picture.startswith("iVBOR")


def test_a_run_that_a_callback_ended_says_so() -> None:
    run = fit(
        experiment(rounds=3, supervision="base", callbacks=[EarlyStopping("test/acc", patience=1, min_delta=1.0)])
    )
    assert len(run.rows) < 3
    assert run.stop is not None
    assert run.stop == Run.read(run.folder).stop


def test_what_is_missing_is_named() -> None:
    with pytest.raises(InputError, match=r"no config\.yaml"):
        Run.read("nowhere")
    finished("run", supervision="base")
    assert Run.read("run").discovery is None
    with pytest.raises(InputError, match="argument `which` to be 'best' or 'last' but got 'first'"):
        Run.read("run").model("first")  # type: ignore[arg-type]


# --- its network ----------------------------------------------------------------------------------------------------


def test_the_network_is_the_saved_one() -> None:
    """Beside it, the same network put together by hand from the file of its weights."""
    finished("run")
    images = digits().images[:5]
    for which in ("best", "last"):
        weights = load_record(Path(f"run/{which}.safetensors"))[0]["weights"]
        backbone = tiny_net(8)
        backbone.load_state_dict({n.partition(".")[2]: t for n, t in weights.items() if n.startswith("backbone")})
        expected = backbone(to_input(images)) @ weights["head.weight"].T + weights["head.bias"]
        model = Run.read("run").model(which)
        assert not any(part.training for part in model.modules())
        assert model.class_names == list(digits().class_names)
        assert (model.head.num_domains, model.head.num_classes) == (3, 10)
        torch.testing.assert_close(model(to_input(images)), expected)


def test_the_network_prepares_images_as_in_training() -> None:
    finished("run")
    plain, model = Run.read("run").model(), Run.read("run").model(preprocess=True)
    images = digits().images[:3]
    expected = plain(to_input(images))
    files = [f"{number}.png" for number in range(3)]
    for file, pixels in zip(files, images, strict=True):
        Image.fromarray(pixels.numpy()).save(file)
    given: list[Any] = [
        images,
        images.numpy(),
        images.permute(0, 3, 1, 2),
        list(images),
        files,
        [Path(file) for file in files],
        [Image.open(file) for file in files],
    ]
    for several in given:
        assert torch.equal(model(several), expected)
    for one in (images[0], images[0].permute(2, 0, 1).numpy(), "0.png", Image.open("0.png")):
        assert torch.equal(model(one), plain(to_input(images[:1])))
    large = np.random.default_rng(0).integers(0, 255, (50, 30, 3), dtype=np.uint8)
    Image.fromarray(large).save("large.png")
    resized = to_input(torch.from_numpy(np.stack([decode(Path("large.png"), 8)])))
    assert torch.equal(model(large), plain(resized))
    for wrong in (torch.zeros(3, 8, 8), np.zeros((8, 8), np.uint8), np.zeros((2, 8, 8, 4), np.uint8)):
        with pytest.raises(InputError, match="Expected images as uint8 values"):
            model(wrong)
    with pytest.raises(InputError, match="got none"):
        model([])


def test_predictions_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    finished("run")
    images = digits().images[:70]  # more than a batch
    Path("new").mkdir()
    for number, pixels in enumerate(images):
        Image.fromarray(pixels.numpy()).save(f"new/{number:02}.png")
    assert main(["predict", "--run", "run", "new"]) == 0
    written = list(csv.DictReader(StringIO(capsys.readouterr().out)))
    for found in (predict("run", "new"), Run.read("run").predict(["new"])):
        assert list(found) == ["image", "class", "probability", "pseudo_domain"]
        assert found["image"].astype(str).tolist() == [row["image"] for row in written]
        assert found["class"].tolist() == [row["class"] for row in written]
        assert [f"{value:.4f}" for value in found["probability"]] == [row["probability"] for row in written]
    in_memory = predict(Path("run"), images)
    assert in_memory["image"].tolist() == list(range(70))
    assert in_memory["class"].tolist() == found["class"].tolist()
    with pytest.raises(InputError, match="no nothing"):
        predict("run", "nothing")


def test_a_strangers_run_imports_nothing_of_theirs() -> None:
    """The backbone of the tests is no part of the package."""
    finished("run")
    run = Run.read(stranger("run"))
    assert run.metrics.shape[0] == 2
    image = digits().images[0]
    uses: list[Callable[..., Any]] = [
        run.model,
        lambda **how: run.predict(image, **how),
        lambda **how: predict("run", image, **how),
        lambda **how: evaluate("run", **how),
    ]
    for use in uses:
        with pytest.raises(InputError, match=r"names helpers\.tiny_net, which would be imported"):
            use()
        assert use(trust=True) is not None


def test_evaluated_again() -> None:
    run = finished("run")
    found = evaluate("run")
    assert found.index.tolist() == ["best", "last"]
    for which, row in run.ends.items():
        assert found.loc[which].to_dict() == {name: row[name] for name in found}
    assert set(evaluate(run, score="sum")) == set(found)
    with pytest.raises(InputError, match="--score"):
        evaluate(run, score="mean")  # type: ignore[arg-type]


# --- Phase 1, and many runs -----------------------------------------------------------------------------------------


def test_a_discovery_is_reused() -> None:
    found = discover(experiment(run_dir="found"))
    assert found.folder == Path("found")
    assert found.num_domains == 3
    assert repr(found) == f"Discovery(found, M = 3, ARI {found['ari']:.2f})"
    assert found.clients["pseudo_domain"].to_dict() == {int(c): d for c, d in found["assignments"].items()}
    assert found.clients["true_domain"].tolist() == digits().true_domains
    assert found.choice.index.tolist() == [1, 2, 3, 4]
    assert found.choice["inertia"].tolist() == list(found["inertias"].values())
    weights = found.graded_weights(alpha=0.4)
    assert np.diag(weights).tolist() == pytest.approx([0.4] * 3)
    assert weights.sum(axis=1).tolist() == pytest.approx([1] * 3)
    assert found._repr_html_().startswith('<img alt="Phase 1" src="data:image/png;base64,')
    run = fit(experiment(run_dir="run", rounds=1, discovery=str(found.folder)))
    assert run.discovery is not None
    assert run.discovery["assignments"] == found["assignments"]


def test_the_command_that_discover_prints_works(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("rounds: 1\nepochs: 1\nbackbone: helpers.tiny_net\nbackend: LocalBackend\n")
    options = ["--config", "mine.yaml", "--data.size=8", "--data.num_clients", "4", "--clustering.epochs", "1"]
    assert main(["discover", *options, "--run_dir", "a folder"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reuse it with: ")]
    program, *words = shlex.split(line.removeprefix("reuse it with: "))
    again = ["--config=mine.yaml", "--data.size=8", "--data.num_clients=4", "--clustering.epochs=1"]
    assert (program, words) == ("jdfl-lightning", ["fit", *again, "--discovery", "a folder"])
    assert main([*words, "--run_dir", "run"]) == 0
    assert Discovery.read("run") == Discovery.read("a folder")


@pytest.mark.slow
def test_a_suite_of_python() -> None:
    """Twice: the second time there is nothing left to do."""
    settings = experiment(run_dir="suite", rounds=1, supervision="base")
    done = suite(settings, ["FedAvg", FedProx(mu=0.5)], ["base", "graded"], [0, 1])
    names = [f"{a}-{s}-seed{seed}" for seed in (0, 1) for a in ("fedavg", "fedprox") for s in ("base", "graded")]
    assert [outcome.name for outcome in done.outcomes] == names
    assert done.failures == {}
    assert list(done.runs) == names
    assert done.runs["fedprox-graded-seed1"].config["algorithm"]["init_args"]["mu"] == 0.5
    alone = fit(replace(settings, run_dir="alone", seed_everything=1))
    assert done.runs["fedavg-base-seed1"].last["test/acc"] == alone.last["test/acc"]
    report = done.report()
    assert report.page.is_file()
    assert report.num_runs == 8
    assert set(report.results["algorithm"]) == {"FedAvg", "FedProx"}
    before = Path("suite/fedavg-base-seed0/metrics.csv").stat().st_mtime_ns
    assert suite(settings, ["FedAvg", FedProx(mu=0.5)], ["base", "graded"], [0, 1]).outcomes == done.outcomes
    assert Path("suite/fedavg-base-seed0/metrics.csv").stat().st_mtime_ns == before


def test_a_suite_of_two_algorithms_of_a_class() -> None:
    settings = experiment(run_dir="suite", rounds=1)
    algorithms = {"weak": FedProx(mu=0.1), "strong": FedProx(mu=1.0)}
    done = suite(settings, algorithms, ["base"], [0])
    assert list(done.runs) == ["weak-base-seed0", "strong-base-seed0"]
    wrong: list[tuple[Any, str]] = [
        ([FedProx(mu=0.1), FedProx(mu=1.0)], "a dict of names"),
        (["FedPrx"], "Did you mean 'FedProx'"),
        ({"Weak one": FedAvg()}, "lower-case letters"),
        ({"weak": "FedAvg"}, "of type Algorithm"),
        ([FedAvg], "of type Algorithm"),
    ]
    for given, said in wrong:
        with pytest.raises(InputError, match=said):
            suite(settings, given, ["base"], [0])


def test_a_report_of_runs() -> None:
    run = finished("one", supervision="base")
    finished("two", supervision="base", seed_everything=1)
    first = write_report([run, "two"])
    assert first.folder == Path("report")
    assert first.num_runs == 2
    lines = first.results
    accuracy = lines[(lines["quantity"] == "accuracy") & lines["domain"].isna()]["mean"]
    second = Run.read("two").best["test/acc"]
    assert accuracy.tolist() == pytest.approx([(run.best["test/acc"] + second) / 2])
    assert write_report("one", "other").num_runs == 1


# --- progress -------------------------------------------------------------------------------------------------------


def test_progress_is_shown_unless_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jdfl_lightning.ui.display.default_display", default_display)
    settings = experiment(run_dir="quiet", rounds=1, supervision="base")
    fit(settings, progress=False)
    assert capsys.readouterr() == ("", "")
    fit(replace(settings, run_dir="told"))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "run folder: told"
    assert said[-1].startswith("round 1/1  acc ")


def test_a_notebook_has_one_output_however_long_a_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients' steps update it a few times a second at most, and the last state stays."""
    shown: list[str] = []

    class Output:
        def update(self, text: dict[str, str], raw: bool) -> None:
            assert raw
            shown[-1] = text["text/plain"]
            updates.append(0)

    def display(text: dict[str, str], raw: bool, display_id: bool) -> Output:
        assert (raw, display_id) == (True, True)
        shown.append(text["text/plain"])
        return Output()

    updates: list[int] = []
    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    notebook = open_display(Console())
    assert isinstance(notebook, NotebookDisplay)
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with notebook:
        notebook.say("run folder: run")
        for _ in range(NotebookDisplay.LINES + 1):
            notebook.say("a line")
        before = len(updates)
        for client in range(1000):
            notebook.step("round 1", client + 1, 1000)
            now += 0.001
        assert len(updates) - before == 3  # in a second, with a quarter of a second from one to the next
        assert shown[-1].splitlines()[-1] == "round 1: 751/1000"
        notebook.round(1, 3, METRICS)
        assert shown[-1].splitlines()[-1] == "round 1: 1000/1000"
    (text,) = shown
    assert text.splitlines()[:2] == ["(earlier lines: 2)", "a line"]
    assert text.splitlines()[-1].startswith("round 1/3  acc ")


# --- modules of one's own -------------------------------------------------------------------------------------------

OWN = "from jdfl_lightning import FedAvg\n\nclass {name}(FedAvg):\n    '''FedAvg by another name.'''\n"


@pytest.mark.slow
def test_modules_beside_a_config_and_in_the_working_folder() -> None:
    """Workers, which are other processes, find them too."""
    Path("dir").mkdir()
    Path("dir/beside_config.py").write_text(OWN.format(name="Beside"))
    Path("in_working_folder.py").write_text("from helpers import tiny_net as net\n")
    Path("dir/mine.yaml").write_text("algorithm: beside_config.Beside\nbackbone: in_working_folder.net\n")
    options = ["--data.size=8", "--data.num_clients=4", "--rounds=1", "--epochs=1", "--supervision=base"]
    assert main(["fit", "--config", "dir/mine.yaml", *options, "--backend.workers=2", "--run_dir", "run"]) == 0
    run = Run.read("run")
    assert run.config["algorithm"]["class_path"] == "beside_config.Beside"
    assert run.config["backend"]["class_path"].endswith(PoolBackend.__name__)
    assert main(["test", "--run", "run"]) == 0


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        ([], ["."]),
        (["--config", "dir/mine.yaml"], ["dir", "."]),
        (["--config=dir/mine.yaml", "--config", "pacs_a"], ["dir", "."]),
        (["--run", "own"], ["."]),
        (["--resume", "own/checkpoints/2.safetensors"], ["."]),
        (["--resume", "auto"], ["."]),
        (["--run", "theirs"], []),
        (["--resume=theirs", "--config", "dir/mine.yaml"], []),
        (["--run", "theirs", "--trust", "true"], ["."]),
        (["--run"], []),
    ],
    ids=" ".join,
)
def test_what_is_on_the_path(arguments: list[str], added: list[str]) -> None:
    finished("own", supervision="base")
    finished("theirs", supervision="base")
    stranger("theirs")
    Path("dir").mkdir()
    Path("dir/mine.yaml").write_text("rounds: 1")
    before = list(sys.path)
    add_own_modules(arguments)
    add_own_modules(arguments)
    assert sys.path == [*before, *(str(Path(folder).absolute()) for folder in added)]


def test_help_names_the_program_and_not_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``python -m jdfl_lightning`` does it."""
    monkeypatch.setattr(sys, "argv", ["", "fit", "--data.help", "PACS"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("jdfl_lightning", run_name="__main__", alter_sys=True)
    assert capsys.readouterr().out.startswith("usage: jdfl-lightning ")
