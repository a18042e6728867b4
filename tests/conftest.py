from __future__ import annotations

import functools
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# The networks of the tests are tiny: a second thread only waits, and waits actively, on a core that another process of
# pytest-xdist works on. OpenMP reads this when torch is imported, and so does every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import docstring_parser
import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image
from torch import Tensor

from helpers import digits
from jdfl_lightning import DigitsDomains
from jdfl_lightning.client.trainer import survives_half_precision
from jdfl_lightning.core.files import write_whole

# how long an example takes says something about the machine alone
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
torch.set_num_threads(1)  # whatever the variable said
# a virtual machine may announce a matrix unit that it does not have
survives_half_precision()
# a shell that starts the tests in the background has them, and what they start, ignore Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long, so that no process of pytest-xdist ends with one while the others idle."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(autouse=True)
def _own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has its own cache, secrets and working folder, and W&B stays on this machine."""
    monkeypatch.setenv("JDFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)


@pytest.fixture(scope="session", autouse=True)
def _computed_once() -> Iterator[None]:
    """What comes out the same in every test: the embedded digits, and what the parser of settings reads in docstrings.

    A test that changes its images changes a copy.
    """
    render = DigitsDomains.load

    @functools.cache
    def rendered(size: int) -> tuple[Tensor, Tensor, Tensor]:
        return render(DigitsDomains(size))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DigitsDomains, "load", lambda data: tuple(found.clone() for found in rendered(data.size)))
        patch.setattr(docstring_parser, "parse_from_object", functools.cache(docstring_parser.parse_from_object))
        yield


@pytest.fixture(autouse=True)
def _pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of a run's folder are made and written but not rendered, which takes longer than the runs of the tests.

    What they look like is tested where they are drawn by themselves, and by runs in processes of their own.
    """
    pixel = io.BytesIO()
    Image.new("L", (1, 1)).save(pixel, "png")
    for module in ("run", "session"):
        name = f"jdfl_lightning.server.{module}.save_figure"
        monkeypatch.setattr(name, lambda _, file: write_whole(file, pixel.getvalue()))


@pytest.fixture
def small_digits() -> DigitsDomains:
    return digits()


@pytest.fixture
def image_tree(tmp_path: Path) -> Path:
    """2 domains x 3 classes x 6 images of 16 px, each class with a colour of its own."""
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
def real_data() -> Path:
    """Folder of the real data sets; tests that need it are skipped where `JDFL_DATA` does not name one."""
    folder = os.environ.get("JDFL_DATA")
    if not folder:
        pytest.skip("JDFL_DATA names no folder with pacs/ and office_caltech_10/")
    return Path(folder)
