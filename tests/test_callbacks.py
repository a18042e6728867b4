"""Callbacks of the server: what they are told, how they end a run, and how such a run is resumed."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from helpers import Lines, contents, every, experiment, finished, same
from jdfl_lightning import (
    EarlyStopping,
    Experiment,
    FedDyn,
    PoolBackend,
    PrivateFedAvg,
    RoundReport,
    RunCallback,
    algorithms,
    fit,
)
from jdfl_lightning.backends.worker import without_images
from jdfl_lightning.cli import BAD_INPUT, main
from jdfl_lightning.clustering.clusters import PseudoDomains
from jdfl_lightning.config import Checkpointing, as_dict, parse_experiment
from jdfl_lightning.core.errors import InputError, StorageError
from jdfl_lightning.federation.site import SiteWorker
from jdfl_lightning.report.collect import read_runs
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.storage.checkpoint import Checkpoints
from jdfl_lightning.storage.details import Stop, read_stop
from jdfl_lightning.storage.folder import read_run
from jdfl_lightning.studies.suite import Combinations, plan, run_suite
from jdfl_lightning.ui.display import Display

STILL: dict[str, Any] = {"lr": 1e-9, "supervision": "base", "rounds": 6}
"""Weights hardly move, so that round 1 stays the best: a patience of p ends such a run after round 1 + p."""


class CutError(BaseException):
    """The process ends: no handler of errors is called."""


# --- what they are told


class Diary(RunCallback):
    """Remembers every call; what its last copy has remembered is found by the name of the run folder."""

    found: ClassVar[dict[str, list[tuple[Any, ...]]]] = {}

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def run_started(self, folder: Path, experiment: Experiment) -> None:
        self.found[folder.name] = self.calls
        self.calls.append(("started", experiment.data.num_clients, experiment.rounds))

    def discovered(self, domains: PseudoDomains | None) -> None:
        self.calls.append(("discovered", None if domains is None else domains.num_domains))

    def clients_asked(self, stage: str, total: int) -> None:
        self.calls.append(("asked", stage, total))

    def client_answered(self, stage: str, done: int, total: int) -> None:
        self.calls.append(("answered", stage, done, total))

    def client_refused(self, round: int, client: int, reason: str) -> None:
        self.calls.append(("refused", round, client, reason.splitlines()[-1]))

    def round_aggregated(self, state: ServerState, metrics: dict[str, float]) -> None:
        self.calls.append(("aggregated", state.round, metrics["clients"]))

    def round_evaluated(self, report: RoundReport) -> None:
        metrics = {name: value for name, value in report.metrics.items() if not name.startswith("time/")}
        self.calls.append(("evaluated", report.round, report.evaluated, report.improved, metrics))

    def run_ended(self, reason: str | None) -> None:
        self.calls.append(("ended", reason))

    @classmethod
    def rounds(cls, folder: str) -> list[tuple[Any, ...]]:
        """Return what was told of evaluated rounds."""
        return [call for call in cls.found[folder] if call[0] == "evaluated"]


class Fussy(algorithms.FedAvg):
    """FedAvg whose client 2 fails in round 1."""

    def local(self, task: Any, state: Any) -> Any:
        if (task.client, task.round) == (2, 1):
            raise RuntimeError("no luck")
        return super().local(task, state)


def test_every_event_in_its_order() -> None:
    diary = Diary()
    run = fit(experiment(algorithm=Fussy(), run_dir="run", evaluate_every=2, callbacks=[diary]))
    assert diary.calls == []  # the run had a copy
    calls = Diary.found["run"]
    assert calls[:3] == [("started", 4, 2), ("asked", "discovery", 4), ("answered", "discovery", 1, 4)]
    assert [call[:3] for call in calls[6:]] == [
        ("discovered", 3),
        ("asked", "round 1", 4),
        *(("answered", "round 1", done) for done in (1, 2, 3)),
        ("refused", 1, 2),
        ("answered", "round 1", 4),
        ("aggregated", 1, 3),
        ("evaluated", 1, False),
        ("asked", "round 2", 4),
        *(("answered", "round 2", done) for done in (1, 2, 3, 4)),
        ("aggregated", 2, 4),
        ("evaluated", 2, True),
        ("ended", None),
    ]
    assert "no luck" in calls[11][3]
    first, last = (call[4] for call in Diary.rounds("run"))
    assert "test/acc" not in first
    assert "round" not in last
    written = {name: value for name, value in run.rows[1].items() if name != "round" and not name.startswith("time/")}
    assert last == {name: value for name, value in written.items() if not math.isnan(value)}


@pytest.mark.parametrize("after", every(3, [9, 5, 13]))
def test_a_resumed_run_tells_the_same(after: int) -> None:
    """All that a copy is told of evaluated rounds; FedDyn has a column that begins with the first evaluation."""
    settings: dict[str, Any] = {"algorithm": FedDyn(), "supervision": "base", "rounds": 5, "evaluate_every": 2}
    settings |= {"checkpoint": Checkpointing(every=2), "callbacks": [Diary()]}
    fit(experiment(run_dir="whole", **settings))
    whole = Diary.rounds("whole")
    assert [call[1:3] for call in whole] == [(1, False), (2, True), (3, False), (4, True), (5, True)]
    assert any("acc_of" in name for name in whole[1][4])
    with pytest.raises(CutError):
        fit(experiment(run_dir="cut", **settings), CutAfter(after))
    fit(experiment(resume="auto", run_dir="cut", **settings))
    assert Diary.rounds("cut") == whole
    assert contents("cut") == contents("whole")


class CutAfter(Display):
    """Ends a run when so many clients have answered."""

    def __init__(self, after: int) -> None:
        self.left = after

    def step(self, what: str, done: int, total: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise CutError


def test_callbacks_change_no_bit() -> None:
    finished("plain")
    fit(experiment(run_dir="told", callbacks=[Diary(), EarlyStopping()]))
    assert same("plain", "told")


# --- early stopping


def reports(*values: float | None, metric: str = "test/acc") -> list[RoundReport]:
    """Evaluated rounds with these values of a metric; None for a round that was not evaluated."""
    return [
        RoundReport({"round": number, metric: math.nan if value is None else value}, False, None)
        if metric == "test/acc" or value is None
        else RoundReport({"round": number, "test/acc": 0.5, metric: value}, False, None)
        for number, value in enumerate(values, start=1)
    ]


def stops_after(callback: EarlyStopping, told: list[RoundReport]) -> int | None:
    for report in told:
        callback.round_evaluated(report)
        if callback.reason_to_stop():
            return report.round
    return None


def test_when_early_stopping_stops() -> None:
    """Worked out by hand: the count begins anew with every improvement; rounds that were not evaluated do not count."""
    assert stops_after(EarlyStopping(patience=2), reports(0.5, 0.5, 0.6, 0.6, 0.55, 0.7)) == 5
    assert stops_after(EarlyStopping(patience=2), reports(0.5, None, 0.4, None, None, 0.45)) == 6
    assert stops_after(EarlyStopping(patience=2), reports(0.1, 0.2, 0.3, 0.3)) is None
    assert stops_after(EarlyStopping(patience=1, min_delta=0.25), reports(0.25, 0.75, 1.0)) == 3  # 0.25 is not more
    falls = reports(3.0, 2.0, 2.5, 1.0, 1.0, 1.5, metric="train/loss")
    assert stops_after(EarlyStopping("train/loss", patience=2, mode="min"), falls) == 6
    assert stops_after(EarlyStopping("train/loss", patience=2), falls) == 3
    lost = reports(3.0, math.nan, math.nan, metric="train/loss")
    assert stops_after(EarlyStopping("train/loss", patience=2, mode="min"), lost) == 3  # NaN is never better


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"patience": 0}, "--callbacks.patience to be positive"),
        ({"patience": "3"}, "--callbacks.patience to be of type int"),
        ({"mode": "maximum"}, "--callbacks.mode to be one of 'max', 'min' .* Did you mean 'max'"),
        ({"min_delta": -1.0}, "--callbacks.min_delta to be 0 or more"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        EarlyStopping(**settings)


def test_what_is_no_callback() -> None:
    with pytest.raises(InputError, match="--callbacks to be of type"):
        experiment(callbacks=[EarlyStopping])
    with pytest.raises(InputError, match="--callbacks to be of type"):
        experiment(callbacks=EarlyStopping())


def test_a_private_run_is_not_stopped_early() -> None:
    """The accuracy has no noise, so that the round it stops after would say something of the held-out images."""
    with pytest.raises(InputError, match="--callbacks to be without EarlyStopping with PrivateFedAvg"):
        experiment(algorithm=PrivateFedAvg(), supervision="base", callbacks=[EarlyStopping()])
    assert experiment(algorithm=PrivateFedAvg(), supervision="base", callbacks=[Diary()]).callbacks


def test_an_unknown_metric_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--data.size", "8", "--data.num_clients", "4", "--epochs", "1", "--rounds", "2", "--lr", "1e-9"]
    wrong = ["--callbacks+=EarlyStopping", "--callbacks.metric", "test/ac"]
    assert main(["fit", *settings, "--supervision", "base", "--run_dir", "run", *wrong]) == BAD_INPUT
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Expected --callbacks.metric to be one of 'test/acc', 'test/acc_worst', 'test/acc/" in error
    assert "Did you mean 'test/acc'?" in error
    assert Checkpoints(Path("run"), 1).rounds() == [1]
    assert main(["fit", "--resume", "run"]) == BAD_INPUT  # at once, by the row of round 1
    assert len(read_run(Path("run")).rows) == 1
    assert main(["fit", "--resume", "run", "--callbacks.metric", "test/acc_worst"]) == 0
    assert len(read_run(Path("run")).rows) == 2


# --- runs that stop


def test_a_stopped_run_is_finished() -> None:
    """Patience 2 and no improvement: after round 3 of 6, with all that a run leaves after its last round."""
    said = Lines()
    stopping = [EarlyStopping(patience=2)]
    run = fit(experiment(run_dir="run", checkpoint=Checkpointing(every=50), callbacks=stopping, **STILL), said)
    why = f"test/acc has not been better than {run.rows[0]['test/acc']:g} for 2 evaluated rounds"
    assert run.stop == Stop(3, "EarlyStopping", why)
    assert json.loads(Path("run/stopped.json").read_text()) == {"round": 3, "callback": "EarlyStopping", "reason": why}
    assert said.said[-1] == f"stopped after round 3 of 6: EarlyStopping: {why}"
    assert len(run.rows) == 3
    assert Checkpoints(run.folder, 2).rounds()[0] == 3
    assert (run.best["round"], run.last["round"]) == (1, 3)
    assert all((run.folder / name).exists() for name in ("curves.png", "best.safetensors", "last.safetensors"))
    alone = finished("alone", **{**STILL, "rounds": 3, "checkpoint": Checkpointing(every=50)})
    ours, theirs = contents("run"), contents("alone")
    for found in (ours, theirs):  # where each names its own settings
        found.pop("config.yaml")
    ours.pop("stopped.json")
    assert ours == theirs
    assert alone.stop is None
    assert not Path("alone/stopped.json").exists()


def test_the_last_round_is_no_stop() -> None:
    """Patience ends with the last round: nothing was left out."""
    run = fit(experiment(run_dir="run", callbacks=[EarlyStopping(patience=2)], **{**STILL, "rounds": 3}))
    assert (len(run.rows), run.stop, Path("run/stopped.json").exists()) == (3, None, False)


def test_resuming_a_stopped_run() -> None:
    """As it is, it stops at once; with more patience it goes on, and without callbacks to its last round."""
    settings = {"checkpoint": Checkpointing(every=2), **STILL}
    fit(experiment(run_dir="run", callbacks=[EarlyStopping(patience=2)], **settings))
    before, said = contents("run"), Lines()
    fit(experiment(resume="run", callbacks=[EarlyStopping(patience=2)], **settings), NoTraining(said))
    assert contents("run") == before
    assert said.said[-1].startswith("stopped after round 3 of 6: EarlyStopping")
    run = fit(experiment(resume="run", callbacks=[EarlyStopping(patience=4)], **settings))
    assert (run.stop and run.stop.round) == 5
    fit(experiment(run_dir="patient", callbacks=[EarlyStopping(patience=4)], **settings))
    assert contents("run")["rows"] == contents("patient")["rows"]
    run = fit(experiment(resume="run", callbacks=[], **settings))
    assert (len(run.rows), run.stop, Path("run/stopped.json").exists()) == (6, None, False)
    finished("whole", **settings)
    assert contents("run")["rows"] == contents("whole")["rows"]
    assert contents("run")["last.safetensors"] == contents("whole")["last.safetensors"]


class NoTraining(Lines):
    """Fails if a client is trained."""

    def __init__(self, said: Lines) -> None:
        self.said = said.said

    def step(self, what: str, done: int, total: int) -> None:
        raise AssertionError(what)


def test_rounds_that_were_not_evaluated_end_no_run() -> None:
    """Asked after rounds 2, 4, ...: the last round of every run has its accuracies."""
    settings = {**STILL, "rounds": 9, "evaluate_every": 2}
    run = fit(experiment(run_dir="run", callbacks=[After(3)], **settings))
    assert run.stop == Stop(4, "After", "3 rounds are enough")
    assert not math.isnan(run.last["test/acc"])


@dataclass
class After(RunCallback):
    """Wants no more than so many rounds."""

    rounds: int = 1

    def __post_init__(self) -> None:
        self.enough = False

    def round_evaluated(self, report: RoundReport) -> None:
        self.enough = report.round >= self.rounds

    def reason_to_stop(self) -> str | None:
        return f"{self.rounds} rounds\n are enough" if self.enough else None


@pytest.mark.parametrize(
    ("algorithm", "step", "least"),
    [
        ("FedAvg", 4, 3),
        pytest.param("FedAvg", 1, 9, marks=pytest.mark.slow),
        pytest.param("SCAFFOLD", 4, 9, marks=pytest.mark.slow),
    ],
)
def test_a_stopping_run_cut_at_every_write(
    algorithm: str, step: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended before any file gets its name or goes: resumed, it stops after the same round and leaves the same.

    Most files of SCAFFOLD are states of clients, so that every fourth is enough; `make check` takes fewer, of FedAvg.
    """
    settings: dict[str, Any] = {"algorithm": getattr(algorithms, algorithm)(), **STILL}
    settings |= {"checkpoint": Checkpointing(every=2, keep=1), "callbacks": [EarlyStopping(patience=2)]}
    fit(experiment(run_dir="whole", **settings))
    whole, cuts, place = contents("whole"), 0, 0
    assert "stopped.json" in whole
    while cuts == place // step:
        folder, left = f"cut-{place}", [place]
        with monkeypatch.context() as patch:
            for name in ("replace", "unlink"):
                patch.setattr(Path, name, cut_when_none_is_left(getattr(Path, name), left))
            try:
                fit(experiment(run_dir=folder, **settings))
            except CutError:
                cuts += 1
        fit(experiment(run_dir=folder, resume="auto", **settings))
        assert contents(folder) == whole, place
        place += step
    assert cuts >= least


def cut_when_none_is_left(method: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise CutError
        return method(*args, **kwargs)

    return counted


def test_going_on_after_a_stop_and_being_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that says the run is finished goes before anything else is written."""
    fit(experiment(run_dir="run", callbacks=[EarlyStopping(patience=2)], **STILL))
    with monkeypatch.context() as patch:
        patch.setattr("jdfl_lightning.server.session.save_config", cut_off)
        with pytest.raises(CutError):
            fit(experiment(resume="run", callbacks=[EarlyStopping(patience=4)], **STILL))
    assert read_run(Path("run")).stop is None


def cut_off(*_: object) -> None:
    raise CutError


@pytest.mark.parametrize("where", [pytest.param("pool", marks=pytest.mark.slow), "flower"])
def test_all_backends_stop_after_the_same_round(where: str) -> None:
    """Though a pool and a federation evaluate a round beside the next round's fits."""
    run = experiment(**STILL, callbacks=[EarlyStopping(patience=2)])
    fit(replace(run, run_dir="local"))
    if where == "pool":
        fit(replace(run, run_dir="pool", backend=PoolBackend(workers=2, threads=1)))
        assert same("local", "pool")
    else:
        from flower_grid import run_on_grid, write_config

        run_on_grid(write_config(run), {"run_dir": "flower"}, sites=2)
        ours, theirs = contents("local"), contents("flower")
        assert all(ours[name] == theirs[name] for name in ("rows", "stopped.json", "last.safetensors"))
    assert read_run(Path(where)).stop == read_run(Path("local")).stop is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:Waiting for room on the Ray cluster")
def test_ray_stops_after_the_same_round() -> None:
    import ray

    from jdfl_lightning import RayBackend

    run = experiment(**STILL, callbacks=[EarlyStopping(patience=2)])
    fit(replace(run, run_dir="local"))
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        fit(replace(run, run_dir="ray", backend=RayBackend(actors=1)))
    finally:
        ray.shutdown()
    assert same("local", "ray")


# --- errors


class Clumsy(RunCallback):
    """Fails in one of its methods."""

    def __init__(self, method: str, round: int = 2) -> None:
        self.method, self.round = method, round

    def _fall(self, method: str, round: int = 2) -> None:
        if (method, round) == (self.method, self.round):
            raise KeyError("tripped")

    def run_started(self, folder: Path, experiment: Experiment) -> None:
        self._fall("run_started")

    def client_answered(self, stage: str, done: int, total: int) -> None:
        self._fall("client_answered", int(stage.split()[-1]))

    def round_aggregated(self, state: ServerState, metrics: dict[str, float]) -> None:
        self._fall("round_aggregated", state.round)

    def round_evaluated(self, report: RoundReport) -> None:
        self.now = report.round
        self._fall("round_evaluated", report.round)

    def reason_to_stop(self) -> str | None:
        self._fall("reason_to_stop", self.now)
        return None

    def run_ended(self, reason: str | None) -> None:
        self._fall("run_ended")


@pytest.mark.parametrize(
    ("method", "saved", "backend"),
    [
        ("client_answered", 1, "local"),
        ("round_aggregated", 2, "local"),
        ("round_evaluated", 2, "local"),
        pytest.param("round_evaluated", 2, "pool", marks=pytest.mark.slow),
        ("reason_to_stop", 2, "local"),
        ("run_ended", 3, "local"),
    ],
)
def test_an_error_in_a_callback(method: str, saved: int, backend: str) -> None:
    """Its traceback once, then one line; the last aggregated round is saved, and the run goes on without it."""
    settings: dict[str, Any] = {"supervision": "base", "rounds": 3, "checkpoint": Checkpointing(every=3)}
    if backend == "pool":
        settings["backend"] = PoolBackend(workers=2, threads=1)
    finished("whole", **settings)
    said = Lines()
    with pytest.raises(InputError, match=f"The callback Clumsy failed in {method}: KeyError: 'tripped'"):
        fit(experiment(run_dir="run", callbacks=[Clumsy(method)], **settings), said)
    assert sum("Traceback" in line for line in said.said) == 1
    assert Checkpoints(Path("run"), 1).rounds()[0] == saved
    fit(experiment(resume="run", **settings))
    assert contents("run")["rows"] == contents("whole")["rows"]
    assert contents("run")["last.safetensors"] == contents("whole")["last.safetensors"]


def test_an_error_at_the_start_leaves_no_folder() -> None:
    with pytest.raises(InputError, match="The callback Clumsy failed in run_started"):
        fit(experiment(run_dir="run", callbacks=[Clumsy("run_started")]))
    assert not Path("run").exists()


def test_a_callback_that_cannot_be_copied() -> None:
    callback = Diary()
    callback.calls = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(InputError, match="The callback Diary failed in __deepcopy__: TypeError"):
        fit(experiment(run_dir="run", callbacks=[callback]))


def test_the_end_is_told_with_its_reason() -> None:
    fit(experiment(run_dir="stopped", callbacks=[Diary(), After(1)], **STILL))
    assert Diary.found["stopped"][-1] == ("ended", "After: 1 rounds are enough")
    with pytest.raises(InputError):
        fit(experiment(run_dir="failed", callbacks=[Diary(), Clumsy("round_evaluated")], **STILL))
    assert Diary.found["failed"][-1] == ("ended", "The callback Clumsy failed in round_evaluated: KeyError: 'tripped'")


# --- settings


def test_from_yaml_and_the_command_line() -> None:
    Path("mine.yaml").write_text("callbacks: [{class_path: EarlyStopping, init_args: {patience: 5}}]")
    run = parse_experiment(
        "fit", ["--config", "mine.yaml", "--callbacks+=test_callbacks.After", "--callbacks.rounds=7"]
    )
    assert run.callbacks == [EarlyStopping(patience=5), After(7)]
    assert as_dict(run)["callbacks"] == [
        {
            "class_path": "jdfl_lightning.callbacks.early_stopping.EarlyStopping",
            "init_args": {"metric": None, "patience": 5, "mode": "max", "min_delta": 0.0},
        },
        {"class_path": "test_callbacks.After", "init_args": {"rounds": 7}},
    ]
    for wrong, message in (
        (["--callbacks+=EarlyStoping"], "--callbacks to be the name or the import path of a class"),
        (["--callbacks+=EarlyStopping", "--callbacks.patiense=5"], "an option of EarlyStopping but it has no"),
        (["--callbacks", "null"], "--callbacks to be of type list"),
    ):
        with pytest.raises(InputError, match=message):
            parse_experiment("fit", wrong)


def test_workers_and_sites_get_no_callbacks() -> None:
    run = experiment(callbacks=[Diary()])
    assert without_images(run).callbacks == []
    Path("mine.yaml").write_text("callbacks: [{class_path: nowhere.Mine}]\ndata: {class_path: DigitsDomains}\n")
    with pytest.raises(InputError, match="nowhere"):
        parse_experiment("fit", ["--config", "mine.yaml"])
    site = SiteWorker(["--config=mine.yaml", "--data.size=8"], {"partition-id": 0})
    assert (site.experiment.callbacks, site.experiment.data.size) == ([], 8)


# --- others that read such a run


def test_a_report_has_stopped_runs() -> None:
    fit(experiment(run_dir="run", callbacks=[EarlyStopping(patience=2)], **STILL))
    table, left_out = read_runs([Path("run")])
    assert (len(table), left_out) == (3, [])
    assert dict(table["training"][0])["callbacks"].startswith("EarlyStopping(metric=None, patience=2, ")
    Path("run/stopped.json").unlink()
    table, (left,) = read_runs([Path("run")])
    assert left.reason == "unfinished: 3 of 6 rounds"


def test_a_suite_knows_stopped_runs() -> None:
    """They are finished for these callbacks; with other ones they are asked again."""
    common = ["--data.size", "8", "--data.num_clients", "4", "--epochs", "1", "--lr", "1e-9", "--rounds", "6"]
    common += ["--backbone", "helpers.tiny_net", "--backend", "LocalBackend", "--run_dir", "suite"]
    matrix = Combinations(None, ("base",), (0,))

    def again(patience: int) -> tuple[int, list[str]]:
        stopping = ["--callbacks+=EarlyStopping", f"--callbacks.patience={patience}"]
        folder, runs = plan(lambda args: parse_experiment("suite", args), [*common, *stopping], matrix)
        said = Lines()
        (outcome,) = run_suite(folder, runs, said)
        assert not outcome.failure
        return len(read_run(outcome.folder).rows), said.said

    assert again(2)[0] == 3
    assert again(2) == (3, ["1 of 1 runs are finished"])
    assert again(3)[0] == 4


def test_a_stop_of_another_form_is_named() -> None:
    finished("run", supervision="base", rounds=1)
    for text in ("{", '{"round": 1}', '{"round": "1", "callback": "a", "reason": "b"}'):
        Path("run/stopped.json").write_text(text)
        with pytest.raises(StorageError, match=r"run/stopped\.json cannot be read"):
            read_run(Path("run"))
    Path("run/stopped.json").write_text('{"round": 7, "callback": "a", "reason": "b"}')
    assert read_stop(Path("run")) is None  # of another round than the last
    Path("run/stopped.json").write_text('{"round": 1, "callback": "a", "reason": "\\u001b[2J b"}')
    assert str(read_run(Path("run")).stop) == "a:  [2J b"
