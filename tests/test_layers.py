"""The package reads in one direction: a file imports only from groups to its left."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import jdfl_lightning

SOURCE = Path(jdfl_lightning.__file__).parent
LAYERS = [
    ["core"],
    ["joint"],
    ["models", "supervision"],
    ["algorithms", "clustering", "regularizers"],
    ["data", "ui"],
    ["client"],
    ["storage"],
    ["backends", "callbacks"],
    ["config"],
    ["report"],
    ["server"],
    ["federation", "studies"],
    ["cli", "__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def group(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def imports(file: Path) -> set[str]:
    """Modules imported when the code runs; those for type checkers alone do not count."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


FILES = sorted(file for file in SOURCE.rglob("*.py") if file != SOURCE / "__init__.py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_go_left(file: Path) -> None:
    own = group(file)
    for module in imports(file):
        if module.startswith("jdfl_lightning."):
            other = module.split(".")[1]
            assert other == own or LEVEL[other] <= LEVEL[own], f"{own} imports {other}"


def test_a_name_means_one_thing() -> None:
    """No two classes or constants of the package have the same name."""
    homes: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            else:
                continue
            for name in set(names) - {"__all__"}:
                homes.setdefault(name, []).append(str(file.relative_to(SOURCE)))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("wandb", "ui"),
        ("jsonargparse", "config"),
        ("ray", "backends"),
        ("flwr", "federation"),
        ("pandas", "report"),
        ("jinja2", "report"),
    ],
)
def test_a_library_has_one_home(library: str, home: str) -> None:
    assert {group(file) for file in FILES if library in {m.split(".")[0] for m in imports(file)}} <= {home}


def test_joint_needs_torch_and_torchmetrics_alone() -> None:
    for file in (SOURCE / "joint").glob("*.py"):
        outside = {module.split(".")[0] for module in imports(file)} - set(sys.stdlib_module_names)
        assert outside <= {"torch", "torchmetrics", "jdfl_lightning"}


JOINT = (
    "JointHead, JointAccuracy, DomainAccuracy, SoftTargetKLLoss, GradedTargets, RandomTargets, HardTargets, "
    "ClassScores, class_probabilities, predict_class, replace_head, PaperCNN"
)
HEAVY = {"lightning", "sklearn", "wandb", "jsonargparse", "flwr", "ray", "timm", "pandas", "safetensors"}


@pytest.fixture(scope="module")
def loaded() -> list[tuple[set[str], float]]:
    """What two imports load beyond torch and torchmetrics, and the seconds of computing that each takes.

    They come one after the other in a new process: what the second has loaded is what the first had, and more.
    """
    code = "import sys, time, torch, torchmetrics\nbefore = set(sys.modules)\n"
    for names in (JOINT, "JointModule"):
        code += (
            f"start = time.process_time()\nfrom jdfl_lightning import {names}\nprint(time.process_time() - start)\n"
            "print(*{name.split('.')[0] for name in set(sys.modules) - before})\n"
        )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    known = set(sys.stdlib_module_names)
    return [(set(names.split()) - known, float(took)) for took, names in zip(lines[::2], lines[1::2], strict=True)]


@pytest.mark.slow
def test_importing_the_head_loads_nothing_else(loaded: list[tuple[set[str], float]]) -> None:
    """It takes some 10 ms; a second leaves room for a slow machine."""
    names, seconds = loaded[0]
    assert names == {"jdfl_lightning"}
    assert seconds < 1


@pytest.mark.slow
def test_importing_the_module_loads_lightning_and_no_more(loaded: list[tuple[set[str], float]]) -> None:
    """Lightning brings what it needs itself; none of it is what this package has for federations and command lines."""
    names, _ = loaded[1]
    assert names & HEAVY == {"lightning"}


def test_every_export_exists() -> None:
    for name in jdfl_lightning.__all__:
        assert getattr(jdfl_lightning, name) is not None
    assert dir(jdfl_lightning) == sorted(jdfl_lightning.__all__)
    with pytest.raises(AttributeError, match="nothing_here"):
        jdfl_lightning.nothing_here  # type: ignore[attr-defined]  # noqa: B018
