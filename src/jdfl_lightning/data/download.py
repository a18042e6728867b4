"""Download a data set from the first mirror that works, and check it before use."""

from __future__ import annotations

import hashlib
import http.client
import lzma
import shutil
import stat
import struct
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jdfl_lightning.core.errors import InputError
from jdfl_lightning.data.base import Progress

Check = Callable[[Path], None]
"""Raises an `InputError` if the unpacked folder is not the data set."""

MAX_BYTES = 4_000_000_000
"""Largest size of an archive, and of its unpacked content; the data sets here are below a tenth of that."""
MAX_ENTRIES = 100_000
"""Largest number of files and folders in an archive."""
_CHUNK = 1 << 20
_FAILURES = (
    OSError,
    http.client.HTTPException,
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    RuntimeError,  # an encrypted archive; a compression that zipfile does not know
    ValueError,  # an InputError, or a header that is no number
)
"""Errors after which the next mirror is tried."""


@dataclass(frozen=True)
class Mirror:
    """A source of an archive."""

    url: str
    """Address of a zip file."""
    sha256: str | None = None
    """Digest of the file in hexadecimal digits; None if it is not known, or the file may change."""


def google_drive(file_id: str) -> str:
    """Return the URL of a file on Google Drive that skips the virus scan page."""
    return f"https://drive.usercontent.google.com/download?id={file_id}&export=download&confirm=t"


def _fetch(mirror: Mirror, file: Path, progress: Progress) -> None:
    request = urllib.request.Request(mirror.url, headers={"User-Agent": "jdfl-lightning"})
    digest = hashlib.sha256()
    with urllib.request.urlopen(request, timeout=30) as answer, file.open("wb") as out:
        total, done = int(answer.headers.get("Content-Length") or 0), 0
        while chunk := answer.read(_CHUNK):
            done += len(chunk)
            if max(done, total) > MAX_BYTES:
                raise InputError(f"it is larger than {MAX_BYTES:,} bytes")
            digest.update(chunk)
            out.write(chunk)
            progress("downloading (bytes)", done, max(total, done + 1))  # without a length, the end is not known
        if done < total:
            raise OSError(f"the connection closed after {done} of {total} bytes")
        progress("downloading (bytes)", done, done)
    if mirror.sha256 is not None and digest.hexdigest() != mirror.sha256.lower():
        raise InputError(f"its SHA-256 is {digest.hexdigest()} and not {mirror.sha256}")


def _unpack(file: Path, folder: Path) -> None:
    """Unpack a zip file; refuse it before writing if it is too large or has paths outside the folder.

    zipfile reads no more of an entry than its stated size, so the sum of these bounds the space needed.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if len(entries) > MAX_ENTRIES:
            raise InputError(f"it holds {len(entries):,} entries, more than {MAX_ENTRIES:,}")
        if (size := sum(entry.file_size for entry in entries)) > MAX_BYTES:
            raise InputError(f"it unpacks to {size:,} bytes, more than {MAX_BYTES:,}")
        for entry in entries:
            path = PurePosixPath(entry.filename.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts:
                raise InputError(f"its entry {entry.filename!r} is outside of the archive's own folder")
            if stat.S_ISLNK(entry.external_attr >> 16):
                raise InputError(f"its entry {entry.filename!r} is a link")
        archive.extractall(folder)


def download(mirrors: Sequence[Mirror], target: Path, check: Check, progress: Progress) -> None:
    """Download a zip file from the first mirror that works and unpack it as ``target``.

    It is unpacked in a temporary folder; ``target`` appears only after its content was checked.

    Args:
        mirrors: sources of the zip file, best first.
        target: the folder to make; it must not exist, or be empty.
        check: checks the unpacked folder.
        progress: called as bytes arrive.
    """
    failures = []
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"Expected --data.root to be new or empty for a download but got {target}.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".download-", dir=target.parent))
    except OSError as error:
        raise InputError(f"Expected --data.root to be writable but got {target}: {error}.") from error
    try:
        for number, mirror in enumerate(mirrors):
            unpacked = aside / str(number)
            try:
                _fetch(mirror, aside / "archive.zip", progress)
                _unpack(aside / "archive.zip", unpacked)
                check(unpacked)
            except _FAILURES as error:
                failures.append(f"{mirror.url} ({error or type(error).__name__})")
                shutil.rmtree(unpacked, ignore_errors=True)
                continue
            if target.exists():
                target.rmdir()
            unpacked.rename(target)
            return
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    raise InputError("No mirror gave the data set: " + "; ".join(failures))
