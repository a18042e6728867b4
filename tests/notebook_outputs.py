"""Run the notebooks and put their outputs into them: `make notebooks`, or some of them, by their files."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 600
"""The notebooks take about a minute each where nothing else goes on, and CI is not such a place."""
_STYLES = re.compile(r"\x1b\[[\d;]*m")
_OWN_FOLDERS = ("TMPDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "JDFL_CACHE")


def execute(file: Path) -> Any:
    """Return a notebook with fresh outputs, run top to bottom by a kernel of this interpreter.

    All that the kernel writes goes into a folder that is removed. It is reached through a file there and opens no port.
    """
    notebook = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, dict.fromkeys(_OWN_FOLDERS, folder)):
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            startup_timeout=CELL_SECONDS,
            iopub_timeout=CELL_SECONDS,  # else a busy machine loses what a cell gives: 4 seconds are waited for it
            kernel_name="python3",
            coalesce_streams=True,
            record_timing=False,
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}}),
        )
        client.execute(cwd=folder)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if "text/plain" in output.get("data", {}):  # rich's tables have it for terminals, beside their HTML
            output.data["text/plain"] = _STYLES.sub("", output.data["text/plain"])
    return notebook


def main() -> None:
    """Write what the tests compare with: outputs, and nothing of the machine."""
    for file in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        notebook = execute(file)
        notebook.metadata["language_info"] = {"name": "python"}
        nbformat.write(notebook, file)
        print(file.name, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # their networks are tiny
    main()
