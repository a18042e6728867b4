"""What a round costs on Flower: seconds and bytes, in a deployment on this machine.

    python benchmarks/flower_rounds.py

A SuperLink with TLS and node authentication and two SuperNodes, each with one client of 80 digits at 32 px; the paper's
network, one local epoch. Bytes are those of the tensors in a round's messages, and all that Flower says it has sent.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from pathlib import Path

from PIL import Image
from timing import write_section

from jdfl_lightning import DigitsDomains
from jdfl_lightning.storage.folder import read_run

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from deployment import Deployment, make_node_key  # noqa: E402


def write_images(folder: Path, domain: str) -> Path:
    """Write 100 digits of a domain as the folder of a site."""
    data = DigitsDomains(size=32)
    images, labels, domains = data.load()
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
        chosen = (labels == label) & (domains == data.domain_names.index(domain))
        for number, pixels in enumerate(images[chosen][:10].numpy()):
            Image.fromarray(pixels).save(folder / str(label) / f"{number}.png")
    return folder


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lines = [
        "| algorithm | supervision | s a round (least to most) | training | MB down | MB up | Flower: the whole run |",
        "|---|---|" + "---:|" * 5,
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        deployment = Deployment(folder / "deployment", {"OMP_NUM_THREADS": "1"})
        try:
            deployment.start_link()
            for site, domain in enumerate(("ink", "photo")):
                key = make_node_key(deployment.folder / f"site{site}.key")
                deployment.flwr("supernode", "register", str(key.with_suffix(".pub")), "loopback")
                root, states = write_images(folder / domain, domain), folder / f"states{site}"
                deployment.start_node(f"site{site}", key, partition_id=site, data_root=str(root), state_dir=str(states))
            for algorithm, supervision in (("FedAvg", "base"), ("FedAvg", "graded"), ("SCAFFOLD", "graded")):
                run_dir, said = folder / f"{algorithm}-{supervision}", len(deployment.log("site0").read_text())
                run = deployment.run(
                    ROOT / "examples/flower_app",
                    algorithm=algorithm,
                    supervision=supervision,
                    rounds=options.rounds,
                    run_dir=str(run_dir),
                )
                status = deployment.wait(run, seconds=1200)
                rows = read_run(run_dir).rows
                seconds = sorted(row["time/fit"] for row in rows)
                lately = deployment.log("site0").read_text()[said:]
                trained = re.findall(r"round [1-9]\d*: trained client .* in ([\d.]+) s", lately)
                down, up = rows[-1]["bytes/down"] / 1e6, rows[-1]["bytes/up"] / 1e6
                length = f"{statistics.median(seconds):.1f} ({seconds[0]:.1f} to {seconds[-1]:.1f})"
                training = statistics.median(map(float, trained))
                total = status["network-traffic"]["total-bytes"] / 1e6
                traffic = f"{down:.1f} | {up:.1f} | {total:.0f} MB"
                lines.append(f"| {algorithm} | {supervision} | {length} | {training:.1f} | {traffic} |")
                print(lines[-1], flush=True)
        finally:
            deployment.close()
    write_section("flower rounds", "\n".join(lines), "flower.md")


if __name__ == "__main__":
    main()
