"""The sweep over Phase 1: one training answers for every E_0 and every subset of layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from helpers import digits, experiment
from jdfl_lightning import Clustering, PoolBackend, fit
from jdfl_lightning.cli import main
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.clustering.updates import unit
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitTask
from jdfl_lightning.core.tensors import flatten
from jdfl_lightning.models import select_parameters
from jdfl_lightning.report import published
from jdfl_lightning.report.details import diagnosis_tables, grids
from jdfl_lightning.server.run import discover
from jdfl_lightning.storage.details import Finding, read_findings, write_findings
from jdfl_lightning.storage.discoveries import read_discovery
from jdfl_lightning.studies.diagnose import Sweep, diagnose
from jdfl_lightning.ui.display import Display

SMALL = Sweep(seeds=(0, 1), batch_sizes=(16, 32), epochs=2)


def test_one_training_answers_for_every_epoch_and_layer() -> None:
    """To the bit what a client sends after so many epochs alone."""
    options = Clustering(epochs=3, batch_size=16, layers="C")
    workspace = Workspace(experiment(clustering=options))
    weights, buffers = workspace.initial(1)
    task = FitTask(2, DISCOVERY_ROUND, 0, weights, buffers)
    every = fit_client(workspace, replace(task, every_epoch=True), {})[0].upload
    assert list(every) == ["1", "2", "3"]
    for epochs in (1, 2, 3):
        for layers in "ABC":
            alone = Workspace(experiment(clustering=replace(options, epochs=epochs, layers=layers)))
            vector = fit_client(alone, task, {})[0].upload["update"]["u"]
            names = select_parameters(alone.module(weights, buffers), layers)
            assert torch.equal(unit(flatten({name: every[str(epochs)][name] for name in names})), vector)


@pytest.mark.slow
def test_findings_are_those_of_discover() -> None:
    """ARI with M given, and what both criteria pick, as `discover` has them with the same settings."""
    run = experiment(data=digits(8))
    folder = diagnose(run, SMALL).folder
    findings = read_findings(folder)
    assert len(findings) == 2 * 2 * 2 * 3
    for finding in findings:
        if finding.layers == "B" or (finding.seed, finding.epochs) == (1, 2):
            options = Clustering(epochs=finding.epochs, batch_size=finding.batch_size, layers=finding.layers)
            same = replace(run, seed_everything=finding.seed, clustering=options, num_domains=4)
            record = read_discovery(discover(same))
            assert (finding.clients, finding.domains, finding.length) == (8, 4, record["vector_length"])
            assert finding.ari == pytest.approx(record["ari"])
            truth, found = record["true_domains"], record["assignments"]
            assert finding.ari == pytest.approx(adjusted_rand_score(list(truth.values()), list(found.values())))
            assert {"elbow": finding.elbow, "silhouette": finding.silhouette} == record["picks"]
    assert (folder / "diagnosis.png").stat().st_size > 10_000


class CutError(Exception):
    pass


class CutAt(Display):
    """Ends a sweep in one of its cases; counts the clients' trainings until then."""

    def __init__(self, case: str = "never") -> None:
        self.case, self.steps = case, 0

    def step(self, what: str, done: int, total: int) -> None:
        self.steps += what.startswith("case") and done > 0
        if self.case in what and done == 2:
            raise CutError


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was() -> None:
    """Finished cases are not trained again; the table is that of an uninterrupted sweep, here in a pool."""
    whole = diagnose(experiment(run_dir="whole"), SMALL).folder
    with pytest.raises(CutError):
        diagnose(experiment(run_dir="cut"), SMALL, CutAt("case 3/4"))
    display = CutAt()
    cut = diagnose(experiment(resume="cut", backend=PoolBackend(workers=2, threads=1)), SMALL, display).folder
    assert display.steps == 2 * 4
    assert (cut / "diagnosis.csv").read_text() == (whole / "diagnosis.csv").read_text()
    assert diagnose(experiment(resume="cut"), SMALL, again := CutAt()).folder == cut
    assert again.steps == 0
    with pytest.raises(InputError, match=r"--lr to be 0\.05"):
        diagnose(experiment(resume="cut", lr=0.1), SMALL)


def test_auto_does_not_mix_up_sweeps_and_runs() -> None:
    sweep = Sweep(seeds=(0,), batch_sizes=(32,), epochs=1)
    first = diagnose(experiment(), sweep).folder
    found = discover(experiment())
    assert diagnose(experiment(resume="auto"), sweep).folder == first
    with pytest.raises(InputError, match=r"of a run but .* is that of a diagnosis"):
        fit(experiment(resume=str(first)))
    with pytest.raises(InputError, match=r"of a diagnosis but .* is that of a run"):
        diagnose(experiment(resume=str(found)), sweep)
    run = fit(experiment(resume="auto", rounds=1))
    assert run.folder not in (first, found)
    assert not (found / "metrics.csv").exists()


@pytest.mark.slow
def test_sketches_are_tried_beside() -> None:
    run = experiment(data=digits(10), clustering=Clustering(sketch_dim=256), backbone_args={"stride": 1})
    findings = read_findings(diagnose(run, Sweep(seeds=(0,), batch_sizes=(16,), epochs=2)).folder)
    for found in findings:
        options = replace(run.clustering, epochs=found.epochs, batch_size=16, layers=found.layers)
        if found.layers != "A":  # whose 130 entries are fewer than the sketch's
            record = read_discovery(discover(replace(run, clustering=options, num_domains=4)))
            assert record["vector_length"] == found.sketch_dim == 256
            assert found.sketch_ari == pytest.approx(record["ari"])
            assert {"elbow": found.sketch_elbow, "silhouette": found.sketch_silhouette} == record["picks"]
    assert any(found.ari != found.sketch_ari or found.elbow != found.sketch_elbow for found in findings)


def test_an_error_in_a_later_case_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one in the first case leaves no folder; Ctrl-C in it leaves one to go on with."""

    class Failing(Display):
        def __init__(self, error: type[BaseException], case: str) -> None:
            self.error, self.case = error, case

        def step(self, what: str, done: int, total: int) -> None:
            if self.case in what:
                raise self.error("no")

    with pytest.raises(InputError):
        diagnose(experiment(run_dir="first"), SMALL, Failing(InputError, "case 1/4"))
    assert not Path("first").exists()
    with pytest.raises(InputError):
        diagnose(experiment(run_dir="later"), SMALL, Failing(InputError, "case 2/4"))
    assert len(read_findings(Path("later"))) == 2 * 3
    with pytest.raises(KeyboardInterrupt):
        diagnose(experiment(run_dir="stopped"), SMALL, Failing(KeyboardInterrupt, "case 1/4"))
    sweep = Sweep(seeds=(0,), batch_sizes=(32,), epochs=1)
    assert len(read_findings(diagnose(experiment(resume="stopped"), sweep).folder)) == 3


def finding(**changes: Any) -> Finding:
    values: dict[str, Any] = {
        "clients": 40,
        "domains": 4,
        "seed": 0,
        "batch_size": 32,
        "epochs": 3,
        "layers": "B",
        "length": 10,
        "ari": 0.5,
        "elbow": 4,
        "silhouette": None,
    }
    return Finding(**(values | changes))


def test_grids_by_hand(tmp_path: Path) -> None:
    """ARI 0.5 and 1 are 0.75 in the mean; the elbow is at 4 in one seed of two; the paper's cell is beside it."""
    findings = [finding(), finding(seed=1, ari=1.0, elbow=None)]
    write_findings(tmp_path, findings)
    assert read_findings(tmp_path) == findings
    (tmp_path / "config.yaml").write_text("data: {class_path: jdfl_lightning.data.pacs.PACS, init_args: {size: 32}}")
    shown = grids(tmp_path)
    assert [measured.to_dict() for _, measured, _ in shown] == [{(32, "B"): {3: mean}} for mean in (0.75, 0.5, 0.0)]
    assert shown[0][2] == published.ari_grid()
    assert shown[1][2][3, 32, "B"] == 0.2
    assert "40 clients, 32 px, 2 seeds" in shown[0][0]
    (tmp_path / "config.yaml").write_text("data: {class_path: mine.Data, init_args: {size: 32}}")
    assert [beside for _, _, beside in grids(tmp_path)] == [{}, {}, {}]
    assert len(diagnosis_tables(tmp_path)) == 3


@pytest.mark.parametrize("content", ["", "clients,seed\n1,2\n", "\x00", "clients\nx\n"])
def test_a_damaged_table_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text("data: {class_path: PACS, init_args: {}}")
    (tmp_path / "diagnosis.csv").write_text(content)
    with pytest.raises(InputError, match=r"diagnosis\.csv cannot be read|has none") as caught:
        grids(tmp_path)
    assert "pydantic" not in str(caught.value)


def test_diagnose_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    common = ["diagnose", "--data.size", "8", "--backbone", "helpers.tiny_net", "--backend", "LocalBackend"]
    assert main([*common, "--seeds", "3", "--batch_sizes", "64", "--max_epochs", "1", "--run_dir", "sweep"]) == 0
    shown = capsys.readouterr().out
    assert "ARI with M = 4 (10 clients, 8 px, 1 seed)" in " ".join(shown.split())
    assert "b64-A" in shown
    for bad, named in (
        (["--seeds", "x"], "--seeds"),
        (["--seeds", "1,1"], "--seeds to be different numbers"),
        (["--seeds=-1"], "--seeds to be 0 or more"),
        (["--batch_sizes", "0"], "--batch_sizes"),
        (["--max_epochs", "0"], "--max_epochs"),
        (["--resume", "nowhere"], "--resume"),
    ):
        assert main([*common, *bad]) == 2
        assert named in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["sweep"]


def test_a_failing_client_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr("jdfl_lightning.backends.base.fit_client", fail)
    with pytest.raises(InputError, match=r"^Expected every client to answer but client 0 failed: .*no luck$"):
        diagnose(experiment(run_dir="sweep"), Sweep([0], [64], 1))
