"""Clients that train on the features of a frozen network, against the same fit with the network in every batch.

    OMP_NUM_THREADS=1 python benchmarks/cached_features.py --root PACS --weights lite0.safetensors

The network is timm's tf_efficientnet_lite0 at 128 px; its weights alter no time, and are random if none are given.
Without --root the images are noise, as many as PACS has. The features are computed anew; then a client's fit of one
epoch is timed with the network in every batch and on the features, and a whole run on the features. Seconds of
computing (user and system) are told beside those of the clock, as other work on a machine alters the latter most.
"""

from __future__ import annotations

import argparse
import os
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
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.core.messages import FitTask


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return the seconds of some work, by the clock and of computing, and what it returns."""
    clock, computing = time.perf_counter(), time.process_time()
    found = work()
    return time.perf_counter() - clock, time.process_time() - computing, found


def one_fit(workspace: Workspace) -> Callable[[], Any]:
    """Return a client's fit; one of another client has been done before, so that all is loaded."""
    weights, buffers = workspace.initial(1)
    fit_client(workspace, FitTask(1, 1, 0, weights, buffers), {})
    return lambda: fit_client(workspace, FitTask(0, 1, 0, weights, buffers), {})


def main() -> None:
    """Time all and write the table."""
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
            run_dir=f"{place}/run",
        )
        short = replace(run, epochs=1)
        computing, computed, workspace = timed(lambda: open_workspace(short))
        fast, faster, _ = timed(one_fit(workspace))
        slow, slower, _ = timed(one_fit(Workspace(replace(short, backbone_args=arguments | {"cache": False}))))
        whole, wholly, _ = timed(lambda: fit(run, progress=False))
    write_section(
        "cached features",
        f"{len(data.images):,} images of 128 px, 10 clients, one process, {torch.get_num_threads()} threads; other "
        "work on the machine.\n\n"
        "| | seconds | seconds of computing |\n|---|---|---|\n"
        f"| features of all images, once | {computing:.0f} | {computed:.0f} |\n"
        f"| a client's epoch, {len(data.partition.clients[0])} images, with the network in every batch "
        f"| {slow:.1f} | {slower:.1f} |\n"
        f"| the same on features | {fast:.3f} | {faster:.3f} |\n"
        f"| ratio of the two | {slow / fast:.0f} | {slower / faster:.0f} |\n"
        f"| FedAvg, {options.rounds} rounds of 5 clients with 5 epochs on features, from start to end "
        f"| {whole:.0f} | {wholly:.0f} |",
    )


if __name__ == "__main__":
    main()
