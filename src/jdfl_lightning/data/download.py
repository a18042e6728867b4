"""Fetch a data set from the first mirror that answers, and check what came before it is used."""

from __future__ import annotations

import http.client
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from jdfl_lightning.data.base import Progress
from jdfl_lightning.errors import InputError

Check = Callable[[Path], None]
"""Raises an `InputError` if the unpacked folder is not the data set."""

_CHUNK = 1 << 20


def google_drive(file_id: str) -> str:
    """Return the address of a file on Google Drive that skips the page about virus scans."""
    return f"https://drive.usercontent.google.com/download?id={file_id}&export=download&confirm=t"


def _fetch(url: str, file: Path, progress: Progress) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "jdfl-lightning"})
    with urllib.request.urlopen(request, timeout=30) as answer, file.open("wb") as out:
        total, done = int(answer.headers.get("Content-Length") or 0), 0
        while chunk := answer.read(_CHUNK):
            done += len(chunk)
            out.write(chunk)
            progress("downloading (bytes)", done, max(total, done + 1))  # without a length, the end is not known
        if done < total:
            raise OSError(f"the connection closed after {done} of {total} bytes")
        progress("downloading (bytes)", done, done)


def download(mirrors: Sequence[str], target: Path, check: Check, progress: Progress) -> None:
    """Download a zip file from the first mirror that works and unpack it as ``target``.

    Everything happens in a folder aside; ``target`` appears only when its content has been checked.

    Args:
        mirrors: addresses of zip files, best first.
        target: the folder to make; it must not exist, or be empty.
        check: looks at the unpacked folder.
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
        for number, url in enumerate(mirrors):
            unpacked = aside / str(number)
            try:
                _fetch(url, aside / "archive.zip", progress)
                with zipfile.ZipFile(aside / "archive.zip") as archive:
                    archive.extractall(unpacked)
                check(unpacked)
            except (OSError, http.client.HTTPException, zipfile.BadZipFile, InputError) as error:
                failures.append(f"{url} ({error})")
                shutil.rmtree(unpacked, ignore_errors=True)
                continue
            if target.exists():
                target.rmdir()
            unpacked.rename(target)
            return
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    raise InputError("No mirror gave the data set: " + "; ".join(failures))
