"""Downloads, from a server on loopback."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jdfl_lightning.core.errors import InputError, Note
from jdfl_lightning.data import download
from jdfl_lightning.data.download import Mirror
from jdfl_lightning.data.folder import KnownDomains


class Fruit(KnownDomains):
    """A data set of 2 domains x 2 classes that only this server has."""

    domain_names = ("photo", "sketch")
    class_names = ("apple", "pear")
    counts = {"photo": (4, 3), "sketch": (3, 4)}
    mirrors: tuple[Mirror, ...] = ()
    terms = "eat it."


def archive(counts: dict[str, tuple[int, ...]]) -> bytes:
    picture = io.BytesIO()
    Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8)).save(picture, "PNG")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as out:
        for domain, numbers in counts.items():
            for label, number in zip(Fruit.class_names, numbers, strict=True):
                for n in range(number):
                    out.writestr(f"fruit-master/{domain}/{label}/{n}.png", picture.getvalue())
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
    }
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def fruit(root: Path, *mirrors: str) -> Fruit:
    data = Fruit(root=str(root), size=8, num_clients=2, download=True)
    data.mirrors = tuple(Mirror(url) for url in mirrors)
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


def zip_of(name: str = "fruit/photo/apple/0.png", content: bytes = bytes(1000), mode: int = 0o100644) -> bytes:
    """An archive with one entry."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out:
        entry = zipfile.ZipInfo(name)
        entry.external_attr = mode << 16
        entry.compress_type = zipfile.ZIP_DEFLATED
        out.writestr(entry, content)
    return buffer.getvalue()


def changed(archive: bytes, field: int, value: int) -> bytes:
    """An archive whose one entry has another value in a 16-bit field, in both of its headers: 6 flags, 8 method."""
    local, central = archive.index(b"PK\3\4"), archive.index(b"PK\1\2")
    found = bytearray(archive)
    for place in (local + field, central + field + 2):
        found[place : place + 2] = value.to_bytes(2, "little")
    return bytes(found)


def damaged(archive: bytes) -> bytes:
    """An archive whose compressed bytes are none."""
    place = archive.index(b"0.png") + len(b"0.png")
    return archive[:place] + b"\xff" * 8 + archive[place + 8 :]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (changed(zip_of(), 6, 1), "password required"),
        (changed(zip_of(), 8, 77), "compression method is not supported"),
        (damaged(zip_of()), "invalid block type|invalid stored block|Error -3"),
        (zip_of("../../outside.png"), "outside of the archive"),
        (zip_of("/outside.png"), "outside of the archive"),
        (zip_of("..\\outside.png"), "outside of the archive"),
        (zip_of("link.png", b"/etc/passwd", 0o120777), "is a link"),
        (zip_of(content=bytes(200_000)), "unpacks to 200,000 bytes, more than 100,000"),
        (archive({"photo": (9, 9), "sketch": (9, 9)}), "holds 36 entries, more than 30"),
        (bytes(100_001), "larger than 100,000 bytes"),
    ],
    ids=["encrypted", "method", "damaged", "above", "absolute", "backslash", "link", "bomb", "entries", "large"],
)
def test_a_bad_archive_is_a_mirror_that_fails(
    content: bytes, reason: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named with the reason, it leaves nothing behind, and the next mirror is tried."""
    monkeypatch.setattr(download, "MAX_BYTES", 100_000, raising=False)
    monkeypatch.setattr(download, "MAX_ENTRIES", 30, raising=False)
    Handler.files["/bad.zip"] = content
    root = tmp_path / "data" / "fruit"
    with pytest.warns(Note), pytest.raises(InputError, match=reason):
        fruit(root, f"{server}/bad.zip").setup()
    assert not root.exists()
    assert list(root.parent.iterdir()) == []
    with pytest.warns(Note):
        fruit(root, f"{server}/bad.zip", f"{server}/good.zip").setup()
    assert [path.name for path in root.parent.iterdir()] == ["fruit"]
    assert {path.name for path in tmp_path.iterdir()} == {"data", "cache", "work"}


def test_a_digest_is_checked_before_anything_is_unpacked(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = hashlib.sha256(Handler.files["/good.zip"]).hexdigest()
    data = fruit(tmp_path / "fruit")
    data.mirrors = (Mirror(f"{server}/good.zip", "0" * 64),)
    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("opened"))
        with pytest.warns(Note), pytest.raises(InputError, match=f"SHA-256 is {good}"):
            data.setup()
    data.mirrors = (Mirror(f"{server}/good.zip", good.upper()),)
    with pytest.warns(Note):
        data.setup()
    assert len(data.images) == 14


def test_needs_a_root() -> None:
    with pytest.raises(InputError, match="folder to download to"):
        Fruit(download=True, size=8).setup()


def test_an_unwritable_root_is_named(server: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(Note), pytest.raises(InputError, match="writable"):
        fruit(tmp_path / "file" / "fruit", f"{server}/good.zip").setup()
