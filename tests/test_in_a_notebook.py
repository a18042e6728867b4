"""What a notebook shows of the package's objects: a line, a table or a picture, never pages of numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import rich.console
import torch
from rich.console import Console

from helpers import digits, experiment, finished
from jdfl_lightning import ImageFolderDomains, SiteFolders
from jdfl_lightning.client.groups import GroupDomains
from jdfl_lightning.clustering.clusters import cluster
from jdfl_lightning.clustering.updates import Updates
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.report.discovery import discovery_tables, draw_discovery
from jdfl_lightning.report.run import Drawing, draw_curves
from jdfl_lightning.studies.inference import predictions
from jdfl_lightning.studies.model import load_to_use
from jdfl_lightning.ui.display import PlainDisplay


def assert_png(picture: Drawing, width: int, height: int) -> None:
    """The size is in the first chunk of a PNG file."""
    shown = picture._repr_png_()
    assert shown.startswith(b"\x89PNG")
    assert (int.from_bytes(shown[16:20], "big"), int.from_bytes(shown[20:24], "big")) == (width, height)


def test_a_run_is_a_line_and_its_curves_a_picture() -> None:
    run = finished("run")
    best = max(row["test/acc"] for row in run.rows)
    assert repr(run) == f"SavedRun(run, 2 rounds, best test/acc {best:.4f})"
    assert_png(draw_curves(run), 1000, 400)
    assert run.discovery is not None
    assert_png(draw_discovery(run.discovery), 1500, 440)


def test_progress_is_text_and_not_a_block_of_html_for_every_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert Console().is_jupyter
    display = PlainDisplay()
    display.say("run folder: " + "x" * 200)
    display.step("discovery", 3, 3)
    assert capsys.readouterr().out.splitlines() == ["run folder: " + "x" * 200, "discovery: 3 done"]


def test_a_data_set_shows_its_arguments() -> None:
    assert repr(digits(4)) == "DigitsDomains(size=8, num_clients=4, test_fraction=0.2)"
    assert "num_clients=4" in repr(experiment(data=digits(4)))
    root = str(Path.cwd() / "pictures")
    shown = f"ImageFolderDomains(root={root!r}, size=16, num_clients=10, test_fraction=0.2)"
    assert repr(ImageFolderDomains("pictures", 16)) == shown
    assert "classes=['a']" in repr(SiteFolders(classes=["a"]))


def test_groups_have_the_tables_and_the_picture_of_a_run() -> None:
    """Two pairs of opposite directions: two pseudo-domains, whoever the groups are."""
    vectors = torch.tensor([[1.0, 0.01], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.01]])
    updates = Updates([0, 1, 2, 3], vectors)
    groups = GroupDomains(["A", "B", "C", "D"], vectors, cluster(updates, 2, "elbow", 4, seed=0))
    first, *_, last = groups.assignments.values()
    assert first != last
    assignments = {"A": first, "B": first, "C": last, "D": last}
    assert repr(groups) == f"GroupDomains(num_domains=2, assignments={assignments})"
    record = groups.record({"A": "ink", "B": "ink", "C": "chalk", "D": "ink"})
    assert record["assignments"] == assignments
    assert record["true_domains"] == {"A": "ink", "B": "ink", "C": "chalk", "D": "ink"}
    assert record["ari"] == 0  # no better than by chance: 1 pair together in both, as expected from 2 * 3 / 6
    assert set(record["projection"]) == set("ABCD")
    assert len(discovery_tables(record, None, 0.1)) == 3
    assert_png(draw_discovery(record), 1500, 440)
    unknown = groups.record()
    assert "ari" not in unknown
    assert len(discovery_tables(unknown, None, 0.1)) == 3
    assert_png(draw_discovery(unknown), 1500, 440)


def test_predict_raises_if_nobody_asks_for_what_cannot_be_read() -> None:
    run = finished("run", rounds=1)
    Path("broken.png").write_bytes(b"broken")
    model = load_to_use(run.folder, "last")
    with pytest.raises(InputError, match=r"broken\.png cannot be read"):
        list(predictions(model, [Path("broken.png")]))
    unreadable: list[str] = []
    assert list(predictions(model, [Path("broken.png")], unreadable)) == []
    assert len(unreadable) == 1
