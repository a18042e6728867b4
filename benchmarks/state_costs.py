"""Where the time of a stateful algorithm goes beside FedAvg's: a profile of one fit at 112 px.

python benchmarks/state_costs.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from timing import write_section

from jdfl_lightning import SCAFFOLD, Algorithm, DigitsDomains, Experiment, FedDC, FedDyn
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.core.messages import FitTask
from jdfl_lightning.core.system import reuse_memory
from jdfl_lightning.storage.checkpoint import ClientStates

Result = TypeVar("Result")


def least(work: Callable[[], Result], times: int = 7) -> tuple[float, Result]:
    """Return the least milliseconds of some work, and its result."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - begin)
    return 1000 * min(seconds), result


def main() -> None:
    """Time the parts and write the table."""
    reuse_memory()
    data = DigitsDomains(size=112, num_clients=4)
    data.deal(0)
    workspace = Workspace(Experiment(data=data, supervision="base"))
    weights, buffers = workspace.initial(1)
    module = workspace.module(weights, buffers)
    images, labels, domains = next(iter(data.client_loader(0, 0, 32, torch.Generator())))
    params = module.trainable()
    sgd = torch.optim.SGD(module.parameters(), lr=1e-6)

    def step() -> None:
        sgd.zero_grad()
        module.loss(module(images), module.targets(domains, None), labels).backward()
        sgd.step()

    training, _ = least(step, 4)
    lines = [
        f"Milliseconds (least of several); a training step of 32 images takes {training:.0f} ms. Share of a fit beyond "
        "FedAvg's: of 6 steps, as in the table above, and of 125, a client of 800 images with 5 epochs.",
        "",
        "| | read state | begin | each step | report | write state | share at 6 steps | at 125 steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    algorithms: list[Algorithm] = [SCAFFOLD(), FedDyn(), FedDC()]
    with tempfile.TemporaryDirectory() as folder:
        states = ClientStates(Path(folder))
        for algorithm in algorithms:
            state = algorithm.init_client(weights)
            task = FitTask(0, 1, 0, weights, buffers, algorithm.init_server(weights))
            write, _ = least(lambda state=state: states.save(0, 1, state))  # type: ignore[misc]
            read, state = least(lambda: states.load(0, 1))
            local = algorithm.local(task, state)
            local.lr_sums = dict.fromkeys(params, 1.0)
            with torch.no_grad():
                begin, _ = least(lambda local=local: local.begin(params))  # type: ignore[misc]
                each, _ = least(lambda local=local: local.correct(params))  # type: ignore[misc]
                report, _ = least(lambda local=local: local.report(weights))  # type: ignore[misc]
            shares = [100 * (read + begin + k * each + report + write) / (k * training) for k in (6, 125)]
            parts = " | ".join(f"{value:.1f}" for value in (read, begin, each, report, write))
            lines.append(f"| {type(algorithm).__name__} | {parts} | {shares[0]:.1f} % | {shares[1]:.1f} % |")
    write_section("state costs", "\n".join(lines))


if __name__ == "__main__":
    main()
