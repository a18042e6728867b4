from __future__ import annotations

import functools
import io
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The networks of the tests are tiny: a second thread only waits, and waits actively, on a core that another process of
# pytest-xdist works on. OpenMP reads this when torch is imported, and so does every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The process of pytest-xdist that hands out the tests runs none, and the others wait for it: what takes seconds to
# import is imported where it is needed.

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser
    from torch import Tensor

    from jdfl_lightning import DigitsDomains

# Ray gives up a worker that has not started in a minute, and a node that has not answered for as long.
for name in (
    "worker_register_timeout_seconds",
    "gcs_server_request_timeout_seconds",
    "gcs_rpc_server_connect_timeout_s",
):
    os.environ.setdefault(f"RAY_{name}", "300")
os.environ.setdefault("RAY_health_check_timeout_ms", "300000")
# how long an example takes says something about the machine alone
settings.register_profile("all", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)  # others: helpers.examples
# a shell that starts the tests in the background has them, and what they start, ignore Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many random examples there are; leave out what imports flwr where it is missing."""
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "all")
    if sys.version_info < (3, 11):
        modules = ("src/jdfl_lightning/federation/flower.py", "tests/deployment.py")
        left_out = [str(Path(__file__).parents[1] / module) for module in modules]
        config.option.ignore = [*(config.option.ignore or ()), *left_out]


@pytest.hookimpl(trylast=True)  # when the tests that are not asked for are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long, so that no process of pytest-xdist ends with one while the others idle."""
    import torch

    from jdfl_lightning.client.trainer import survives_half_precision

    # here, as the package's doctests have no fixtures of this file
    torch.set_num_threads(1)  # whatever the variable said
    # a virtual machine may announce a matrix unit that it does not have
    survives_half_precision()
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    length = {path: path.stat().st_size for path in {item.path for item in items}}
    items.sort(key=lambda item: (item.path not in slow, -length[item.path]))


@pytest.fixture(autouse=True)
def _own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has its own cache, secrets, working folder and import path, and W&B stays on this machine."""
    monkeypatch.setenv("JDFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "path", list(sys.path))  # commands add the working folder
    # No test cuts the power, and a run waits some 30 times for the disk. What is synced when: test_resume.py.
    monkeypatch.setattr(os, "fsync", os.fstat)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """If a test left torch with more threads, tests after it would have other bits than their pools."""
    from torch import get_num_threads, set_num_threads  # a test may put other functions into their places

    yield
    left = get_num_threads()
    set_num_threads(1)
    assert left == 1


@pytest.fixture(scope="session", autouse=True)
def _computed_once() -> Iterator[None]:
    """What comes out the same in every test: the embedded digits, the parser of settings, and what workers import.

    A test that changes its images changes a copy. The parser has no state, and those of commands read docstrings.
    A worker of a pool would take a second to import the helpers: the process that workers are forked from has them.
    """
    from multiprocessing import forkserver

    import docstring_parser

    from jdfl_lightning import DigitsDomains
    from jdfl_lightning.config import parsing

    render, make_parser, preload = DigitsDomains.load, parsing.make_parser, forkserver.set_forkserver_preload

    @functools.cache
    def rendered(size: int) -> tuple[Tensor, Tensor, Tensor]:
        return render(DigitsDomains(size))

    @functools.cache
    def parser_with_defaults(program: str, data: str | None = None) -> ArgumentParser:
        parser = make_parser(program, data)
        defaults = parser.get_defaults(skip_validation=True)
        patch.setattr(parser, "get_defaults", lambda **_: defaults.clone())
        return parser

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DigitsDomains, "load", lambda data: tuple(found.clone() for found in rendered(data.size)))
        patch.setattr(parsing, "make_parser", parser_with_defaults)
        patch.setattr(forkserver, "set_forkserver_preload", lambda names: preload([*names, "helpers"]))
        patch.setattr(docstring_parser, "parse_from_object", functools.cache(docstring_parser.parse_from_object))
        yield


@pytest.fixture(autouse=True)
def _pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of a run's folder are written but not rendered, and of each form one is drawn in a process.

    Both take longer than the runs of the tests. What they look like is tested where they are drawn by themselves, and
    by runs in processes of their own.
    """
    from PIL import Image

    from jdfl_lightning.core.files import write_whole

    pixel = io.BytesIO()
    Image.new("L", (1, 1)).save(pixel, "png")
    for module in ("run", "session", "closing"):
        name = f"jdfl_lightning.server.{module}.save_figure"
        monkeypatch.setattr(name, lambda _, file, *formats: write_whole(file, pixel.getvalue()))
    for name in ("run.draw_discovery", "session.draw_curves", "session.draw_targets", "closing.draw_confusion"):
        monkeypatch.setattr(f"jdfl_lightning.server.{name}", _drawn_once(f"jdfl_lightning.server.{name}"))


@functools.cache
def _drawn_once(name: str) -> Callable[..., Any]:
    """A function that draws what it is given unless it has drawn something of that form: then what it drew before."""
    module, _, function = name.rpartition(".")
    draw = getattr(import_module(module), function)
    drawn: dict[str, Any] = {}

    def once(*about: Any) -> Any:
        if (form := _form(about)) not in drawn:
            drawn[form] = draw(*about)
        return drawn[form]

    return once


def _form(value: Any) -> str:
    """All of what is drawn that decides how: names, how many there are, and which numbers are missing."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "nan" if math.isnan(value) else "number"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_form, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_form(item)}' for name, item in value.items())}}}"
    if hasattr(value, "rows"):  # a run
        return _form([value.rows, value.domains, value.unseen, value.select, list(value.ends)])
    return str(value.shape) if hasattr(value, "shape") else repr(value)


@pytest.fixture(autouse=True)
def _silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that show progress by default show none: what is shown is tested by displays that a test makes."""
    from jdfl_lightning.ui.display import Display

    monkeypatch.setattr("jdfl_lightning.ui.display.default_display", Display)


@pytest.fixture
def small_digits() -> DigitsDomains:
    from helpers import digits

    return digits()


@pytest.fixture
def image_tree(tmp_path: Path) -> Path:
    """2 domains x 3 classes x 6 images of 16 px, each class with a colour of its own."""
    import numpy as np
    from PIL import Image

    root = tmp_path / "tree"
    rng = np.random.default_rng(0)
    for domain, offset in (("bright", 100), ("dark", 0)):
        for label in range(3):
            folder = root / domain / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(6):
                pixels = rng.integers(0, 60, (16, 16, 3), dtype=np.uint8) + np.uint8(offset)
                pixels[..., label] += 90
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


@pytest.fixture
def real_data(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the real data sets; tests that need it are skipped where `JDFL_DATA` does not name one.

    All tests share one cache, in all processes: decoding takes longer than what they look at.
    """
    folder = os.environ.get("JDFL_DATA")
    if not folder:
        pytest.skip("JDFL_DATA names no folder with pacs/ and office_caltech_10/")
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    monkeypatch.setenv("JDFL_CACHE", str(base / "decoded"))
    return Path(folder)
