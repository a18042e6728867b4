"""What users, files, networks and job queues do wrong: each ends in one clear line, and none in nonsense."""

from __future__ import annotations

import csv
import io
import os
import signal
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers import Lines, children, contents, digits, environment, experiment, finished, until
from jdfl_lightning import (
    MOON,
    PACS,
    Clustering,
    DigitsDomains,
    DomainDataModule,
    Experiment,
    FedAvg,
    HardTargets,
    ImageFolderDomains,
    JointAccuracy,
    JointHead,
    LocalUpdate,
    PoolBackend,
    RandomTargets,
    SoftTargetKLLoss,
    TargetRule,
    fit,
)
from jdfl_lightning.algorithms import RobustFedAvg
from jdfl_lightning.cli import main
from jdfl_lightning.client.trainer import TrainerOptions, check_trainer
from jdfl_lightning.core.errors import InputError, Note
from jdfl_lightning.core.messages import FitResult, FitTask, RoundContext
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.data import cache
from jdfl_lightning.joint import joint_index, split_index
from jdfl_lightning.models import build_backbone
from jdfl_lightning.report.comparison import COLUMNS
from jdfl_lightning.report.tables import as_csv
from jdfl_lightning.server import journal as journals
from jdfl_lightning.server.resume import require_equal
from jdfl_lightning.storage.metrics import append_metrics
from jdfl_lightning.studies.inference import write_predictions
from jdfl_lightning.supervision import Graded

if TYPE_CHECKING:
    from lightning.pytorch import Trainer as Unseen

posix = pytest.mark.skipif(os.name != "posix", reason="signals and pipes")


# --- images


@pytest.mark.parametrize("size", [16, 32, 100])
@pytest.mark.parametrize("side", [128, 500])
def test_the_same_pixels_give_the_same_image(size: int, side: int, tmp_path: Path) -> None:
    """A JPEG, and its pixels saved as PNG: what a network sees does not depend on the format of a file."""
    noise = np.random.default_rng(0).integers(0, 256, (side, side + 60, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "x.jpg", quality=95)
    with Image.open(tmp_path / "x.jpg") as image:
        image.save(tmp_path / "x.png")
    assert np.array_equal(cache.decode(tmp_path / "x.jpg", size), cache.decode(tmp_path / "x.png", size))


@pytest.mark.slow
def test_the_same_pixels_of_real_photographs(real_data: Path, tmp_path: Path) -> None:
    for file in sorted((real_data / "pacs" / "photo").rglob("*.jpg"))[::100]:
        with Image.open(file) as image:
            image.convert("RGB").save(tmp_path / "x.png")
        assert np.array_equal(cache.decode(file, 32), cache.decode(tmp_path / "x.png", 32))


@contextmanager
def pipe_at(path: Path) -> Iterator[None]:
    """A pipe that ends at once for whoever reads it, so that a test that reads it fails instead of hanging."""
    os.mkfifo(path)
    over = threading.Event()

    def write_nothing() -> None:
        while not over.is_set():
            path.open("wb").close()  # waits for a reader

    writer = threading.Thread(target=write_nothing)
    writer.start()
    try:
        yield
    finally:
        over.set()
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writer.join()
        os.close(reader)


@posix
def test_a_pipe_is_no_image(image_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reading it would wait for ever for somebody who writes."""
    finished("run", rounds=1, supervision="base")
    pipe = image_tree / "dark" / "class1" / "x.png"
    with pipe_at(pipe):
        with pytest.raises(InputError, match=r"class1/x\.png is not a regular file"):
            ImageFolderDomains(root=str(image_tree), size=8, num_clients=2).setup()
        assert main(["predict", "--run", "run", str(pipe.parent)]) == 2
    out, err = capsys.readouterr()
    assert err == f"jdfl-lightning: Expected an image but {pipe} is not a regular file. Replace or remove it.\n"
    assert len(out.splitlines()) == 1 + 6  # the others are not lost


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.parametrize("limit", [None, 100])
def test_a_huge_image_is_refused_by_its_header(
    limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """13,000 x 13,000 pixels of which none is there, whatever Pillow's own limit is."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    header = struct.pack(">IIBBBBB", 13_000, 13_000, 8, 2, 0, 0, 0)
    file = tmp_path / "huge.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b""))
    expected = r"at most 50 megapixels but .*huge\.png has 169: make it smaller" if limit is None else "huge.png"
    with pytest.raises(InputError, match=expected):
        cache.decode(file, 8)


# --- settings given in Python


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Experiment, {"supervision": "Graded"}, r"--supervision .*'graded'.* got 'Graded'\. Did you mean 'graded'\?"),
        (Experiment, {"score": "maximum"}, r"--score to be one of 'max', 'sum', 'own' but got 'maximum'"),
        (Clustering, {"criterion": "elbo"}, r"--clustering\.criterion .*Did you mean 'elbow'"),
        (Clustering, {"newcomers": "nearst"}, r"--clustering\.newcomers .*Did you mean 'nearest'"),
        (TrainerOptions, {"precision": "33"}, r"--trainer\.precision to be one of '32-true'"),
        (FedAvg, {"weighting": "sample"}, r"--algorithm\.weighting .*Did you mean 'samples'"),
        (MOON, {"weighting": "none"}, r"--algorithm\.weighting to be one of"),
        (RobustFedAvg, {"rule": "mean"}, r"--algorithm\.rule to be one of 'median', 'trimmed_mean' but got 'mean'"),
        (MOON, {"mu": "1"}, r"--algorithm\.mu to be of type float but got '1'"),
        (Experiment, {"algorithm": "FedAvg"}, r"--algorithm to be of type Algorithm but got 'FedAvg'\. .*FedAvg\(\)\?"),
        (Experiment, {"algorithm": FedAvg}, r"--algorithm to be of type Algorithm but got .* mean FedAvg\(\)\?"),
        (Experiment, {"data": "PACS"}, r"--data to be of type DomainDataModule but got 'PACS'\. .*PACS\(\)\?"),
        (Experiment, {"backend": "pool"}, r"--backend to be of type Backend but got 'pool'"),
        (Experiment, {"logger": "wandb"}, r"--logger to be of type .*Logger or bool but got 'wandb'"),
        (Experiment, {"clustering": {"epochs": 3}}, r"--clustering to be of type Clustering"),
        (Experiment, {"rounds": "3"}, r"--rounds to be of type int but got '3'"),
        (Experiment, {"rounds": True}, r"--rounds to be of type int but got True"),
        (Experiment, {"rounds": 2.0}, r"--rounds to be of type int but got 2\.0"),
        (Experiment, {"lr": float("nan")}, r"--lr to be of type float but got nan"),
        (Experiment, {"lr": float("inf")}, r"--lr to be positive and finite but got inf"),
        (Experiment, {"lr": np.float64(0.1)}, r"--lr to be of type float but got np\.float64\(0\.1\)"),
        (Experiment, {"lr": False}, r"--lr to be of type float but got False"),
        (Graded, {"alpha": "0.5"}, r"--supervision.alpha to be of type float but got '0\.5'"),
        (PoolBackend, {"workers": "all"}, r"--backend\.workers to be of type int or 'auto' but got 'all'"),
        (PoolBackend, {"workers": True}, r"--backend\.workers to be of type int"),
        (Clustering, {"layers": ["a", 3]}, r"--clustering\.layers to be of type str or list\[str\]"),
        (DigitsDomains, {"size": "16"}, r"--data\.size to be of type int but got '16'"),
        (PACS, {"num_clients": 4.0}, r"--data\.num_clients to be of type int but got 4\.0"),
        (PACS, {"test_fraction": float("nan")}, r"--data\.test_fraction to be of type float"),
        (JointHead, {"in_features": 4, "num_classes": 2, "score": "Sum"}, r"argument `score` .*Did you mean 'sum'"),
        (JointAccuracy, {"num_classes": 2, "score": "Sum"}, r"argument `score` .*Did you mean 'sum'"),
        (SoftTargetKLLoss, {"reduction": "avg"}, r"argument `reduction` to be one of 'mean', 'sum', 'none'"),
    ],
)
def test_settings_are_checked_where_they_are_made(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        kind(**arguments)


@dataclass(frozen=True)
class Own(FedAvg):
    """A user's algorithm with a hint that only a type checker knows."""

    strange: Unseen | None = None


def test_what_is_meant_is_taken() -> None:
    """An int for a float, a path for a string, a logger, hints that cannot be read."""
    given: dict[str, Any] = {"run_dir": Path("x"), "algorithm": Own()}
    Experiment(lr=1, supervision=Graded(alpha=1), logger=True, **given)
    given = {"weighting": "all"}
    with pytest.raises(InputError, match="weighting"):
        Own(**given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--supervision", "gradedd"], "Did you mean graded?"),
        (["--clustering.criterion", "silhuette"], "Did you mean silhouette?"),
        (["--trainer.precision", "bf16-mixt"], "Did you mean 'bf16-mixed'?"),
        (["--trainer.accelerator=tpu"], "--trainer"),
        (["--config"], "--config"),
    ],
)
def test_wrong_choices_on_the_command_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["predict", "--run=--", "X"], ["test", "--run=--"], ["report", "--output=--", "X"]], ids=str
)
def test_two_dashes_are_no_value(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """For newer versions of argparse they are a value: a folder that is not there."""
    parser = ArgumentParser()
    parser.add_argument("--run")
    are_value = parser.parse_args(["--run=--"]).run == "--"
    assert main(arguments) == 2
    err = capsys.readouterr().err
    name = arguments[1].removesuffix("=--")
    if are_value:
        assert "there is no folder" in err or "-- has no config.yaml" in err
    else:
        assert f"Expected {name} to be given, and with a value." in err
    assert len(err.splitlines()) == 1


def test_an_accelerator_whose_library_is_missing() -> None:
    with pytest.raises(InputError, match=r"--trainer to have options that work on this machine but: .*torch_xla"):
        check_trainer(TrainerOptions(accelerator="tpu"))


# --- a user's own data


class Given(DomainDataModule):
    """Two domains, three classes, and whatever `load` is to return."""

    domain_names = ("a", "b")
    class_names = ("x", "y", "z")

    def __init__(self, loaded: Any) -> None:
        super().__init__(size=4, num_clients=2, test_fraction=0.25)
        self.loaded = loaded

    def load(self) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = self.loaded
        return found


IMAGES = torch.arange(24, dtype=torch.uint8).view(24, 1, 1, 1).expand(24, 4, 4, 3).clone()
LABELS, DOMAINS = torch.arange(24) % 3, torch.arange(24) // 12


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (None, r"three tensors \(images, labels, domains\) but got NoneType"),
        ((IMAGES, LABELS), "three tensors"),
        ((IMAGES.numpy(), LABELS, DOMAINS), r"three tensors .* but got \['ndarray', 'Tensor', 'Tensor'\]"),
        ((IMAGES.float(), LABELS, DOMAINS), r"images of type uint8, .* but got torch\.float32"),
        ((IMAGES.permute(0, 3, 1, 2), LABELS, DOMAINS), r"images of shape \(N, 4, 4, 3\) but got \(24, 3, 4, 4\)"),
        ((IMAGES[:, :2, :2], LABELS, DOMAINS), r"images of shape \(N, 4, 4, 3\) but got \(24, 2, 2, 3\)"),
        ((IMAGES, LABELS.float(), DOMAINS), r"labels that are integers but got torch\.float32"),
        ((IMAGES, LABELS, DOMAINS > 0), r"domains that are integers but got torch\.bool"),
        ((IMAGES, LABELS[:-1], DOMAINS), r"labels of shape \(24,\), one for each image, but got \(23,\)"),
        ((IMAGES, LABELS + 1, DOMAINS), r"labels from 0 to 2, the places in class_names, but got 3"),
        ((IMAGES, LABELS, DOMAINS - 1), r"domains from 0 to 1, the places in domain_names, but got -1"),
    ],
)
def test_what_load_returns_is_checked(loaded: Any, message: str) -> None:
    for use in ("setup", "deal"):
        with pytest.raises(InputError, match=rf"Expected Given\.load\(\) to return {message}"):
            getattr(Given(loaded), use)(*[0] * (use == "deal"))


def test_small_integers_are_labels_too() -> None:
    data = Given((IMAGES, LABELS.to(torch.int16), DOMAINS.to(torch.uint8)))
    data.setup()
    assert data.labels.dtype == data.domains.dtype == torch.int64


def test_a_class_that_no_test_image_is_of_is_named() -> None:
    """Domain b has 10 images of x and one each of y and z: a quarter held out by shares is of x alone."""
    labels = torch.cat([torch.arange(12) % 3, torch.tensor([0] * 10 + [1, 2])])
    data = Given((IMAGES, labels, DOMAINS))
    data.deal(0)
    assert data.untested() == {"b": ["y", "z"]}
    with pytest.warns(Note, match="The test images of b have none of y, z") as notes:
        fit(experiment(data=data, num_domains=None, supervision="base", rounds=1, run_dir="run"))
    assert len([note for note in notes if "test images" in str(note.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", Note)
        fit(
            experiment(
                data=Given((IMAGES, LABELS, DOMAINS)), num_domains=None, supervision="base", rounds=1, run_dir="other"
            )
        )


# --- targets, indices, aggregation


@pytest.mark.parametrize("rule", [HardTargets, RandomTargets])
@pytest.mark.parametrize("count", [0, -1])
def test_there_is_at_least_one_domain(rule: Any, count: int) -> None:
    with pytest.raises(InputError, match=f"`num_domains` to be at least 1 but got {count}"):
        rule(count)


@pytest.mark.parametrize(
    "table",
    [
        [[0.5, 0.5], [0.5, 0.4]],
        [[1.0, 0.0], [1.5, -0.5]],
        [[1.0, 0.0], [float("nan"), 1.0]],
        [[1, 0], [float("inf"), 0]],
    ],
)
def test_rows_of_a_table_are_distributions(table: list[list[float]]) -> None:
    with pytest.raises(InputError, match="to sum to 1 but row 1"):
        TargetRule(table)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounding_is_no_error_in_a_table(dtype: torch.dtype) -> None:
    TargetRule(torch.rand(50, 50).softmax(1).to(dtype))
    TargetRule([[1, 0], [0, 1]])


def test_indices_are_in_range() -> None:
    for domain, label in ((-1, 0), (0, -1), (0, 7)):
        with pytest.raises(InputError, match=r"Expected argument `(domain|label)` to be"):
            joint_index(domain, label, num_classes=7)
        with pytest.raises(InputError, match=r"Expected argument `(domain|label)` to be"):
            joint_index(torch.tensor([1, domain]), torch.tensor([1, label]), num_classes=7)
    with pytest.raises(InputError, match="`index` to be at least 0"):
        split_index(torch.tensor([3, -1]), num_classes=7)
    with pytest.raises(InputError, match="`index` to be at least 0"):
        JointAccuracy(num_classes=7)(torch.tensor([3, -1]), torch.tensor([3, 6]))
    assert len(split_index(torch.empty(0, dtype=torch.long), num_classes=7)[0]) == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_something_is_left_of_a_trimmed_mean(count: int) -> None:
    """Just below a half: of two participants both are left, of four the middle two."""
    results = [FitResult(client, 1, 1, weights={"w": torch.tensor([float(client)])}) for client in range(count)]
    rule = RobustFedAvg(rule="trimmed_mean", trim=0.5 - 1e-12)
    weights, _ = rule.aggregate({"w": torch.zeros(1)}, {}, results, RoundContext(1, count, count))
    assert weights["w"].item() == (count - 1) / 2


# --- an error in a user's own class


class Buggy(FedAvg):
    """A user's algorithm that does not work."""

    def local(self, task: FitTask, state: dict[str, Tensors]) -> LocalUpdate:
        raise KeyError("momentun")


class PartlyBuggy(FedAvg):
    """One that does not work for clients 0 to 2."""

    def local(self, task: FitTask, state: dict[str, Tensors]) -> LocalUpdate:
        if task.client < 3:
            raise KeyError("momentun")
        return super().local(task, state)


def buggy_net(size: int) -> torch.nn.Module:
    """A backbone that works once, when it is looked at."""
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Flatten())
    network.register_forward_pre_hook(_fail_in_training)
    return network


def _fail_in_training(module: torch.nn.Module, inputs: Any) -> None:
    if module.training and torch.is_grad_enabled():
        raise KeyError("channels")


def test_a_bug_is_shown_once() -> None:
    lines = Lines()
    with pytest.raises(InputError, match=r"round 1 but all 4 failed alike: KeyError: 'momentun'$") as error:
        fit(experiment(algorithm=Buggy(), supervision="base", run_dir="run"), lines)
    assert "Traceback" in str(error.value.__cause__)
    said = "\n".join(lines.said)
    assert said.count("Traceback") == 1
    assert said.count("does not count") == 4  # in one attempt
    assert lines.said[-1] == "round 1: client 3 does not count: KeyError: 'momentun'"


def test_a_bug_of_some_clients_is_shown_once() -> None:
    lines = Lines()
    run = fit(experiment(algorithm=PartlyBuggy(), supervision="base", run_dir="run"), lines)
    assert [row["refused"] for row in run.rows] == [3, 3]
    assert "\n".join(lines.said).count("Traceback") == 1


def test_a_bug_in_discovery_is_shown_once() -> None:
    lines = Lines()
    with pytest.raises(InputError, match=r"Client 0: KeyError: 'channels'$"):
        fit(experiment(backbone="test_bad_input.buggy_net", run_dir="run"), lines)
    assert "\n".join(lines.said).count("Traceback") == 1
    assert "client 3 has no pseudo-domain yet: KeyError: 'channels'" in lines.said


# --- SIGTERM


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return [*found, *(below for child in found for below in descendants(child))]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("backend", [["--backend", "LocalBackend"], ["--backend.workers", "2"]], ids=["local", "pool"])
def test_sigterm_saves_and_ends(backend: list[str]) -> None:
    """In the middle of a fit; a job queue sends it to every process of the job. The run is then continued."""
    arguments = [
        "--data.size",
        "8",
        "--data.num_clients",
        "4",
        "--rounds",
        "3",
        "--epochs",
        "1",
        "--supervision",
        "base",
    ]
    arguments += ["--client_fraction", "1", "--backbone", "helpers.tiny_net", "--checkpoint.every", "50", *backend]
    arguments += ["--algorithm", "helpers.Waiting", "--algorithm.folder", str(Path.cwd())]
    command = [sys.executable, "-u", "-m", "jdfl_lightning", "fit", *arguments, "--run_dir", "cut"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as run:
        assert run.stdout is not None
        until(Path("begun1").exists)
        processes = descendants(run.pid)
        for process in [*processes, run.pid]:
            os.kill(process, signal.SIGTERM)
        for line in run.stdout:
            if line.startswith("stopping after the current client; a second signal"):
                break
        Path("go").touch()
        out, err = run.communicate(timeout=300)
    assert (run.returncode, err) == (143, "jdfl-lightning: terminated\n")
    assert out.splitlines()[-1] == "resume with: jdfl-lightning fit --resume cut"
    assert [file.name for file in Path("cut/checkpoints").iterdir()] == ["1.safetensors"]
    until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes), what="the end of all processes")
    for rest in (["--resume", "cut"], [*arguments, "--run_dir", "whole"]):
        subprocess.run([sys.executable, "-m", "jdfl_lightning", "fit", *rest], env=environment(), check=True)
    assert contents("cut") == contents("whole")


# --- tables


class CutError(Exception):
    """A run that ends in the middle."""


@pytest.mark.parametrize("supervision", ["base", "graded"])
def test_a_continued_table_is_the_same_bytes(supervision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut between a round's checkpoint and its row, which is then written from what the checkpoint holds."""
    changes: dict[str, Any] = {"rounds": 3, "supervision": supervision, "data": digits()}
    fit(experiment(run_dir="whole", **changes))

    def cut(folder: Path, row: dict[str, float]) -> None:
        if row["round"] == 2:
            raise CutError
        append_metrics(folder, row)

    monkeypatch.setattr(journals, "append_metrics", cut)
    with pytest.raises(CutError):
        fit(experiment(run_dir="cut", **changes))
    monkeypatch.setattr(journals, "append_metrics", append_metrics)
    fit(experiment(resume="cut", **changes))

    def cells(folder: str) -> list[list[str]]:
        rows = list(csv.reader(io.StringIO((Path(folder) / "metrics.csv").read_text(), newline="")))
        return [[cell for name, cell in zip(rows[0], row, strict=True) if not name.startswith("time/")] for row in rows]

    assert cells("cut") == cells("whole")
    assert cells("cut")[2][cells("cut")[0].index("clients")] == "4"


FORMULAS = ["=1+1", " =1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1"]


@pytest.mark.parametrize("text", FORMULAS)
def test_no_text_is_a_formula(text: str) -> None:
    out = io.StringIO()
    write_predictions([{"image": Path(text), "class": text, "probability": 0.5, "pseudo_domain": 1}], out)
    _, row = csv.reader(io.StringIO(out.getvalue(), newline=""))
    safe = f"'{text}".replace("\r", " ")  # a carriage return would end the line
    assert row[:2] == [safe, safe]
    assert row[2:] == ["0.5000", "1"]
    record = dict.fromkeys(COLUMNS) | {"experiment": text, "domain": text, "mean": -0.5, "paper": None, "seeds": "0 1"}
    (read,) = csv.DictReader(io.StringIO(as_csv(pd.DataFrame([record], dtype=object)), newline=""))
    assert (read["experiment"], read["domain"], read["mean"], read["paper"], read["seeds"]) == (
        safe,
        safe,
        "-0.5",
        "",
        "0 1",
    )


# ---------------------------------------------------------------------------------------------- words of messages


def test_a_setting_that_one_side_has_not() -> None:
    with pytest.raises(InputError, match=r"Expected --b to be left out as in run but got 3: why"):
        require_equal({"a": 1}, {"a": 1, "b": 3}, "run", "why")
    with pytest.raises(InputError, match=r"Expected --b to be 3 as in run but it is left out: why"):
        require_equal({"a": 1, "b": 3}, {"a": 1}, "run", "why")


def test_a_message_has_one_full_stop(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text("rounds: 1")
    Path("run/metrics.csv").write_text("round\n")
    assert main(["report", "run"]) == 2
    error = capsys.readouterr().err
    assert error.endswith("Expected a run with a finished round but run has none.\n")
    with pytest.raises(InputError, match=r"failed: Give me another size\.$"):
        build_backbone("test_bad_input.no_net", 8)


def no_net(size: int) -> torch.nn.Module:
    raise ValueError("Give me another size.")


def test_a_folder_that_is_no_run_is_named_so(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main(["predict", "--run", "empty", "x.png"]) == 2
    assert "Expected a run folder but empty has no config.yaml" in capsys.readouterr().err


def test_the_folder_of_one_domain() -> None:
    Path("photos/dog").mkdir(parents=True)
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save("photos/dog/a.png")
    with pytest.raises(InputError, match=r"found none in .*photos\. It has <class>/<image>: give the folder above it"):
        ImageFolderDomains("photos").setup()


def test_one_pseudo_domain_is_said_to_be_the_plain_head() -> None:
    found = []
    for settings in ({"clustering": Clustering(epochs=1, max_domains=1), "num_domains": None}, {"num_domains": 1}):
        display = Lines()
        run = fit(experiment(rounds=1, supervision="hard", **settings), display)
        assert run.discovery is not None
        assert run.discovery["num_domains"] == 1
        found.append(any("No groups of clients were found" in line for line in display.said))
    assert found == [True, False]
