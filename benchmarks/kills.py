"""End a run at every single change that it makes to the disk, resume it, and compare with a run that was never ended.

    python benchmarks/kills.py            # every change; an hour on one core
    python benchmarks/kills.py --every 10 # every tenth

The changes are every file opened for writing, every write, sync, rename, link, removed file and new folder, in the
run folder and in the user's data folder, where the secret is. Each of them is a case, in a process of its own, in three
ways:

- killed: SIGKILL before the change; for a write, after half of its bytes.
- I/O error: the change fails with EIO, once; a write after half of its bytes.
- disk full: the change, and all later ones that need space, fail with ENOSPC.

A case passes if all of this holds:

1. With an error, the command ends with exit code 2 and one line, or with 0 if it could do without.
2. ``fit --resume RUN`` then ends with exit code 0. It may refuse, with exit code 2 and one line, in two situations.
   There is no config.yaml yet, as nothing was finished: then the first command with ``--resume auto`` has to do. Or the
   secret could not be written, so that the config is not signed: then ``--trust true`` has to do.
3. What is in the folder in the end is what the uninterrupted run leaves: names and contents of all files, but for
   times and pictures; the config is signed; the data folder holds the secret and nothing else.
4. Nothing else was written, made or removed in any of these commands.

Also: memory and open files over 500 fits of one process.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import io
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from forked import Ended, changes, run_forked
from matplotlib.figure import Figure
from timing import write_section
from torch import Tensor

from helpers import contents
from jdfl_lightning import SCAFFOLD, DigitsDomains, Experiment
from jdfl_lightning.cli import main as command
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.core.messages import FitTask
from jdfl_lightning.server import run as run_module
from jdfl_lightning.server import session
from jdfl_lightning.storage import trust

COMMON = shlex.split(
    "fit --run_dir run --data.size 8 --data.num_clients 4 --data.test_fraction 0.5 --backbone helpers.tiny_net "
    "--backend LocalBackend --rounds 3 --epochs 1 --client_fraction 1 --batch_size 64 --lr 0.3 --clustering.epochs 1"
)
GRADED = [*COMMON, "--algorithm", "SCAFFOLD", "--supervision", "graded", "--num_domains", "3"]
RESUME = ["fit", "--resume", "run"]
SCENARIOS: dict[str, list[str]] = {
    "SCAFFOLD, graded": GRADED,
    "FedAvg, base": [*COMMON, "--supervision", "base"],
    "a checkpoint every 2 rounds": [*GRADED, "--checkpoint.every", "2", "--checkpoint.keep", "1"],
    "resumed in round 2": GRADED,
    "clients trained together": [
        *shlex.split("fit --run_dir run --data.size 8 --data.num_clients 4 --data.test_fraction 0.5 --rounds 4"),
        *shlex.split("--backbone helpers.tiny_net --backend VectorBackend --client_fraction 0.75 --epochs 1"),
        *shlex.split("--algorithm SCAFFOLD --supervision base --batch_size 64 --lr 0.3 --checkpoint.keep 1"),
    ],
}
WAYS = ("killed", "I/O error", "disk full")
_SPACE = ("open", "write", "sync", "os.mkdir", "os.link")
"""Changes that need space on the disk."""


@dataclass
class Faults:
    """Counts the changes to some folders, and lets one of them go wrong."""

    roots: tuple[str, ...]
    at: int
    """The number of the change, from 1; 0 for none."""
    way: str
    log: int
    """Descriptor of a file that gets a line for each change."""
    count: int = 0

    def install(self) -> None:
        """Watch this process from now on."""
        sync, fdopen = os.fsync, os.fdopen

        def watched_sync(descriptor: int) -> None:
            self.change("sync", os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
            sync(descriptor)

        def watched_open(descriptor: int, mode: str = "r", *args: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
            if mode == "wb" and path.startswith(self.roots):
                return _Stream(io.FileIO(descriptor, "wb"), partial(self.change, "write", path))
            return fdopen(descriptor, mode, *args, **options)

        os.fsync, os.fdopen = watched_sync, watched_open
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """Take note of what Python tells of."""
        for path in changes(event, args):
            if path.startswith(self.roots):
                if event == "open" and args[1] is not None:
                    raise SystemExit(f"{path} is written with open(), where no write can be made to fail")
                self.change(event, path)
                return

    def change(self, kind: str, path: str, half: Callable[[], None] = lambda: None) -> None:
        """Let a change go wrong, if it is its turn."""
        if not path.startswith(self.roots):
            return
        self.count += 1
        os.write(self.log, f"{kind} {path}\n".encode())
        later = self.way == "disk full" and 0 < self.at < self.count and kind in _SPACE
        if self.count == self.at or later:
            half()
            if self.way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            number = errno.EIO if self.way == "I/O error" else errno.ENOSPC
            raise OSError(number, os.strerror(number), path)


class _Stream(io.BufferedWriter):
    """A file whose writes can go wrong in the middle."""

    def __init__(self, raw: io.FileIO, change: Callable[[Callable[[], None]], None]) -> None:
        super().__init__(raw)
        self._change = change

    def write(self, content: Any) -> int:
        """Write, unless that is the change that goes wrong."""
        self._change(lambda: self._half(content))
        return super().write(content)

    def _half(self, content: Any) -> None:
        super().write(content[: len(content) // 2])
        self.flush()


def attempt(folder: Path, args: list[str], at: int = 0, way: str = "killed") -> tuple[Ended, list[str]]:
    """Run a command with the change of a number going wrong; return how it ended, and all changes."""
    log = folder.with_name("changes")
    log.parent.mkdir(exist_ok=True)
    log.write_bytes(b"")

    def work() -> int:
        roots = (str(folder / "work" / "run"), str(folder / "data"))
        Faults(roots, at, way, descriptor).install()
        return command(args)

    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    try:
        return run_forked(work, folder), log.read_text().splitlines()
    finally:
        os.close(descriptor)


def outcome(folder: Path) -> dict[str, Any]:
    """Return all that was left behind."""
    found = contents(str(folder / "work" / "run"))
    found["config.yaml"] = found["config.yaml"].partition(b"\n")[2]
    os.environ["XDG_DATA_HOME"] = str(folder / "data")
    found["signed"] = bool(trust.own_settings(folder / "work" / "run"))
    others = [path for part in ("work", "data", "tmp", "cache") for path in (folder / part).rglob("*")]
    found["files"] = sorted(str(path.relative_to(folder)) for path in others)
    return found


def recover(folder: Path, args: list[str]) -> tuple[str, list[str]]:
    """Resume a run as a user would; return how that went, and what was wrong."""
    config = folder / "work" / "run" / "config.yaml"
    first = config.read_bytes()[:12] if config.is_file() else b""
    ended, _ = attempt(folder, RESUME)
    if ended.code == 0 or ended.problems():
        return "resumed", ended.problems()
    if first == b"# signature:":
        return "refused", [f"--resume is refused: {ended.errors.strip()}"]
    how, again = ("trusted", [*RESUME, "--trust", "true"]) if first else ("begun anew", [*args, "--resume", "auto"])
    if first and "--trust true" not in ended.errors:
        return "refused", [f"--resume is refused: {ended.errors.strip()}"]
    ended, _ = attempt(folder, again)
    refused = [] if ended.code == 0 else [f"{how}, with exit code {ended.code}: {ended.errors.strip()}"]
    return how, ended.problems() + refused


def try_case(
    folder: Path, begun: Path | None, args: list[str], at: int, way: str, whole: dict[str, Any]
) -> tuple[str, list[str]]:
    """Let one change go wrong; return how the run was recovered, and all that was wrong."""
    for place in (folder, folder.with_name(f"{folder.name}.log")):
        shutil.rmtree(place, ignore_errors=True)
    if begun is not None:
        shutil.copytree(begun, folder)
    ended, _ = attempt(folder, args if begun is None else RESUME, at, way)
    if way == "killed":
        wrong = [] if ended.code == -signal.SIGKILL else [f"was not killed but ended with {ended.code}"]
    else:
        wrong = ended.problems() or ([] if ended.code in (0, 2) else [f"exit code {ended.code}"])
    how, more = recover(folder, args)
    wrong += more
    if not wrong:
        found = outcome(folder)
        wrong = [f"differs: {name}" for name in found.keys() | whole.keys() if found.get(name) != whole.get(name)]
        if "differs: files" in wrong:
            wrong.append(f"files: {sorted(set(found['files']) ^ set(whole['files']))}")
    return how, wrong


def run_scenario(name: str, folder: Path, every: int, ways: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Try all cases of a run; return lines of the table, and what was wrong."""
    args, begun = SCENARIOS[name], None
    ended, made = attempt(folder / "whole", args)
    if ended.code != 0:
        raise SystemExit(f"{name}: the run itself fails: {ended.errors}")
    whole = outcome(folder / "whole")
    if name.startswith("resumed"):
        begun = folder / "begun"
        middle = [number for number, line in enumerate(made, start=1) if "/clients/" in line and "-2.safe" in line]
        attempt(begun, args, middle[len(middle) // 2])
        shutil.copytree(begun, folder / "resumed")
        made = attempt(folder / "resumed", RESUME)[1]
    lines, wrong = [], []
    for way in ways:
        points = [
            number
            for number, line in enumerate(made, start=1)
            if (number - 1) % every == 0 and (way != "disk full" or line.split()[0] in _SPACE)
        ]
        found: Counter[str] = Counter()
        for number in points:
            how, problems = try_case(folder / "case", begun, args, number, way, whole)
            found["wrong" if problems else how] += 1
            for problem in problems:
                wrong.append(f"{name}, {way}, change {number} of {len(made)} ({made[number - 1]}): {problem}")
                print(wrong[-1], flush=True)
            if sum(found.values()) % 20 == 0:
                print(f"{name}, {way}: {sum(found.values())} of {len(points)}", flush=True)
        lines.append(
            f"| {name} | {way} | {len(points)} | {found['resumed']} | {found['begun anew']} | {found['trusted']} | "
            f"{found['wrong'] + found['refused']} |"
        )
        print(lines[-1], flush=True)
    return lines, wrong


def warm_up(folder: Path) -> None:
    """Make every run cheaper, before anything is forked: images are rendered once, pictures are empty."""
    torch.set_num_threads(1)
    DigitsDomains.load = _rendered
    session.draw_curves = run_module.draw_discovery = lambda _: Figure(figsize=(1, 1))
    os.environ["XDG_DATA_HOME"] = str(folder)
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        command(GRADED)  # imports what is imported when it is needed
    os.chdir("/")


_load = DigitsDomains.load


@cache
def _render(size: int) -> tuple[Tensor, Tensor, Tensor]:
    return _load(DigitsDomains(size=size))


def _rendered(data: DigitsDomains) -> tuple[Tensor, Tensor, Tensor]:
    images, labels, domains = _render(data.size)
    return images.clone(), labels.clone(), domains.clone()


def endure(fits: int) -> str:
    """Fit clients in one process; return how memory and open files grow."""
    data = DigitsDomains(size=8, num_clients=20)
    data.deal(0)
    workspace = Workspace(Experiment(data=data, algorithm=SCAFFOLD(), supervision="base", epochs=1))
    weights, buffers = workspace.initial(1)
    server = workspace.experiment.algorithm.init_server(weights)
    state = workspace.experiment.algorithm.init_client(weights)
    seen = {}
    for number in range(fits + 51):
        fit_client(workspace, FitTask(number % 20, 1, 0, weights, buffers, server), state)
        if number in (50, fits + 50):
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen[number] = pages * resource.getpagesize() / 2**20, len(list(Path("/proc/self/fd").iterdir()))
    (before, open_before), (after, open_after) = seen.values()
    growth = 100 * (after / before - 1)
    return (
        f"{fits} fits in one process, after 50 that do not count: memory {before:.0f} -> {after:.0f} MiB "
        f"({growth:+.1f} %), open files {open_before} -> {open_after}."
    )


def main() -> None:
    """Try it, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--every", type=int, default=1, help="take every so many changes; below all, no page is written"
    )
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--fits", type=int, default=500)
    options = parser.parse_args()
    lines = [
        "| run | change | cases | resumed | begun anew | with `--trust true` | wrong |",
        "|---|---|---|---|---|---|---|",
    ]
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        (folder / "warm").mkdir()
        warm_up(folder / "warm")
        for number, name in enumerate(options.scenarios):
            more, problems = run_scenario(name, folder / str(number), options.every, tuple(options.ways))
            lines, wrong = lines + more, wrong + problems
    if options.fits:
        lines += ["", endure(options.fits)]
    text = "\n".join(lines)
    if options.every == 1 and (options.scenarios, options.ways) == (list(SCENARIOS), list(WAYS)):
        write_section("kills", text, "robustness.md")
    else:
        print(text)
    if wrong:
        raise SystemExit("\n".join([f"{len(wrong)} problems:", *wrong]))


if __name__ == "__main__":
    main()
