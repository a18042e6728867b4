"""The report's page in a real browser: all there, nothing cut off, legible on a wide and on a narrow screen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, sync_playwright

from jdfl_lightning.report.write import write_report
from run_folders import write_study

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian: apt-get install chromium)")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a whole study: three algorithms, four supervisions, three seeds, a sweep over M."""
    folder = tmp_path_factory.mktemp("study")
    write_report([write_study(folder / "runs")], folder / "report")
    return folder / "report" / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_page(browser: Browser, page_file: Path, width: int, scheme: Literal["light", "dark"]) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    problems: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(page_file.as_uri())

    assert page.locator("table").count() == 5
    assert page.locator("table:visible").count() == 5
    assert page.locator("tbody tr").count() == 12 + 12 + 12 + 12 + 2
    sizes = page.eval_on_selector_all(
        "img", "all => all.map(i => [i.complete, i.naturalWidth, i.naturalHeight, i.alt])"
    )
    assert len(sizes) == 3
    for complete, natural_width, natural_height, alt in sizes:
        assert complete
        assert natural_width > 500
        assert natural_height > 300
        assert "FedAvg" in alt

    # the page stays where it is; what is wider than the screen scrolls in a box of its own
    page.evaluate("window.scrollTo(1000, 0)")
    assert page.evaluate("[window.scrollX, document.documentElement.scrollWidth]") == [0, width]
    boxes = page.eval_on_selector_all(
        ".scroll, .card", "all => all.map(b => [b.getBoundingClientRect().right, b.scrollWidth - b.clientWidth])"
    )
    assert len(boxes) == 8
    assert all(right <= width for right, _ in boxes)
    assert any(hidden > 0 for _, hidden in boxes) == (width == 400)

    # legible: text and page differ in brightness, and pictures, drawn on white, lie on white
    text, ground, card = (
        page.eval_on_selector(name, f"e => getComputedStyle(e).{style}")
        for name, style in (("body", "color"), ("body", "backgroundColor"), (".card", "backgroundColor"))
    )
    assert _contrast(text, ground) > 7
    assert (_brightness(ground) < 0.2) == (scheme == "dark")
    assert card == "rgb(255, 255, 255)"
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert problems == []
    page.close()


def _brightness(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)``, as WCAG defines it."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    dark, bright = sorted((_brightness(one), _brightness(other)))
    return (bright + 0.05) / (dark + 0.05)
