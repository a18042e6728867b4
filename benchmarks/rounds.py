"""A round of PACS-like clients against a hand-written PyTorch loop that does the same mathematics.

    python benchmarks/rounds.py --size 112

The loop is what one would write without any library: for every client the images become floats batch by batch, forward,
loss, backward, SGD step; then the mean of the models in double precision. That FedAvg ends at the same weights is
checked. Cases take turns in one process; the pool's workers are started before the clock.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from random_images import RandomImages
from timing import in_turns, write_section
from torch import Tensor
from torch.nn.functional import cross_entropy

from jdfl_lightning import (
    MOON,
    SCAFFOLD,
    Algorithm,
    Experiment,
    FedAvg,
    FedDC,
    FedDyn,
    FedProc,
    FedProx,
    LocalBackend,
    PaperCNN,
    PoolBackend,
)
from jdfl_lightning.backends import Backend, Runner
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.core.messages import FitTask, RoundContext
from jdfl_lightning.core.seeding import torch_generator
from jdfl_lightning.core.system import reuse_memory
from jdfl_lightning.core.tensors import Tensors, flatten
from jdfl_lightning.data.loader import BatchLoader
from jdfl_lightning.storage.checkpoint import ClientStates


def bare_round(run: Experiment, weights: Tensors, channels_last: bool) -> Tensors:
    """Return the mean of the clients' models, by plain PyTorch."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    network = torch.nn.ModuleDict({"backbone": PaperCNN(run.data.size), "head": torch.nn.Linear(128, 7)})
    sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in weights.items()}
    count = 0
    for client, indices in enumerate(run.data.partition.clients):
        network.load_state_dict(weights)
        network.to(memory_format=layout)
        sgd = torch.optim.SGD(network.parameters(), lr=run.local_optimizer.argument("lr"))
        shuffle = torch_generator(0, "shuffle", 1, client)
        for _ in range(run.epochs):
            order = indices[torch.randperm(len(indices), generator=shuffle)]
            for chosen in order.split(BatchLoader(*_loader(run, indices)).sizes()):
                images = run.data.images[chosen].permute(0, 3, 1, 2).float().mul_(2 / 255).sub_(1)
                images = images.contiguous(memory_format=layout)
                sgd.zero_grad()
                loss = cross_entropy(network["head"](network["backbone"](images)), run.data.labels[chosen])
                loss.backward()
                sgd.step()
        for name, parameter in network.named_parameters():
            sums[name] += parameter.detach().double() * len(indices)
        count += len(indices)
    return {name: (total / count).float() for name, total in sums.items()}


def _loader(run: Experiment, indices: Tensor) -> tuple[Tensor, Tensor, int, Tensor, int]:
    return run.data.images, run.data.labels, 0, indices, run.batch_size


OTHERS: dict[str, type[Algorithm]] = {kind.__name__: kind for kind in (SCAFFOLD, FedDyn, FedDC, FedProx, FedProc, MOON)}


class Plugin:
    """A round by the package, with everything that a real round does but the evaluation."""

    def __init__(self, run: Experiment, backend: Backend, algorithm: Algorithm, stack: ExitStack) -> None:
        self.algorithm = algorithm
        states = ClientStates(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        run = Experiment(**{**vars(run), "algorithm": algorithm})
        self.weights, buffers = Workspace(run).initial(1)
        self.runner: Runner = stack.enter_context(backend.open(run, states))
        self.context = RoundContext(1, run.data.num_clients, run.data.num_clients)
        self.record = algorithm.init_server(self.weights)
        self.tasks = [
            FitTask(client, 1, 0, self.weights, buffers, algorithm.broadcast(self.record))
            for client in range(run.data.num_clients)
        ]

    def __call__(self) -> Tensors:
        """Fit all clients and aggregate."""
        results = self.runner.fit(self.tasks)
        return self.algorithm.aggregate(self.weights, self.record, results, self.context)[0]


def main() -> None:
    """Time the cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--images", type=int, default=1000, help="in all; a tenth is held out")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--algorithms", nargs="*", choices=OTHERS, default=list(OTHERS), help="beside FedAvg")
    options = parser.parse_args()
    reuse_memory()  # as the command line does; the loop gains from it as much
    data = RandomImages(options.size, options.clients, options.images)
    data.deal(0)
    run = Experiment(data=data, supervision="base", client_fraction=1.0, epochs=options.epochs, lr=0.01)
    weights, _ = Workspace(run).initial(1)
    threads = torch.get_num_threads()
    others: list[Algorithm] = [OTHERS[name]() for name in options.algorithms]
    with ExitStack() as stack:
        cases: dict[str, Callable[[], Tensors]] = {
            "loop, default layout": lambda: bare_round(run, weights, channels_last=False),
            "loop, channels_last": lambda: bare_round(run, weights, channels_last=True),
            "local, FedAvg": Plugin(run, LocalBackend(), FedAvg(), stack),
            f"pool of {threads}, FedAvg": Plugin(run, PoolBackend(workers=threads, threads=1), FedAvg(), stack),
        }
        for algorithm in others:
            cases[f"local, {type(algorithm).__name__}"] = Plugin(run, LocalBackend(), algorithm, stack)
        reference, start = flatten(cases["loop, channels_last"]()), flatten(weights)
        for name in list(cases)[:4]:
            apart = float((flatten(cases[name]()) - reference).norm() / (reference - start).norm())
            print(f"{name}: the round's update differs from the loop's by {apart:.1e} of its length")
            # with another layout or other threads sums round otherwise, and on noise many a max is nearly a tie
            assert apart < (1e-6 if name == "local, FedAvg" else 0.3), f"{name} does something else"
        times = in_turns(cases, options.turns)
    per_second = options.epochs * sum(map(len, data.partition.clients)) / times.median("loop, channels_last")
    lines = [
        f"{options.clients} clients with {options.images * 9 // 10} images of {options.size} px in all, "
        f"{options.epochs} epoch, batch 32, {threads} threads, {options.turns} turns; the loop in channels_last "
        f"trains {per_second:.0f} images a second.",
        "",
        "| case | seconds (median) | against the loop in channels_last | against local FedAvg |",
        "|---|---|---|---|",
    ]
    for name in cases:
        ratios = times.ratio(name, "loop, channels_last"), times.ratio(name, "local, FedAvg")
        lines.append(f"| {name} | {times.median(name):.2f} | {ratios[0]} | {ratios[1]} |")
    write_section(f"rounds at {options.size} px", "\n".join(lines))


if __name__ == "__main__":
    main()
