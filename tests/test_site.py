"""The documentation site is built strictly, says all that the code has, and asks nobody for anything."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from PIL import Image

import jdfl_lightning
from jdfl_lightning import Experiment
from jdfl_lightning.cli import COMMANDS, summary
from jdfl_lightning.config import as_dict

ROOT = Path(__file__).parents[1]


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def words(page: Path) -> str:
    """What a page shows, without its markup."""
    return unescape(re.sub(r"<[^>]+>", "", page.read_text()))


@pytest.mark.slow
def test_every_command_is_there(site: Path) -> None:
    text = words(site / "commands" / "index.html")
    for name, command in COMMANDS.items():
        assert f"usage: jdfl-lightning {name}" in text
        assert summary(command) in text


def names(settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        yield prefix + name
        nested = value.get("init_args", value) if isinstance(value, dict) else {}
        yield from names(nested, f"{prefix}{name}.")


@pytest.mark.slow
def test_every_setting_is_there(site: Path) -> None:
    text = (site / "settings" / "index.html").read_text()
    wanted = set(names(as_dict(Experiment()))) | {"algorithm.mu", "data.download", "backend.actors", "logger.project"}
    assert len(wanted) > 50
    for name in wanted:
        assert f"<code>{name}</code>" in text, name


@pytest.mark.slow
def test_every_export_is_there(site: Path) -> None:
    page = (site / "api" / "index.html").read_text()
    for name in jdfl_lightning.__all__:
        item = getattr(jdfl_lightning, name)
        path = item.__name__ if inspect.ismodule(item) else f"{item.__module__}.{name}"
        assert f'id="{path}"' in page
    assert ":::" not in page
    assert ":math:" not in page


@pytest.mark.slow
def test_nothing_is_fetched(site: Path) -> None:
    """Neither fonts nor scripts nor pictures from elsewhere."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]+src=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link[^>]+rel=\"?(?:stylesheet|preconnect|icon)[^>]*href=\"?([^\" >]+)", text)
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)], page


@pytest.mark.parametrize("name", ["concepts", "targets"])
def test_the_pictures_can_be_drawn_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, file = ROOT / "docs" / "images" / f"{name}.py", tmp_path / f"{name}.png"
    monkeypatch.setattr(sys, "argv", [str(script), str(file)])
    runpy.run_path(str(script), run_name="__main__")
    plt.close("all")
    with Image.open(file) as drawn, Image.open(script.with_suffix(".png")) as committed:
        assert drawn.size == committed.size


MISTAKES = [
    # file, what is there, what is put in its place, what the build says of it
    ("docs/ray.md", "(flower.md)", "(flowers.md)", "ray.md.*flowers.md"),
    (
        "docs/algorithms.md",
        "performance.md#memory-of-the-server",
        "performance.md#memories",
        "algorithms.md.*#memories",
    ),
    ("README.md", "(docs/concepts.md)", "(docs/concept.md)", "index.md.*concept.md"),
    ("README.md", "(configs)", "(config)", "index.md links to ../config, which does not exist"),
    ("mkdocs.yml", "      - Scale: scale.md\n", "      - Scale: scales.md\n", "scales.md"),
    ("mkdocs.yml", "      - Performance: performance.md\n", "", "not included in the .nav.*"),
    (
        "src/jdfl_lightning/data/base.py",
        '"""The classes; a label is a place in this list."""',
        "",
        "class_names has no doc",
    ),
    (
        "src/jdfl_lightning/config/experiment.py",
        '"""T, communication rounds."""',
        "",
        "Experiment.rounds has no docstring",
    ),
    (
        "src/jdfl_lightning/algorithms/base.py",
        "        state: what this",
        "        stat: what this",
        "'stat' does not app",
    ),
]


@pytest.mark.slow
def test_mistakes_are_errors(tmp_path: Path) -> None:
    """Broken links and anchors, pages that are missing or in no menu, and missing docstrings end the build."""
    checkout = tmp_path / "checkout"
    for name in ("docs", "src"):
        shutil.copytree(ROOT / name, checkout / name)
    for name in ("README.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, checkout)
    for name in ("configs", "benchmarks", "examples", "tests"):
        (checkout / name).symlink_to(ROOT / name)
    for file, old, new, _ in MISTAKES:
        text = (checkout / file).read_text()
        assert old in text, (file, old)
        (checkout / file).write_text(text.replace(old, new))
    done = build(checkout, tmp_path / "site")
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    warnings = re.split(r"WARNING - ", said)
    for *_, complaint in MISTAKES:
        assert any(re.search(complaint, warning) for warning in warnings[1:]), (complaint, done.stderr)
