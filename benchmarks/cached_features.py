"""Clients that train on the features of a frozen network, against the same run with the network in every batch.

    python benchmarks/cached_features.py --root PACS --weights lite0.safetensors

The network is timm's tf_efficientnet_lite0 at 128 px; its weights alter no time, and are random if none are given.
Without --root the images are noise, as many as PACS has. The features are computed anew; then a round of one epoch is
timed with the network in every batch and on the features, and a whole run on the features. Seconds of computing (user
and system, of all threads) are told beside those of the clock, as other work on a machine alters only the latter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
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
        short = replace(run, rounds=3, epochs=1)
        slow = replace(short, rounds=1, backbone_args=arguments | {"cache": False})
        computing, _ = timed(lambda: open_workspace(run))
        whole, _ = timed(lambda: fit(replace(run, run_dir=f"{place}/whole"), progress=False))
        images, first = timed(lambda: fit(replace(slow, run_dir=f"{place}/images"), progress=False))
        features, later = timed(lambda: fit(replace(short, run_dir=f"{place}/features"), progress=False))
    one, other = (statistics.median(r["time/fit"] + r["time/evaluate"] for r in x.rows) for x in (later, first))
    write_section(
        "cached features",
        f"{len(data.images):,} images of 128 px, 10 clients, 5 of them in a round, FedAvg, one process, "
        f"{torch.get_num_threads()} threads for the network.\n\n"
        "| | seconds | seconds of computing |\n|---|---|---|\n"
        f"| features of all images, once | {computing[0]:.0f} | {computing[1]:.0f} |\n"
        f"| a round of one epoch with the network in every batch | {other:.1f} | |\n"
        f"| the same on features | {one:.2f} | |\n"
        f"| ratio of the two | {other / one:.0f} | |\n"
        f"| a run of {options.rounds} rounds of five epochs on features, from start to end "
        f"| {whole[0]:.0f} | {whole[1]:.0f} |",
    )
    print(f"runs of one round: {images}, {features}")


def timed(work: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    """Return the seconds of some work, by the clock and of computing, and what it returns."""
    clock, computing = time.perf_counter(), time.process_time()
    found = work()
    return (time.perf_counter() - clock, time.process_time() - computing), found


if __name__ == "__main__":
    main()
