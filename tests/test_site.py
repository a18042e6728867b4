"""The documentation site is built strictly, says all that the code has, and asks nobody for anything."""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from PIL import Image
from playwright.sync_api import sync_playwright

import jdfl_lightning
from jdfl_lightning import Experiment
from jdfl_lightning.cli import COMMANDS, summary
from jdfl_lightning.config import as_dict

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium")


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
    """On the page of its room, to which the page of all names has a link."""
    pages = {file.parent.name: file.read_text() for file in (site / "api").glob("*/index.html")}
    names = (site / "api" / "index.html").read_text()
    for name in jdfl_lightning.__all__:
        item = getattr(jdfl_lightning, name)
        path = item.__name__ if inspect.ismodule(item) else f"{item.__module__}.{name}"
        room = path.split(".")[1]
        assert f'id="{path}"' in pages[room]
        assert re.search(rf'href="?{room}/#{re.escape(path)}"?[ >]', names)
    for page in pages.values():
        assert ":::" not in page
        assert ":math:" not in page
        assert "<blockquote>" not in page  # what Markdown makes of a doctest


@pytest.mark.slow
def test_the_first_page_says_what_the_readme_says(site: Path) -> None:
    """What it is, how to install it, the first command and two pictures; and it has links to every kind of page."""
    text = " ".join(words(site / "index.html").split())
    source = (ROOT / "README.md").read_text()
    what, install = source.split("\n\n")[1], re.findall(r"^```sh\n(.*?)```", source, re.DOTALL | re.MULTILINE)[0]
    for told in (what, *install.splitlines()):
        assert " ".join(told.split()) in text
    page = (site / "index.html").read_text()
    assert re.findall(r'src="?(images/\w+\.png)', page) == ["images/concepts.png", "images/curves.png"]
    cards = page[page.index("grid cards") :]
    for kind in ("first_run/", "notebooks/01_quickstart/", "commands/", "settings/", "api/", "concepts/", "results/"):
        assert re.search(rf'href="?{kind}"?[ >]', cards), kind


@pytest.mark.slow
def test_every_page_is_in_the_menu_of_every_page(site: Path) -> None:
    pages = {file.parent.relative_to(site).as_posix() for file in site.rglob("index.html")}
    assert len(pages) > 50
    for name in (".", "notebooks/01_quickstart", "api/joint"):
        here = site / name
        links = re.findall(r'href="?([^"# >]+)"? class="?md-nav__link', (here / "index.html").read_text())
        found = {Path(os.path.relpath(here / link, site)).as_posix() for link in links}
        assert pages - found - {name} == set()


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda file: file.stem)
def test_notebooks_are_there_with_their_outputs(file: Path, site: Path) -> None:
    """Every text that was printed, every table and every picture."""
    page = site / "notebooks" / file.stem / "index.html"
    text, pictures = "".join(words(page).split()), 0
    for cell in json.loads(file.read_text())["cells"]:
        for output in cell.get("outputs", []):
            shown = output.get("data", {"text/plain": output.get("text", "")})
            html = "".join(shown.get("text/html", ""))
            pictures += ("image/png" in shown) + html.count("data:image/png")
            if "image/png" not in shown:
                told = unescape(re.sub(r"<style.*?</style>|<[^>]+>", "", html, flags=re.DOTALL))
                assert "".join((told or "".join(shown["text/plain"])).split()) in text
    assert pictures > 0
    sources = re.findall(r'<img[^>]*src="?([^" >]+)', page.read_text())
    assert len(sources) == pictures
    for source in sources:
        with Image.open(page.parent / source) as picture:
            assert picture.size > (100, 50)


@pytest.mark.slow
def test_nothing_is_fetched(site: Path) -> None:
    """Neither fonts nor scripts nor pictures from elsewhere."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]+src=\"?([^\" >]+)", text)
        loaded += re.findall(r"<link[^>]+rel=\"?(?:stylesheet|preconnect|icon)[^>]*href=\"?([^\" >]+)", text)
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)], page


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site on a port of this machine: browsers fetch no search index from a file."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian: apt-get install chromium)")
def test_site_in_a_browser(address: str) -> None:
    """The search finds a page; no page is wider than a narrow screen; nothing is asked of anybody else."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.locator("input[name=query]").click()
        page.keyboard.type("SoftTargetKLLoss")
        found = page.locator("a.md-search-result__link").first
        found.wait_for()
        assert "api/joint" in str(found.get_attribute("href"))
        page.set_viewport_size({"width": 400, "height": 900})
        for name in ("", "notebooks/01_quickstart/", "api/joint/", "settings/", "gpu/", "wandb/", "results/features/"):
            page.goto(address + name)
            widths = page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]")
            assert widths == [400, 400], name
        assert [url for url in requests if not url.startswith((address, "data:"))] == []
        browser.close()


@pytest.mark.parametrize("name", [pytest.param("concepts", marks=pytest.mark.slow), "targets"])
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
    ("README.md", "## Start\n", "## Begin\n", "README.md has no section 'Start'"),
    ("docs/settings.md", "(../configs)", "(../config)", "settings.md links to ../config, which does not exist"),
    (
        "notebooks/01_quickstart.ipynb",
        "(../docs/algorithms.md)",
        "(../docs/algorithm.md)",
        "01_quickstart.*algorithm.md",
    ),
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
    for name in ("docs", "notebooks", "src"):
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
