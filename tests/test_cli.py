"""The command line as a user meets it: one clear line for a mistake, nothing on the screen that is not for them."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from rich.table import Table

from helpers import environment, finished, until
from jdfl_lightning.cli import COMMANDS, main
from jdfl_lightning.cli.program import starting
from jdfl_lightning.report.run import accuracy_table
from jdfl_lightning.ui.display import LiveDisplay, PlainDisplay, open_display
from jdfl_lightning.ui.tables import fitted, show_tables, table_width
from run_folders import config, write_run

QUICK = ["--data.size", "8", "--data.num_clients", "4", "--rounds", "2", "--epochs", "1", "--clustering.epochs", "1"]


def bad(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail with one line and exit code 2, and leave nothing behind."""
    before = set(Path.cwd().rglob("*"))
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jdfl-lightning: ")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err
    assert set(Path.cwd().rglob("*")) == before
    return err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--config", "pacs_d.yaml"], "pacs_d.yaml"),
        (["--config", "pacs_b"], "--data.root"),
        (["--config", "pacs_b", "--data.root", "nowhere"], "nowhere"),
        (["--nonsense", "3"], "--nonsense"),
        (["--rounds", "many"], "rounds"),
        (["--rounds", "0"], "--rounds"),
        (["--data.size", "30"], "multiple of 8 but got 30"),
        (["--data.size", "0"], "--data.size"),
        (["--supervision=graded", "--supervision.alpha", "0"], "--supervision.alpha"),
        (["--supervision=graded", "--supervision.alpha", "1.5"], "--supervision.alpha"),
        (["--supervision=graded", "--supervision.alpha", "nan"], "--supervision.alpha"),
        (["--trainer.devices", "0"], "--trainer"),
        (["--trainer.devices", "2", "--trainer.accelerator", "cpu"], "--trainer.devices"),
        (["--logger", "WandbRounds", "--logger.project", "a/b"], "--logger"),
        (["--backbone", "vit_b_16"], "--data.size"),
        (["--clustering.layers", "[nothing.*]"], "nothing.*"),
        (["--supervision", "graded", "--supervision.tau", "0"], "--supervision.tau"),
        (["--supervision.phi", "1.01"], "--supervision.phi"),
        (["--supervision.phi", "-0.5"], "--supervision.phi"),
        (["--score", "mean"], "--score"),
        (["--lr", "-1"], "--lr"),
        (["--epochs", "0"], "--epochs"),
        (["--client_fraction", "0"], "--client_fraction"),
        (["--momentum", "1"], "--momentum"),
        (["--weight_decay", "-1"], "--weight_decay"),
        (["--seed_everything", "-1"], "--seed_everything"),
        (["--num_domains", "11"], "--num_domains"),
        (["--num_domains", "0"], "--num_domains"),
        (["--data.num_clients", "3"], "--data.num_clients"),
        (["--data.num_clients", "100000"], "more than there are images"),
        (["--data.test_fraction", "1"], "--data.test_fraction"),
        (["--clustering.epochs", "0"], "--clustering.epochs"),
        (["--clustering.layers", "Z"], "--clustering.layers"),
        (["--backbone", "resnet1"], "resnet1"),
        (["--supervision", "soft"], "supervision"),
        (["--algorithm", "FedMagic"], "FedMagic"),
        (["--algorithm.mu", "1"], "mu"),
        (["--trainer.accelerator", "abacus"], "abacus"),
        (["--run_dir", "taken"], "--run_dir"),
    ],
)
def test_bad_input_to_fit(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").mkdir()
    (Path("taken") / "file").touch()
    assert named in bad(capsys, "fit", *arguments)


def test_bad_config_files(capsys: pytest.CaptureFixture[str]) -> None:
    for text, named in (("round: 3\n", "round"), ("rounds: [\n", "mine.yaml"), ("- 1\n- 2\n", "mine.yaml")):
        Path("mine.yaml").write_text(text)
        assert named in bad(capsys, "fit", "--config", "mine.yaml")


def test_a_missing_class_and_a_broken_image(image_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", "--data", "ImageFolderDomains", "--data.root", str(image_tree), "--data.size", "8"]
    broken = image_tree / "dark" / "class1" / "3.png"
    broken.write_bytes(b"not a picture")
    assert str(broken) in bad(capsys, *arguments, "--data.num_clients", "2")
    for file in (image_tree / "dark" / "class1").iterdir():
        file.unlink()
    assert "dark has no image of class1" in bad(capsys, *arguments, "--data.num_clients", "2")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train"], "train"),
        (["test"], "--run"),
        (["test", "--run", "nowhere"], "nowhere"),
        (["predict", "--run", "nowhere", "x.png"], "nowhere"),
        (["predict", "--run", "nowhere"], "IMAGES"),
        (["predict", "--run", "nowhere", "--score", "mean", "x.png"], "--score"),
        (["predcit", "--run", "nowhere", "x.png"], "Did you mean 'predict'?"),
        (["predict", "--run", "nowhere", "--weights", "bset", "x.png"], "Did you mean 'best'?"),
        (["suite", "--seeds", "0,x"], "--seeds to be numbers such as 0,1,2 or 2..7 but got '0,x'"),
        (["suite", "--num_domains", "1..99999999999"], "--num_domains to be numbers such as"),
        (["suite", "--run_dir", "seeds", "--lr", "0"], "--lr"),  # a value that is the name of an option
        (["suite", "--seed", "5"], "--seed"),  # no option is abbreviated
        (["fit", "--res", "run"], "--res"),
        (["test", "--run", "nowhere", "--data", "x.yaml"], "--data"),
        (["diagnose", "--max_epochs", "0"], "--max_epochs"),
        (["report"], "RUNS"),
        (["fit", "--config=\n"], "--config"),
        (["fit", "--lr", "9" * 400], "too large"),
    ],
)
def test_bad_input_to_other_commands(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert named in bad(capsys, *arguments)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("fit", "test", "predict", "report"))
    assert main([]) == 2
    assert main(["--version"]) == 0
    capsys.readouterr()
    for arguments, code in ((["runs"], 2), (["runs", "--help"], 0)):
        assert main(arguments) == code
        out = capsys.readouterr().out
        assert [line.split()[:2] for line in out.splitlines() if line.startswith("  ")] == [
            ["runs", name] for name in ("list", "show", "compare", "rm")
        ]
    for arguments in (["--supervision.help", "em"], ["--supervision.help=em"]):
        with pytest.raises(SystemExit) as done:
            main(["fit", *arguments])
        assert done.value.code == 0
        assert "--supervision.extends" in capsys.readouterr().out
    texts = {}
    for command in COMMANDS:
        with pytest.raises(SystemExit) as done:
            main([*command.split(), "--help"])
        assert done.value.code == 0
        texts[command] = " ".join(capsys.readouterr().out.split())
    settings = [
        "Learning rate of the local optimizer;",
        "E_0, local epochs from theta_0 whose update is looked at.",
        "Lightning's precision;",
    ]
    for command in ("fit", "discover", "diagnose", "suite"):
        assert all(sentence in texts[command] for sentence in settings)
    assert "M, the number of pseudo-domains" in texts["fit"]
    assert "Numbers of pseudo-domains to try, such as 2..7" in texts["suite"]
    assert "Batch sizes to try." in texts["diagnose"]
    assert "Folder of the images, if they have moved since the run." in texts["test"]
    assert "--data.root" in texts["test"]
    assert "Image files, or folders of them." in texts["predict"]


def test_print_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["fit", "--config", "pacs_b", "--rounds", "3", "--print_config"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    assert "rounds: 3" in out
    assert "num_clients: 10" in out


@pytest.mark.slow
def test_screen_of_a_real_process(tmp_path: Path) -> None:
    """Not a terminal: plain lines, one a round, and nothing from the inner Trainers or any library."""
    done = subprocess.run(
        [sys.executable, "-m", "jdfl_lightning", "fit", *QUICK, "--run_dir", "run"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:14]] == [
        ["run", "folder:"],
        ["DigitsDomains:", "images"],
        ["domain", "clients"],
        *([domain, "1"] for domain in ("ink", "chalk", "photo", "outline")),
        ["all", "4"],
        ["protocol:", "paper;"],
        ["discovery:", "4"],
        ["pseudo-domains:", "M"],
        ["No", "groups"],  # four clients are too few
        ["round", "1/2"],
        ["round", "2/2"],
    ]
    assert "left" in lines[12]
    assert "best" in done.stdout
    assert lines[-1] == "run folder: run"
    tables = ("┏", "┃", "┡", "│", "└", "class-only accuracy", "best weights", "last weights", "images by")
    assert [line for line in lines[14:-1] if not line.strip().startswith(tables)] == []
    assert "balanced accuracy" in done.stdout
    for name, size in (("curves", (1300, 520)), ("discovery", (1950, 572))):
        with Image.open(f"run/{name}.png") as picture:
            assert picture.size == size
            assert len(set(picture.convert("L").getdata())) > 50  # something is drawn


def test_predict(capsys: pytest.CaptureFixture[str]) -> None:
    finished("run", rounds=1)
    folder = Path("pictures") / "deep"
    folder.mkdir(parents=True)
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    (folder / "notes.txt").write_text("not an image")
    assert main(["predict", "--run", "run", "pictures", str(folder / "1.jpg"), "--output", "out.csv"]) == 0
    with Path("out.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [Path(row["image"]).name for row in rows] == ["0.jpg", "1.jpg", "2.jpg", "1.jpg"]
    for row in rows:
        assert row["class"] in "0123456789"
        assert 0.1 <= float(row["probability"]) <= 1
        assert row["pseudo_domain"] in "012"
    assert rows[1] == rows[3]
    # an unreadable image is named, and the others are not lost
    (folder / "1.jpg").write_bytes(b"broken")
    assert main(["predict", "--run", "run", "pictures"]) == 2
    out, err = capsys.readouterr()
    assert [line.split(",")[0] for line in out.splitlines()] == ["image", str(folder / "0.jpg"), str(folder / "2.jpg")]
    assert "1.jpg cannot be read" in err
    for arguments, named in ((["nothing.png"], "nothing.png"), (["pictures", "--output", "no/where.csv"], "--output")):
        assert main(["predict", "--run", "run", *arguments]) == 2
        assert named in capsys.readouterr().err
    (Path("run") / "best.safetensors").write_bytes(b"x" * 100)
    assert main(["predict", "--run", "run", "pictures"]) == 2
    assert "best.safetensors cannot be read" in capsys.readouterr().err


METRICS = {"test/acc": 0.5, "test/acc_best": 0.5, "test/acc_worst": 0.25, "train/loss": 1.0} | {
    "time/fit": 2.0,
    "time/evaluate": 1.0,
}


def test_plain_display() -> None:
    out = StringIO()
    display = open_display(Console(file=out, width=40))
    assert type(display) is PlainDisplay
    with display:
        display.step("discovery", 1, 2)
        display.step("discovery", 2, 2)
        display.step("round 1", 1, 1)
        display.round(1, 3, METRICS)
    assert out.getvalue().splitlines() == [
        "discovery: 2 done",
        "round 1/3  acc 50.00  best 50.00  worst domain 25.00  loss 1.0000  left 0:06",
    ]


def test_live_display() -> None:
    """Something moves before anything can be counted, and a line of each round stays."""
    out = StringIO()
    display = open_display(Console(file=out, force_terminal=True, width=80))
    assert isinstance(display, LiveDisplay)

    def shown() -> str:
        out.truncate(out.seek(0))
        display._bars.refresh()
        return out.getvalue()

    with display:
        assert "starting" in shown()
        display.say("run folder: x")
        display.step("discovery", 0, 2)
        assert all(part in shown() for part in ("running", "discovery", "0/2"))
        display.step("round 1", 1, 5)
        out.truncate(out.seek(0))
        display.round(1, 3, METRICS)
        assert "round 1/3  acc 50.00  best 50.00  worst domain 25.00  loss 1.0000" in out.getvalue()
        display.step("round 2", 0, 5)
        assert all(part in shown() for part in ("rounds", "1/3", "left 0:06", "round 2", "0/5"))
        display.round(2, 3, METRICS)
        display.round(3, 3, METRICS)
        assert "finishing" in shown()
        assert "/3" not in shown()  # it said 2/3, though all rounds are over
        display.run(2, 4, "fedavg-base-seed1")
        assert all(part in shown() for part in ("runs", "1/4", "starting"))
        assert "round 2" not in shown()


def test_a_terminal_breaks_lines_between_words() -> None:
    """But not a path, which stays in one piece to be copied."""
    out = StringIO()
    display = LiveDisplay(Console(file=out, force_terminal=True, width=30))
    display.say("protocol: paper; picked on the test images\n  short\nrun folder: " + "x" * 40)
    shown = ["protocol: paper; picked on the", "  test images", "  short", "run folder:", "  " + "x" * 40]
    assert out.getvalue().splitlines() == shown


def nine_domains() -> Table:
    rows = {which: {"round": 3.0, "test/acc": 0.5, "test/acc_worst": 0.25} for which in ("best", "last")}
    for row in rows.values():
        row |= {f"test/acc/domain_{place}": place / 10 for place in range(9)}
    return accuracy_table("class-only accuracy (%)", rows)


def test_a_table_that_is_too_wide_is_turned() -> None:
    out = StringIO()
    show_tables(Console(file=out, width=80), [nine_domains()])
    title, *lines = out.getvalue().splitlines()
    assert title == "class-only accuracy (%)"
    assert max(map(len, lines)) <= 80
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells[:3] == [["round", "3", "3"], ["overall", "50.00", "50.00"], ["domain_0", "0.00", "0.00"]]
    assert cells[10:] == [["domain_8", "80.00", "80.00"], ["worst", "25.00", "25.00"]]
    assert fitted(nine_domains(), 140)[0].row_count == 2  # wide enough: as it is


@given(st.integers(2, 12), st.integers(1, 12), st.integers(20, 100))
def test_no_cell_is_lost_or_broken(columns: int, rows: int, width: int) -> None:
    """Whatever the width, every value stands below its column's name or beside it, in a line that fits."""
    table = Table("name", *(f"c{place}" for place in range(columns)), title="title", caption="caption")
    for row in range(rows):
        table.add_row(f"r{row}", *(f"{row}.{place}" for place in range(columns)))
    parts = fitted(table, width)
    found = set()
    for part in parts:
        assert table_width(part) <= width
        _, *heads = [str(column.header) for column in part.columns]
        names, *values = [[str(cell) for cell in column.cells] for column in part.columns]
        for head, cells in zip(heads, values, strict=True):
            found |= {(*sorted((head, name)), cell) for name, cell in zip(names, cells, strict=True)}
    assert found == {(f"c{place}", f"r{row}", f"{row}.{place}") for row in range(rows) for place in range(columns)}
    assert [part.title for part in parts] == ["title", *[None] * (len(parts) - 1)]
    assert [part.caption for part in parts] == [*[None] * (len(parts) - 1), "caption"]


def test_report_ends_with_the_comparison(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for seed, (base, graded) in enumerate([(0.50, 0.52), (0.60, 0.63), (0.55, 0.56)]):
        write_run(Path(f"runs/base{seed}"), config("FedAvg", "base", seed, rounds=1), [base])
        write_run(Path(f"runs/graded{seed}"), config("FedAvg", "graded", seed, rounds=1), [graded])
    assert main(["report", "runs"]) == 0
    out = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("│")[1:5]] for line in out.splitlines() if line.startswith("│")]
    # 2, 3 and 1 points: mean 2, deviation 1, half-width t(0.975, 2) / sqrt(3) = 4.3027 / 1.7321 = 2.48
    assert cells[0] == ["FedAvg base", "55.00 ± 5.00", "-", "-"]
    assert cells[1] == ["FedAvg graded", "57.00 ± 5.57", "+2.00 [-0.48, +4.48]", "undecided"]
    assert out.splitlines()[-1] == "runs compared: 6, left out: 0; see report/report.html"


@pytest.mark.slow
def test_a_terminal_shows_that_a_command_starts() -> None:
    """Before anything is imported, and nothing of it stays; the settings that are printed are not touched."""
    command = f"{sys.executable} -m jdfl_lightning fit --rounds 0"
    done = subprocess.run(["script", "-qec", command, "typescript"], capture_output=True, env=environment())
    assert done.returncode == 2
    first, *_ = done.stdout.decode().split("jdfl-lightning: Expected --rounds")
    assert "starting" in first
    assert first.endswith("\x1b[2K")  # the line is erased
    with starting(["--print_config"]):
        pass


def test_a_terminal_shows_that_a_model_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    monkeypatch.setattr("jdfl_lightning.cli.program.Console", lambda **_: Console(file=out, force_terminal=True))
    assert main(["export", "--run", "nowhere"]) == 2
    assert "exporting" in out.getvalue()


@pytest.mark.slow
def test_interrupt_ends_with_130() -> None:
    """A second SIGINT in the middle of a fit, which Lightning would answer by leaving the process with 1."""
    arguments = ["--data.size", "8", "--data.num_clients", "4", "--supervision", "base", "--client_fraction", "1"]
    arguments += ["--algorithm", "helpers.Waiting", "--algorithm.round", "1", "--algorithm.folder", str(Path.cwd())]
    command = [sys.executable, "-u", "-m", "jdfl_lightning", "fit", *arguments, "--run_dir", "run"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(), **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "run folder: run\n"
        until(Path("begun1").exists)
        process.send_signal(signal.SIGINT)
        stopping = "stopping after the current client; Ctrl-C again to stop at once\n"
        assert stopping in process.stdout  # after the lines that describe the data
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (130, "jdfl-lightning: interrupted\n")
    assert not Path("run/metrics.csv").exists()


@pytest.mark.slow
def test_a_closed_pipe_is_no_error() -> None:
    finished("run", rounds=1, supervision="base")
    Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8)).save("x.png")
    command = f"{sys.executable} -m jdfl_lightning predict --run run {'x.png ' * 500} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment())
    assert (done.stdout, done.stderr) == ("image,class,probability,pseudo_domain\n", "")


@pytest.mark.slow
def test_a_training_whose_output_is_closed_says_so() -> None:
    fits = "fit --data.size 8 --data.num_clients 4 --rounds 30 --epochs 1 --supervision base --run_dir run"
    command = f"{sys.executable} -m jdfl_lightning {fits} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment())
    assert done.stdout == "run folder: run\n"
    assert "jdfl-lightning: the standard output was closed, which ended the command" in done.stderr
