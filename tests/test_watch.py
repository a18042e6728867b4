"""The live page: served to this machine alone, nothing but the run's numbers, and drawn while the run goes on."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers import finished
from jdfl_lightning.cli import main
from jdfl_lightning.storage.folder import lock_run
from jdfl_lightning.storage.metrics import append_metrics, read_numbers
from jdfl_lightning.studies.watch import WatchServer, live_state
from run_folders import config, write_run

CHROMIUM = shutil.which("chromium")


@contextmanager
def served(folder: str) -> Iterator[WatchServer]:
    with WatchServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: WatchServer, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Send a request as it stands, whatever a browser would make of its path."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in ({"Host": f"127.0.0.1:{port}"} | headers).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_what_is_served() -> None:
    write_run(Path("runs/mine"), config("FedAvg", "base", 0, rounds=4), [0.25, 0.5])
    Path("runs/secret").write_text("secret")
    with served("runs/mine") as server:
        assert server.server_address[0] == "127.0.0.1"
        status, headers, page = ask(server, "GET", "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert b"http://" not in page.replace(b"http://www.w3.org/2000/svg", b"")  # nothing from elsewhere
        assert b"https://" not in page
        assert b"innerHTML" not in page  # names of domains are text
        status, headers, body = ask(server, "GET", "/run.json")
        assert (status, headers["Cache-Control"]) == (200, "no-store")
        run = json.loads(body)
        assert (run["name"], run["round"], run["rounds"], run["accuracy"]) == ("mine", 2, 4, 0.5)
        assert run["curves"][0] == {"kind": "overall", "name": "overall", "points": [[1, 0.25], [2, 0.5]]}
        assert ask(server, "HEAD", "/run.json")[::2] == (200, b"")
        # no path names a file, in the run folder or outside
        names = ("/config.yaml", "/metrics.csv", "/../secret", "/%2e%2e/secret", "/run.json?x", "/.", "*")
        for path in (*names, "http://127.0.0.1/run.json"):
            status, _, body = ask(server, "GET", path)
            assert (status, body) == (404, b"not found\n"), path
        # a page of elsewhere whose name leads here; two names; none
        port = server.server_address[1]
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
            assert ask(server, "GET", "/run.json", Host=host)[0] == 421, host
        assert ask(server, "GET", "/run.json", Host=f"localhost:{port}")[0] == 200
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "NONSENSE"):
            status, headers, _ = ask(server, method, "/run.json")
            assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_the_state_follows_the_folder() -> None:
    finished("run", rounds=2)
    folder = Path("run")
    before = live_state(folder)
    assert (before["state"], before["round"], before["discovery"]["num_domains"]) == ("finished", 2, 3)
    assert len(before["discovery"]["projection"]) == 4
    rows = read_numbers(folder)
    assert before["left"] is None
    assert before["spent"] == pytest.approx(sum(row["time/fit"] + row["time/evaluate"] for row in rows))
    assert [curve["name"] for curve in before["curves"]] == ["overall", "ink", "chalk", "photo", "outline"]
    row = {"round": 3, "test/acc": float("nan"), "train/loss": 0.5, "time/fit": 1, "time/evaluate": 1}
    with lock_run(folder):  # a run goes on
        append_metrics(folder, row)
        after = live_state(folder)
    assert (after["state"], after["round"], after["loss"][-1]) == ("running", 3, (3, 0.5))
    assert after["curves"] == before["curves"]  # it was not evaluated
    assert after["spent"] == pytest.approx(before["spent"] + 2)
    assert after["left"] == 0  # it was to have two rounds
    # what cannot be read is said, and the server goes on
    with served("run") as server:
        for damaged in ("round\n1,2\n", "test/acc\n0.5\n"):  # a row that is too long; no column of rounds
            (folder / "metrics.csv").write_text(damaged)
            assert "metrics.csv" in json.loads(ask(server, "GET", "/run.json")[2])["problem"]
        (folder / "metrics.csv").unlink()
        (folder / "metrics.csv").symlink_to("/etc/hostname")
        assert "is a link" in json.loads(ask(server, "GET", "/run.json")[2])["problem"]


def test_bad_input_to_watch(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("runs/one").mkdir(parents=True)
    for arguments, named in (
        (["nowhere"], "nowhere"),
        (["runs"], "the folder of one run"),
        (["run", "--port", "99999"], "--port"),
        (["run", "run"], "RUNS"),
    ):
        assert main(["watch", *arguments]) == 2
        assert named in capsys.readouterr().err
    with WatchServer("run") as server:
        assert main(["watch", "run", "--port", str(server.server_address[1])]) == 2
    assert "--port to be free" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("width", [1600, 1280, 400])
def test_the_page_in_a_browser(width: int) -> None:
    """The page draws a run, follows it without a reload, shows names as text, and stays within the screen."""
    from playwright.sync_api import sync_playwright

    finished("run", rounds=2)
    folder, name = Path("run"), "<img src=x onerror=alert(1)>"
    problems: list[str] = []
    requests: list[str] = []
    with served("run") as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(server.url)
        page.wait_for_selector("#accuracy polyline", state="attached")  # a level line has no height
        assert page.locator("#name").inner_text() == "run: finished"
        assert re.fullmatch(r"\d+:\d\d\stime of the rounds", page.locator(".tile").last.inner_text())
        assert page.locator("#accuracy polyline").count() == 5
        assert page.locator("#clients path").count() == 4 + 4 + 3  # clients; the legend's domains and pseudo-domains
        assert [points(page, place) for place in range(2)] == [2, 2]
        row: dict[str, Any] = {"round": 3, "test/acc": 0.5, "test/acc_worst": 0.5, "train/loss": 0.5}
        append_metrics(folder, row | {f"test/acc/{name}": 0.5})
        page.reload()  # a finished run is looked at every quarter of a minute
        # a function is compiled once, an expression at each look, which the page's policy forbids
        page.wait_for_function("() => document.querySelectorAll('#accuracy polyline').length === 6")
        assert points(page, 0) == 3
        assert any(name in text for text in page.locator("#accuracy li").all_inner_texts())
        assert page.locator("img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert lines_of_cards(page) == ([1, 3] if width > 1200 else [1] * 4)
        page.set_viewport_size({"width": 800, "height": 900})  # what is there is drawn anew
        page.wait_for_function("() => document.querySelector('#clients svg').viewBox.baseVal.width > 700")
        assert lines_of_cards(page) == [1, 2, 1]
        drawn = "document.querySelector('#loss svg').getBoundingClientRect().width"
        assert page.evaluate(f"{drawn} / document.querySelector('#loss svg').viewBox.baseVal.width") == pytest.approx(
            1, abs=0.02
        )
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(
            f"() => Math.abs({drawn} / document.querySelector('#loss svg').viewBox.baseVal.width - 1) < 0.02"
        )
        page.locator("#accuracy svg").first.hover()  # values of the round below the pointer
        page.wait_for_selector("#accuracy line[visibility=visible]", state="attached")
        assert page.locator("#accuracy li").first.inner_text().startswith("overall")
        browser.close()
    assert problems == []
    assert set(requests) == {server.url, f"{server.url}run.json"}


def points(page: Any, line: int) -> int:
    """Return the number of points of a line of the accuracies."""
    return len(page.locator("#accuracy polyline").nth(line).get_attribute("points").split())


def lines_of_cards(page: Any) -> list[int]:
    """Return how many cards stand in each line, each of which has to reach from edge to edge."""
    script = "all => all.map(c => c.getBoundingClientRect()).map(b => [b.top, b.left, b.right])"
    lines: dict[float, list[list[float]]] = {}
    for top, *edges in page.eval_on_selector_all(".card:not([hidden])", script):
        lines.setdefault(top, []).append(edges)
    [[_, left, right]] = page.eval_on_selector_all(".cards", script)
    for cards in lines.values():
        assert cards[0][0] == pytest.approx(left, abs=1)
        assert cards[-1][1] == pytest.approx(right, abs=1)
    return [len(cards) for cards in lines.values()]
