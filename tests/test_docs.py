"""Every Python block of the README runs, and those of the page on the joint head."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

from jdfl_lightning import JointModule
from jdfl_lightning.cli import main
from jdfl_lightning.run_folder import read_run

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_block(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})


def test_blocks_on_the_joint_head_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "joint_head.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "joint_head.md", "exec"), names)
    assert "E 5 5" in capsys.readouterr().out  # progress=print
    (settings,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    Path("module.yaml").write_text(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a command line that is none
        parsed = LightningCLI(JointModule, args=["--config", "module.yaml"], run=False)
    assert parsed.model.head.weight.shape == (28, 512)
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / "docs" / target).exists(), target


def test_readme_has_blocks_and_its_links_exist() -> None:
    assert len(BLOCKS) >= 2
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / target).exists(), target


def test_own_algorithm_of_the_docs_runs_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), flags=re.DOTALL)
    assert len(block.splitlines()) < 30
    (tmp_path / "mine.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = (
        "algorithm:\n  class_path: mine.FedAvgM\n  init_args:\n    beta: 0.5\nrounds: 3\nepochs: 1\nsupervision: base\n"
    )
    Path("mine.yaml").write_text(config)
    arguments = ["--config", "mine.yaml", "--data.size", "8", "--data.num_clients", "4", "--run_dir", "run"]
    assert main(["fit", *arguments]) == 0
    run = read_run(Path("run"))
    assert run.config["algorithm"] == {
        "class_path": "mine.FedAvgM",
        "init_args": {"weighting": "samples", "beta": 0.5},
    }
    assert [row["norm/server/m"] > 0 for row in run.rows] == [True] * 3
