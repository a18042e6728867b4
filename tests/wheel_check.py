"""Build the wheel, install it alone in an empty environment, and use it outside the checkout: `make wheel`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


def main() -> None:
    """Stop at the first command that fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

        def run(*command: str | Path, where: Path = folder) -> str:
            print("+", *command, flush=True)
            done = subprocess.run(
                list(map(str, command)), cwd=where, env=environment, stdout=subprocess.PIPE, text=True
            )
            print(done.stdout, end="", flush=True)
            if done.returncode:
                sys.exit(f"failed with exit code {done.returncode}")
            return done.stdout

        run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, CHECKOUT)
        (wheel,) = folder.glob("*.whl")
        venv.create(folder / "empty", with_pip=True)
        bin_folder = folder / "empty" / "bin"
        run(bin_folder / "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        command = bin_folder / "jdfl-lightning"
        run(command, "--version")
        run(command, "fit", "--rounds", "2", "--run_dir", "run")
        run(command, "test", "--run", "run")
        run(command, "report", "run")
        assert "Comparison of runs" in (folder / "report" / "report.html").read_text()
        assert "num_clients: 40" in run(command, "fit", "--config", "pacs_c.yaml", "--print_config")
        read = "from jdfl_lightning.report import published as p; print(len(p.main_table()), p.ari_grid()[5, 32, 'B'])"
        assert run(bin_folder / "python", "-c", read) == "60 0.987\n"
        (folder / "script.py").write_bytes((CHECKOUT / "examples/joint_resnet.py").read_bytes())
        assert "overall" in run(bin_folder / "python", "script.py")
        left = {path.name for path in folder.iterdir()} - {"empty", wheel.name, "run", "report", "script.py"}
        assert not left, f"left behind: {left}"


if __name__ == "__main__":
    main()
