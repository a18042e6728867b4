"""The pictures of a run: legible with 2 clients and with 40, 2 domains and 9; in the formats that papers need."""

from __future__ import annotations

import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from helpers import experiment
from jdfl_lightning import fit, load_experiment
from jdfl_lightning.cli import main
from jdfl_lightning.report.details import draw_confusion
from jdfl_lightning.report.discovery import draw_discovery
from jdfl_lightning.report.run import draw_curves
from jdfl_lightning.storage.discoveries import read_discovery
from jdfl_lightning.storage.folder import read_run, save_figure
from run_folders import config, write_run

NINE = ("amazon", "caltech", "clipart", "infograph", "painting", "photograph", "quickdraw", "real_world", "webcam")


def write_whole_run(folder: Path, clients: int, domains: tuple[str, ...]) -> Path:
    """A run folder with a discovery of as many pseudo-domains as there are domains, a cluster for each."""
    noise, count = random.Random(clients), len(domains)
    write_run(folder, config("FedAvg", "graded", 0, rounds=4), [0.1, 0.4, 0.5, 0.45], dict.fromkeys(domains, 0.3))
    middles = [(noise.gauss(0, 1), noise.gauss(0, 1)) for _ in domains]
    tried = range(1, min(10, clients) + 1)
    record: dict[str, Any] = {
        **{"num_domains": count, "data": "abc", "criterion": "elbow", "note": "", "picks": {"elbow": count}},
        **{"left_out": {}, "vector_length": 9, "bytes_down": 1, "bytes_up": 1, "ari": 1.0, "nmi": 1.0},
        "assignments": {str(client): client % count for client in range(clients)},
        "true_domains": {str(client): domains[client % count] for client in range(clients)},
        "inertias": {str(m): 10 / m for m in tried},
        "silhouettes": {str(m): 0.5 for m in tried if m > 1},
        "similarities": [[1.0 if a == b else -0.25 for a in range(count)] for b in range(count)],
        "projection": {
            str(client): [middle + noise.gauss(0, 0.1) for middle in middles[client % count]]
            for client in range(clients)
        },
    }
    (folder / "discovery.json").write_text(json.dumps(record))
    return folder


def drawn(figure: Figure) -> Any:
    """Draw a figure, and return what knows the places of its parts."""
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    return figure.canvas.get_renderer()  # type: ignore[attr-defined]


def boxes_of_texts(figure: Figure) -> list[tuple[str, Bbox]]:
    """The visible texts of a figure: labels, numbers, legends, titles."""
    renderer = drawn(figure)
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible() and text.get_text()]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts]


def assert_apart(figure: Figure) -> None:
    """No text lies over another or is cut off by the edge."""
    boxes = boxes_of_texts(figure)
    width, height = figure.canvas.get_width_height()
    for (one, first), (other, second) in combinations(boxes, 2):
        shared = Bbox.intersection(first.padded(-0.5), second.padded(-0.5))
        assert shared is None or shared.width * shared.height == 0, (one, other)
    places = [axes.get_tightbbox(figure.canvas.get_renderer()) for axes in figure.axes]  # type: ignore[attr-defined]
    for box in filter(None, places):
        assert (box.x0 >= -1, box.x1 <= width + 1, box.y0 >= -1, box.y1 <= height + 1) == (True, True, True, True)


@pytest.mark.parametrize(
    ("clients", "domains"), [(2, ("photo", "sketch")), pytest.param(40, NINE, marks=pytest.mark.slow)]
)
def test_nothing_overlaps(clients: int, domains: tuple[str, ...]) -> None:
    folder = write_whole_run(Path("run"), clients, domains)
    found = draw_discovery(read_discovery(folder))
    assert_apart(found)
    curves = draw_curves(read_run(folder))
    assert_apart(curves)
    axes = curves.axes[0]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [*domains, "overall", "best 50.00, round 3"]
    box = legend.get_window_extent(drawn(curves))
    assert not any(box.overlaps(panel.get_window_extent()) for panel in curves.axes)  # it hides no curve
    styles = {(line.get_color(), line.get_linestyle()) for line in axes.get_lines()[: len(domains)]}
    assert len(styles) == len(domains)
    assert_apart(draw_confusion({"test": [[9, 1], [0, 8]], "unseen": [[9, 1], [0, 8]]}, ["tumour", "normal"]))


def test_few_clients_have_their_numbers() -> None:
    found = draw_discovery(read_discovery(write_whole_run(Path("run"), 2, ("photo", "sketch"))))
    panel = next(axes for axes in found.axes if axes.get_title(loc="left").startswith("updates"))
    assert [text.get_text() for text in panel.texts] == ["0", "1"]


@pytest.mark.slow
def test_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """PDF and SVG beside PNG, the same bytes each time, so that a figure in a repository changes with its numbers."""
    folder = write_whole_run(Path("run"), 2, ("photo", "sketch"))
    for name in ("one.png", "two/one.png"):
        Path(name).parent.mkdir(exist_ok=True)
        save_figure(draw_curves(read_run(folder)), Path(name), ["pdf", "svg"])
    for kind, start in (("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")):
        content = Path(f"one.{kind}").read_bytes()
        assert content.startswith(start)
        assert content == Path(f"two/one.{kind}").read_bytes()


def test_formats_of_a_run_and_a_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}

    def save(figure: Figure, file: Path, formats: list[str]) -> None:
        asked[file.name] = formats
        file.touch()

    for module in ("run", "session", "closing"):
        monkeypatch.setattr(f"jdfl_lightning.server.{module}.save_figure", save)
    fit(experiment(rounds=1, run_dir="run", figure_formats=["svg"]), progress=False)
    assert asked == {name: ["svg"] for name in ("discovery.png", "curves.png", "confusion.png")}
    assert load_experiment("digits", "--figure_formats", "pdf,svg").figure_formats == ["pdf", "svg"]
    write_run(Path("runs/one"), config("FedAvg", "base", 0, rounds=1), [0.5])
    for formats, kinds in ((["--formats", "pdf,svg"], {"png", "pdf", "svg"}), ([], {"png"})):  # the second replaces
        assert main(["report", "runs", *formats]) == 0
        assert {file.suffix[1:] for file in Path("report").glob("report-*")} == kinds
    capsys.readouterr()
    assert main(["report", "runs", "--formats", "gif"]) == 2
    assert "--formats" in capsys.readouterr().err
    assert main(["fit", "--figure_formats", "gif"]) == 2
    assert "--figure_formats" in capsys.readouterr().err
