"""Clients that train on the features of a frozen network, against the same run with the network in every batch.

    python benchmarks/cached_features.py --root PACS --weights lite0.safetensors

The network is timm's tf_efficientnet_lite0 at 128 px; its weights alter no time, and are random if none are given.
Without --root the images are noise, as many as PACS has. The features are computed anew, then two rounds are timed with
the network in every batch, and a whole run on the features.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
from random_images import RandomImages
from timing import write_section

from jdfl_lightning import PACS, Experiment, LocalBackend, fit, reuse_memory
from jdfl_lightning.client.features import open_workspace


def main() -> None:
    """Time all three and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder of PACS")
    parser.add_argument("--weights", help="file of weights")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--slow_rounds", type=int, default=1)
    options = parser.parse_args()
    reuse_memory()
    data: Any = PACS(options.root, size=128) if options.root else RandomImages(128, 10, 9991)
    arguments = {"weights": options.weights, "freeze": True}
    data.deal(0)
    with tempfile.TemporaryDirectory() as place:
        os.environ["JDFL_CACHE"] = place
        run = Experiment(
            data=data,
            backbone="timm/tf_efficientnet_lite0",
            backbone_args=arguments,
            supervision="base",
            backend=LocalBackend(),
            rounds=options.rounds,
            epochs=5,
        )
        start = time.perf_counter()
        open_workspace(run)
        computing = time.perf_counter() - start
        start = time.perf_counter()
        done = fit(replace(run, run_dir=f"{place}/features"), progress=False)
        whole = time.perf_counter() - start
        one = sum(row["time/fit"] + row["time/evaluate"] for row in done.rows) / len(done.rows)
        slow = replace(run, backbone_args=arguments | {"cache": False}, rounds=options.slow_rounds)
        rows = fit(replace(slow, run_dir=f"{place}/images"), progress=False).rows
        other = sum(row["time/fit"] + row["time/evaluate"] for row in rows) / len(rows)
    write_section(
        "cached features",
        f"{len(data.images):,} images of 128 px, 10 clients, 5 of them in a round with 5 epochs, FedAvg, one process, "
        f"{torch.get_num_threads()} threads.\n\n"
        "| | seconds |\n|---|---|\n"
        f"| features of all images, once | {computing:.0f} |\n"
        f"| a round with the network in every batch, with its evaluation | {other:.0f} |\n"
        f"| a round on features | {one:.2f} |\n"
        f"| ratio of the two | {other / one:.0f} |\n"
        f"| a run of {options.rounds} rounds on features, from start to end | {whole:.0f} |",
    )


if __name__ == "__main__":
    main()
