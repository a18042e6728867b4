"""The report's page in a real browser: all there, nothing cut off, legible on a wide and on a narrow screen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from jdfl_lightning.report.write import write_report
from run_folders import config, write_run, write_study

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
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian: apt-get install chromium)"),
]


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
    broken = str(page_file.parents[1] / "runs" / "broken")  # may be broken into lines, and is shown as it is
    assert broken in page.locator("td.text").all_inner_texts()
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


@pytest.fixture(scope="module")
def wide_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a study with another temperature beside, so that rows name their settings."""
    folder = tmp_path_factory.mktemp("wide")
    runs = write_study(folder / "runs")
    for seed in range(3):
        settings = config("FedAvg", "graded", seed, rounds=30, tau=0.5)
        settings["data"]["init_args"]["size"] = 32
        write_run(runs / f"tau{seed}", settings, [0.6 + seed / 50] * 30, data=f"split {seed}")
    write_report([runs], folder / "report")
    return folder / "report" / "report.html"


def test_no_column_is_cut_off_on_a_wide_screen(browser: Browser, wide_page: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(wide_page.as_uri())
    assert page.locator("th", has_text="settings").count() > 0
    assert set(page.eval_on_selector_all(".scroll", "all => all.map(b => b.scrollWidth - b.clientWidth)")) == {0}
    assert _lines_of_heads(page) == {1}
    page.close()


def test_who_stays_in_view_while_a_table_is_moved(browser: Browser, wide_page: Path) -> None:
    """Algorithm and supervision of a row stay where they are, side by side; the other columns go below them."""
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.goto(wide_page.as_uri())
    places = "b => [...b.querySelectorAll('tbody tr:first-child td')].slice(0, 3).map(c => c.getBoundingClientRect().x)"
    before = page.eval_on_selector(".scroll", places)
    page.eval_on_selector(".scroll", "b => { b.scrollLeft = 150 }")
    after = page.eval_on_selector(".scroll", places)
    assert after[:2] == pytest.approx(before[:2], abs=1)
    assert after[2] == pytest.approx(before[2] - 150, abs=1)
    assert _lines_of_heads(page) == {1}
    page.close()


def _lines_of_heads(page: Page) -> set[int]:
    """Into how many lines the heads of the columns are broken that stay in view."""
    script = "c => { const r = document.createRange(); r.selectNodeContents(c); return r.getClientRects().length }"
    return set(page.eval_on_selector_all("th.pin", f"all => all.map({script})"))


def _brightness(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)``, as WCAG defines it."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    dark, bright = sorted((_brightness(one), _brightness(other)))
    return (bright + 0.05) / (dark + 0.05)
