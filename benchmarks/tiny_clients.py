"""A thousand tiny clients: what a fit costs beside its steps.

    python benchmarks/tiny_clients.py

Every client has 32 images of 8 px and takes one step. The bare loop takes the same steps: it puts the server's weights
into a module, makes an optimizer, and trains. Blocks of 100 clients take turns; times are of computing, by one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from random_images import RandomImages
from timing import in_turns, write_section
from torch.nn.functional import cross_entropy

from jdfl_lightning import Experiment
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.core.messages import FitTask
from jdfl_lightning.core.seeding import torch_generator


def main() -> None:
    """Time both and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    options = parser.parse_args()
    data = RandomImages(size=8, num_clients=options.clients, images=36 * options.clients)
    torch.set_num_threads(1)
    data.deal(0)
    run = Experiment(data=data, supervision="base", epochs=1)
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    block = 100
    turns = options.clients // block - 1
    done = {"plugin": 0, "bare": 0}

    def plugin() -> None:
        for client in range(done["plugin"], done["plugin"] + block):
            fit_client(workspace, FitTask(client, 1, 0, weights, buffers), {})
        done["plugin"] += block

    def bare() -> None:
        for client in range(done["bare"], done["bare"] + block):
            module = workspace.module(weights, buffers)
            sgd = torch.optim.SGD(module.parameters(), lr=run.local_optimizer.argument("lr"))
            for images, labels, _ in data.client_loader(client, 0, 32, torch_generator(0, "shuffle", 1, client)):
                sgd.zero_grad()
                cross_entropy(module(images), labels).backward()
                sgd.step()
        done["bare"] += block

    times = in_turns({"plugin": plugin, "bare": bare}, turns, time.process_time)
    beyond = [1000 * (a - b) / block for a, b in zip(times["plugin"], times["bare"], strict=True)]
    write_section(
        "tiny clients",
        f"{options.clients:,} clients of about 32 images of 8 px, one step each, one thread, {turns} turns of {block} "
        "clients; other work on the machine.\n\n"
        "| | ms of computing a client (median) |\n|---|---|\n"
        f"| the bare loop | {1000 * times.median('bare') / block:.1f} |\n"
        f"| `fit_client` | {1000 * times.median('plugin') / block:.1f} |\n"
        f"| beyond the steps | {statistics.median(beyond):.1f} ({min(beyond):.1f} to {max(beyond):.1f}) |",
    )


if __name__ == "__main__":
    main()
