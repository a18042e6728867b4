"""Commands in forked processes that are watched: how they end, what they print, take, and write where they should not.

The parent has imported everything, so that a case costs milliseconds and not the seconds of an import.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ONE_PATH = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.truncate": None, "os.chmod": 2, "os.utime": 3}
"""Audit events of one path, and where they name the folder that it is relative to."""
_TWO_PATHS = ("os.rename", "os.link")


@dataclass(frozen=True)
class Ended:
    """How a case ended."""

    code: int
    """Exit code; below 0, the signal."""
    said: str
    errors: str
    """What was printed to standard output and to standard error."""
    seconds: float
    peak: float
    """Most memory, in MiB."""
    strayed: list[str]
    """What was tried outside the folder."""
    hung: bool

    def problems(self) -> list[str]:
        """Return what is wrong with any command, whatever it was told to do."""
        lines = [line for line in self.errors.splitlines() if line and not line.startswith("note: ")]
        found = [f"outside its folder: {path}" for path in self.strayed[:3]]
        if self.hung:
            found.append(f"not finished after {self.seconds:.0f} s")
        elif self.code < 0:
            found.append(f"ended by signal {-self.code}")
        elif "Traceback" in self.errors:
            found.append(f"a trace: {lines[-1] if lines else ''}")
        elif self.code == 2 and (len(lines) != 1 or not lines[0].startswith("jdfl-lightning: ")):
            found.append(f"exit code 2 with {len(lines)} lines of errors: {' / '.join(lines)[:300]}")
        elif self.code == 0 and lines:
            found.append(f"exit code 0 with errors: {' / '.join(lines)[:300]}")
        return found


def changes(event: str, args: tuple[Any, ...]) -> Iterator[str]:
    """Give the absolute paths that an audit event is about to write, make or remove."""
    if event == "open":
        path, _, flags = args
        if isinstance(flags, int) and flags & _WRITING and not isinstance(path, int):
            yield _absolute(path)
    elif event in _ONE_PATH:
        place = _ONE_PATH[event]
        if not isinstance(args[0], int):
            yield _absolute(args[0], -1 if place is None else args[place])
    elif event in _TWO_PATHS:
        yield from (_absolute(args[0], args[2]), _absolute(args[1], args[3]))
    elif event == "os.symlink":
        yield _absolute(args[1], args[2])


def _absolute(path: Any, folder: int = -1) -> str:
    name = os.fsdecode(path)
    return os.path.abspath(os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name) if folder >= 0 else name)  # noqa: PTH100, PTH115, PTH118


def run_forked(work: Callable[[], int | None], folder: Path, seconds: float = 120, more_memory: int = 4 << 30) -> Ended:
    """Do work in a forked process, with a folder as its world: working folder, secrets, cache, temporary files.

    Writing elsewhere, other programs and connections are refused and noted.

    Args:
        work: returns an exit code.
        folder: its world; ``work`` in it becomes the working folder.
        seconds: after which the process is ended.
        more_memory: bytes that it may take beside what this process has.
    """
    log = folder.with_name(f"{folder.name}.log")
    for place in (folder / "work", folder / "tmp", log):
        place.mkdir(parents=True, exist_ok=True)
    for name in ("out", "err", "strayed"):
        (log / name).write_bytes(b"")
    sys.stdout.flush()
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _live(work, folder, log, more_memory)
    hung = False
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() - begin > seconds and not hung:
            hung = True
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.003)
    texts = [(log / name).read_text(errors="replace") for name in ("out", "err", "strayed")]
    code = os.waitstatus_to_exitcode(status)
    return Ended(
        code, texts[0], texts[1], time.monotonic() - begin, usage.ru_maxrss / 1024, texts[2].splitlines(), hung
    )


def _live(work: Callable[[], int | None], folder: Path, log: Path, more_memory: int) -> None:
    """Be the process; does not return."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder / "work")
        for name, place in (("XDG_DATA_HOME", "data"), ("JDFL_CACHE", "cache"), ("TMPDIR", "tmp")):
            os.environ[name] = str(folder / place)
        tempfile.tempdir = None
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(log / "out", os.O_WRONLY), 1)
        os.dup2(os.open(log / "err", os.O_WRONLY), 2)
        strayed = os.open(log / "strayed", os.O_WRONLY | os.O_APPEND)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more_memory, size + more_memory))
        sys.dont_write_bytecode = True
        allowed = (f"{folder}/", "/dev/", "/proc/")

        def watch(event: str, args: tuple[Any, ...]) -> None:
            other = [path for path in changes(event, args) if not f"{path}/".startswith(allowed)]
            started = event == "subprocess.Popen" and args[0] != sys.executable
            if started or event in ("os.system", "os.exec", "os.posix_spawn", "socket.connect"):
                other = [f"{event} {args[:2]}"]
            if other:
                os.write(strayed, f"{event} {other[0]}\n".replace("\0", "?").encode(errors="replace"))
                raise PermissionError(1, "not allowed in this trial", other[0])

        sys.addaudithook(watch)
        code = work() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
        with suppress(BaseException):
            sys.stderr.flush()
        os._exit(code & 0xFF)
