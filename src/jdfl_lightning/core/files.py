"""Small files: written atomically, and read with limits, as they may come from others."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from jdfl_lightning.core.errors import InputError, StorageError

_T = TypeVar("_T")
_AT_A_TIME = 4
"""Threads that sync files, as the disk writes several at once; with more they wait for each other."""
_MOST_BYTES = 1 << 20
"""Size of the largest settings file."""
_MOST_TEXT = 64 << 20
"""Size of the largest JSON or CSV file: a discovery has one or two lines for each client."""
_MOST_NODES = 100_000
"""Values in a settings file, with aliases expanded."""
_MOST_LEVELS = 50
"""Levels of nesting in a settings file."""
_ASIDE = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_LOADER: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def write_whole(file: Path, content: bytes, private: bool = False, durable: bool = True) -> None:
    """Write a temporary file and rename it: a reader finds the old content or the new, never a part.

    The temporary file has a random name and must not exist, so that it cannot be a link made by someone else.

    Args:
        file: the file to write; a link there is replaced, not followed.
        content: the whole content.
        private: whether only this user may read it.
        durable: whether it survives a power cut at once; else when `sync` is called for it.
    """
    aside = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(aside, flags, 0o600 if private else 0o666)
        try:
            with os.fdopen(descriptor, "wb") as out:
                out.write(content)
                if durable:
                    out.flush()
                    os.fsync(out.fileno())
            aside.replace(file)
            if durable:
                _sync_folder(file.parent)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError(f"Expected to write {file} but: {error.strerror or error}.") from error


def write_csv(file: Path, rows: Sequence[Mapping[str, object]], columns: Sequence[str] = (), missing: str = "") -> None:
    """Write a table.

    Args:
        file: the file.
        rows: the cells by their columns.
        columns: all columns; those of the rows if there are none.
        missing: what stands for a cell that a row does not have.
    """
    out = io.StringIO()
    names = columns or list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, restval=missing, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(file, out.getvalue().encode())


def sync(folder: Path, names: Iterable[str]) -> None:
    """Make files of a folder durable in case of a power cut; those that are missing are left out."""

    def sync_one(name: str) -> None:
        with suppress(FileNotFoundError):
            _sync(folder / name, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))

    listed = list(names)
    try:
        if len(listed) <= _AT_A_TIME:  # to start threads takes as long
            for name in listed:
                sync_one(name)
        else:
            with ThreadPoolExecutor(_AT_A_TIME) as pool:
                list(pool.map(sync_one, listed))
        _sync_folder(folder)
    except OSError as error:
        raise StorageError(f"Expected to write {folder} but: {error.strerror or error}.") from error


def _sync_folder(folder: Path) -> None:
    """Make a rename durable in case of a power cut."""
    if os.name == "posix":
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_aside(name: str) -> bool:
    """Return whether this is the name of a temporary file of `write_whole`.

    >>> is_aside(".config.yaml.0123456789abcdef.tmp"), is_aside(".tmp")
    (True, False)
    """
    return _ASIDE.fullmatch(name) is not None


def remove_asides(folder: Path) -> None:
    """Remove temporary files left in a folder by killed processes."""
    with os.scandir(folder) as entries:
        for name in [entry.name for entry in entries if is_aside(entry.name)]:
            (folder / name).unlink(missing_ok=True)


def refuse_links(folder: Path, subfolders: Iterable[str]) -> None:
    """Raise an `InputError` if a folder or its given subfolders hold links, which may lead to another's files.

    Args:
        folder: the folder, which may itself be a link.
        subfolders: names of the subfolders to check.
    """
    for place in (folder, *(folder / name for name in subfolders)):
        if place.is_dir():
            with os.scandir(place) as entries:
                link = next((entry.name for entry in entries if entry.is_symlink()), None)
            if link is not None:
                target = (place / link).readlink()
                raise InputError(
                    f"Expected {folder} to hold its own files but {place / link} is a link to {target}: put the "
                    "file or folder itself there."
                )


def require_regular(file: Path) -> None:
    """Raise an OSError if a file is a pipe, a device or a folder: reading it may never end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))


def read_small(file: Path) -> bytes:
    """Read a file of settings; raise a ValueError if it is too large, or an OSError."""
    return _read(file, _MOST_BYTES)


def read_text(file: Path) -> str:
    """Read a JSON or CSV file; raise a ValueError if it is too large or not text, or an OSError."""
    return _read(file, _MOST_TEXT).decode()


def _read(file: Path, limit: int) -> bytes:
    require_regular(file)
    with file.open("rb") as content:
        found = content.read(limit + 1)
    if len(found) > limit:
        raise ValueError(f"it is larger than {limit:,} bytes")
    return found


def read_settings(file: Path, aliases: bool = False) -> dict[str, Any]:
    """Read a YAML file of settings; raise a ValueError that says what is wrong with it, or an OSError.

    Args:
        file: the YAML file.
        aliases: whether it may use YAML's aliases.
    """
    return parse_settings(read_small(file).decode(), aliases)


def parse_settings(text: str, aliases: bool = False) -> dict[str, Any]:
    """Return the settings in a YAML text; raise a ValueError that says what is wrong with it.

    >>> parse_settings("lr: 0.1")
    {'lr': 0.1}
    """
    try:
        _check_yaml(text, aliases)
        settings = yaml.load(text, _LOADER)  # a safe loader: makes plain values only
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error) or "it is nested too deeply") from error
    if not isinstance(settings, dict):
        raise ValueError("it holds no settings")
    return settings


def _check_yaml(text: str, aliases: bool) -> None:
    """Refuse YAML that is nested too deeply or too large with its aliases expanded."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    total = 0
    for event in yaml.parse(text, _LOADER):
        if isinstance(event, yaml.AliasEvent):
            if not aliases:
                raise ValueError("it uses an alias, which only a config of your own may")
            total += sizes.get(event.anchor or "", _MOST_NODES)
        elif isinstance(event, yaml.CollectionStartEvent):
            total += 1
            open_nodes.append((event.anchor, total))
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
            if event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor:
                sizes[anchor] = total - before + 1
        if total > _MOST_NODES:
            raise ValueError(f"it has more than {_MOST_NODES:,} values")
        if len(open_nodes) > _MOST_LEVELS:
            raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")


def read_json(file: Path) -> Any:
    """Read a JSON file; raise a ValueError that says what is wrong with it, or an OSError."""
    try:
        return json.loads(read_text(file))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def checked(kind: type[_T], values: object, strict: bool = True) -> _T:
    """Return values as an object of a type, checked against its annotations; raise a ValueError that names the problem.

    Args:
        kind: the type, such as a dataclass; its annotations may have pydantic's limits.
        values: plain values, as JSON gives them.
        strict: whether a number has to be one; else it may be a text, as CSV gives it.
    """
    known: Any = kind
    try:
        found: _T = _adapter(known).validate_json(json.dumps(values), strict=strict)
        return found
    except ValidationError as error:
        flaw = error.errors()[0]
        place = ".".join(str(part) for part in flaw["loc"])
        raise ValueError(f"{place}: {flaw['msg']}" if place else flaw["msg"]) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return what checks values of a type; pydantic takes longer to make it than to use it."""
    return TypeAdapter(kind)


def as_json(value: object) -> str:
    """Return plain values as JSON; a number that is none, and what is not known, are null. A key is a name in JSON.

    >>> print(as_json([float("nan"), 0.5]))
    [
     null,
     0.5
    ]
    >>> print(as_json({(0, 1): 2, None: 3}))
    {
     "(0, 1)": 2,
     "null": 3
    }
    """
    finite = json.loads(json.dumps(_with_names(value), default=str), parse_constant=lambda number: None)
    return json.dumps(finite, indent=1)


def _with_names(value: object) -> object:
    """Return a value whose keys JSON can write: those that it does not know, such as a pair, as text."""
    if isinstance(value, Mapping):
        known = (str, int, float, type(None))
        return {key if isinstance(key, known) else str(key): _with_names(inner) for key, inner in value.items()}
    return [_with_names(inner) for inner in value] if isinstance(value, list | tuple) else value
