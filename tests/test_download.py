"""Downloads, from a server on loopback."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jdfl_lightning.data.folder import KnownDomains
from jdfl_lightning.errors import InputError, Note


class Fruit(KnownDomains):
    """A data set of 2 domains x 2 classes that only this server has."""

    domain_names = ("photo", "sketch")
    class_names = ("apple", "pear")
    counts = {"photo": (4, 3), "sketch": (3, 4)}
    mirrors: tuple[str, ...] = ()
    terms = "eat it."


def archive(counts: dict[str, tuple[int, ...]], top: str = "fruit-master") -> bytes:
    picture = io.BytesIO()
    Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8)).save(picture, "PNG")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as out:
        for domain, numbers in counts.items():
            for label, number in zip(Fruit.class_names, numbers, strict=True):
                for n in range(number):
                    out.writestr(f"{top}/{domain}/{label}/{n}.png", picture.getvalue())
    return buffer.getvalue()


class Handler(BaseHTTPRequestHandler):
    files: dict[str, bytes] = {}

    def do_GET(self) -> None:
        if self.path not in self.files:
            self.send_error(404)
            return
        content = self.files[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if "cut" in self.path else content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.files = {
        "/good.zip": archive(Fruit.counts),
        "/cut.zip": archive(Fruit.counts),
        "/few.zip": archive({"photo": (4, 2), "sketch": (3, 4)}),
        "/page.zip": b"<html>quota exceeded</html>",
        "/evil.zip": archive({"photo": (4, 3), "sketch": (3, 4)}, top="../../outside"),
    }
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def fruit(root: Path, *mirrors: str) -> Fruit:
    data = Fruit(root=str(root), size=8, num_clients=2, download=True)
    data.mirrors = mirrors
    return data


def test_goes_on_to_the_mirror_that_works(server: str, tmp_path: Path) -> None:
    root = tmp_path / "data" / "fruit"
    steps: list[tuple[str, int, int]] = []
    data = fruit(root, *(f"{server}/{name}.zip" for name in ("missing", "page", "cut", "few", "good")))
    data.progress = lambda *step: steps.append(step)
    with pytest.warns(Note, match=r"Terms: eat it\."):
        data.setup()
    assert len(data.images) == 14
    assert [path.name for path in root.parent.iterdir()] == ["fruit"]  # nothing is left aside
    assert steps[0][0] == "downloading (bytes)"
    data.mirrors = ()
    fruit(root).setup()  # what is there is not fetched again


def test_says_what_to_do_when_no_mirror_works(server: str, tmp_path: Path) -> None:
    root = tmp_path / "fruit"
    data = fruit(root, f"{server}/missing.zip", f"{server}/few.zip", "http://127.0.0.1:9/closed.zip")
    with pytest.warns(Note), pytest.raises(InputError) as error:
        data.setup()
    for part in ("missing.zip (HTTP Error 404", "photo has (4, 2) images", "closed.zip", str(root), "apple, pear"):
        assert part in str(error.value)
    assert not root.exists()
    assert not list(tmp_path.glob(".download*"))


def test_an_archive_cannot_write_outside(server: str, tmp_path: Path) -> None:
    root = tmp_path / "deep" / "down" / "fruit"
    with pytest.warns(Note):
        fruit(root, f"{server}/evil.zip").setup()
    assert not list(tmp_path.rglob("outside/../../*.png"))
    assert {path.name for path in tmp_path.iterdir()} == {"deep", "cache", "work"}
    assert {path.name for path in root.parent.iterdir()} == {"fruit"}


def test_needs_a_root() -> None:
    with pytest.raises(InputError, match="folder to download to"):
        Fruit(download=True, size=8).setup()


def test_an_unwritable_root_is_named(server: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(Note), pytest.raises(InputError, match="writable"):
        fruit(tmp_path / "file" / "fruit", f"{server}/good.zip").setup()
