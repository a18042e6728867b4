"""The notebooks run top to bottom, and what is committed of them is what a run gives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

import jdfl_lightning
from notebook_outputs import CELL_SECONDS, NOTEBOOKS, execute

ABSOLUTE = re.compile(r"""(?:^|[\s"'=(\[,:])(?:~?/[\w.-]+/|[A-Za-z]:\\|file:)""", re.MULTILINE)
each = pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(output: Any) -> Iterator[str]:
    """All of an output that can be read."""
    if output.output_type == "stream":
        yield output.text
    else:
        yield from (content for kind, content in output.data.items() if kind.startswith("text/"))


def kinds(cell: Any) -> set[str]:
    """What a cell gives: text, a table, a picture."""
    return {kind for output in cell.outputs for kind in output.get("data", {output.get("name"): ""})}


def check(notebook: Any) -> None:
    """Nothing went wrong, nobody was warned, nothing tells where it ran, and no text has codes for a terminal."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type in ("stream", "execute_result", "display_data"), output
            assert output.get("name") != "stderr", output.text
            for text in texts(output):
                assert not ABSOLUTE.search(text), text
                assert "Warning" not in text
                assert " object at 0x" not in text
                assert "\x1b" not in text, text


def test_what_counts_as_a_path_of_this_machine() -> None:
    for text in ("saved to /tmp/run", "/home/me/x.png", "root='/data/pacs'", "in ~/runs/one", r"C:\Users", "a\n/x/y"):
        assert ABSOLUTE.search(text), text
    for text in ("runs/quickstart", "test/acc/ink", "1/10", "acc 1.00  /  2", "<b>x</b> </span>", "round 1/12"):
        assert not ABSOLUTE.search(text), text


def test_there_are_notebooks() -> None:
    names = ["01_quickstart", "02_joint_head_without_federation", "03_your_own_data", "04_your_own_parts"]
    assert [file.stem for file in NOTEBOOKS] == names


@each
def test_committed_outputs(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    check(notebook)
    assert any("image/png" in kinds(cell) for cell in code_cells(notebook))
    assert file.stat().st_size < 500_000
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


@each
def test_nothing_is_defined_that_the_package_has(file: Path) -> None:
    for cell in code_cells(nbformat.read(file, as_version=4)):
        tree = ast.parse(re.sub(r"^%%.*\n", "", cell.source))
        made = {node.name for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        assert not made & set(jdfl_lightning.__all__)


@each
def test_only_public_names_are_imported(file: Path) -> None:
    for cell in code_cells(nbformat.read(file, as_version=4)):
        assert not re.search(r"^ *(?:from|import) jdfl_lightning\.", cell.source, re.MULTILINE), cell.source


@each
def test_links_exist(file: Path) -> None:
    prose = [cell.source for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "markdown"]
    links = [link for text in prose for link in re.findall(r"\]\(([^)#]+)", text)]
    assert links
    for link in links:
        assert (file.parent / link).exists(), link


@pytest.mark.slow
@pytest.mark.timeout(2 * CELL_SECONDS)
@each
def test_runs_top_to_bottom(file: Path) -> None:
    """Numbers depend on the machine; what kind of output a cell gives does not."""
    fresh, committed = execute(file), nbformat.read(file, as_version=4)
    check(fresh)
    assert [kinds(cell) for cell in code_cells(fresh)] == [kinds(cell) for cell in code_cells(committed)]
