"""Checks of a run's settings and data, and estimates of what it needs, without training it."""

from __future__ import annotations

import time
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jdfl_lightning.backends.base import state_of
from jdfl_lightning.client.evaluation import evaluate
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.clustering.clusters import cluster
from jdfl_lightning.clustering.updates import Updates
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.messages import FitTask, RoundContext
from jdfl_lightning.core.tensors import num_bytes
from jdfl_lightning.server.phase1 import initial_state, prepare
from jdfl_lightning.server.state import make_tasks
from jdfl_lightning.ui.display import Display, progress_display

_BATCHES = 4
"""Batches of the longer of two short fits, whose difference is the time of the steps alone."""
_HELD_OUT = 256
"""Held-out images that an evaluation is timed on."""


@dataclass(frozen=True)
class Estimate:
    """A number that a run is expected to need."""

    value: float
    unit: str
    """bytes, seconds, or empty for a count."""
    how: str
    """How it was obtained."""


@dataclass(frozen=True)
class Validation:
    """The outcome of `validate`."""

    data: dict[str, Any]
    """The numbers of images by domain, class and client, as in ``data.json``."""
    estimates: dict[str, Estimate]


def validate(experiment: Experiment, progress: bool | Display = True) -> Validation:
    """Check settings and data as `fit` does before a run, and estimate memory, bytes and time; nothing is trained.

    One client takes a few steps on a copy of the initial weights, which are then forgotten.

    Args:
        experiment: the settings.
        progress: whether progress is shown, as in `fit`.

    Returns:
        The data in numbers, and the estimates.
    """
    with progress_display(progress) as display:
        workspace = prepare(experiment, display)
        return Validation(experiment.data.describe(), _estimates(workspace, display))


def _estimates(workspace: Workspace, display: Display) -> dict[str, Estimate]:
    display.step("measuring", 0, 4)
    experiment, data = workspace.experiment, workspace.data
    client = max(range(data.num_clients), key=lambda number: data.client_sizes[number])
    task, how_many = _task(workspace, client)
    few = min(_BATCHES, max(1, data.client_sizes[client] // experiment.batch_size))
    _fit(workspace, task, 1)  # the first fit builds and allocates what later ones reuse
    display.step("measuring", 1, 4)
    answer, state, one, saved = _fit(workspace, task, 1)
    display.step("measuring", 2, 4)
    seconds = one if few == 1 else max(0.0, (_fit(workspace, task, few)[2] - one) / (few - 1))
    display.step("measuring", 3, 4)
    around = max(0.0, one - seconds)
    judging, images = _evaluation_time(workspace, task)
    display.step("measuring", 4, 4)
    asked, sizes = experiment.clients_per_round, data.client_sizes
    loaders = [data.client_loader(number, 0, experiment.batch_size, torch.Generator()) for number in range(len(sizes))]
    steps = experiment.epochs * sum(map(len, loaders)) / len(sizes)
    round_seconds = asked * (around + steps * seconds) + judging / experiment.evaluate_every
    measured = f"from {few} measured steps of client {client}, the largest, on this machine; {how_many}"
    down, up = asked * task.num_bytes, asked * answer
    weights = num_bytes({"weights": task.weights, "buffers": task.buffers})
    found = {
        "parameters": Estimate(sum(t.numel() for t in task.weights.values()), "", f"counted; trained ones; {how_many}"),
        "bytes_down_a_round": Estimate(down, "bytes", f"counted: {asked} requests of the size of client {client}'s"),
        "bytes_up_a_round": Estimate(up, "bytes", f"counted: {asked} answers of the size of client {client}'s"),
        "bytes_of_all_rounds": Estimate(experiment.rounds * (down + up), "bytes", "the two above, times the rounds"),
        "memory_of_images": Estimate(
            num_bytes({"": {"": data.inputs}}), "bytes", "counted; mapped from the cache where possible"
        ),
        "memory_of_a_fit": Estimate(
            3 * weights + state + saved,
            "bytes",
            "weights, gradients and a copy, and the client's state, counted; what a step keeps for its gradients, "
            "measured; an optimizer with a state, such as Adam, needs more",
        ),
        "step": Estimate(seconds, "seconds", measured),
        "evaluation": Estimate(
            judging, "seconds", f"from {min(images, _HELD_OUT)} of {images} held-out images, measured"
        ),
        "round": Estimate(
            round_seconds, "seconds", f"{asked} clients one after the other, {steps:.0f} steps each; workers are faster"
        ),
        "all_rounds": Estimate(experiment.rounds * round_seconds, "seconds", "a round, times the rounds"),
    }
    if experiment.needs_discovery:
        epochs, share = experiment.clustering.epochs, steps / experiment.epochs
        found["discovery"] = Estimate(
            experiment.discovery_clients * (around + epochs * share * seconds),
            "seconds",
            f"{experiment.discovery_clients} clients one after the other, {epochs} epochs of such steps",
        )
    return found


def _task(workspace: Workspace, client: int) -> tuple[FitTask, str]:
    """Return the request of a client in round 1, and the number of pseudo-domains: as given, or as of domains."""
    experiment, data, seed = workspace.experiment, workspace.data, workspace.experiment.seed_everything
    domains, how_many = None, "no pseudo-domains"
    if experiment.needs_discovery:
        given, criterion = experiment.num_domains, experiment.clustering.criterion
        count = given or max(1, min(len(data.domain_names), experiment.discovery_clients))
        members = sorted([client, *[other for other in range(data.num_clients) if other != client][: count - 1]])
        domains = cluster(Updates(members, torch.eye(count)), count, criterion, count, seed)
        how_many = f"M = {count}" + ("" if given else ", the number of domains; discovery may find another")
    state, _ = initial_state(workspace, domains)
    [task] = make_tasks(experiment, state, domains, [client], RoundContext(1, len(data.client_sizes), 1, seed))
    return task, how_many


def _with_parts(workspace: Workspace, **parts: Any) -> Workspace:
    """Return a workspace, with the same network, whose clients fit for one epoch, on other parts of the images."""
    found = copy(workspace)
    found.data = copy(workspace.data)
    found.data.partition = replace(workspace.data.partition, **parts)
    found.experiment = replace(workspace.experiment, epochs=1)
    return found


def _fit(workspace: Workspace, task: FitTask, batches: int) -> tuple[int, int, float, int]:
    """Have a client take a few steps; return bytes of its answer and of its state, seconds, and bytes of a step."""
    clients = list(workspace.data.partition.clients)
    clients[task.client] = clients[task.client][: batches * workspace.experiment.batch_size]
    few = _with_parts(workspace, clients=clients)
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        answer, state = fit_client(few, task, state_of(few, task, None))
    return answer.num_bytes, num_bytes(state), time.perf_counter() - start, kept // batches


def _evaluation_time(workspace: Workspace, task: FitTask) -> tuple[float, int]:
    """Return the seconds of an evaluation, from some of the held-out images, and the number of all of them."""
    parts = {name: getattr(workspace.data.partition, name) for name in ("test", "val", "unseen")}
    images = sum(len(domain) for part in parts.values() for domain in part)
    share = min(1.0, _HELD_OUT / images)
    some = {name: [domain[: max(1, int(share * len(domain)))] for domain in part] for name, part in parts.items()}
    seconds = evaluate(_with_parts(workspace, **some), {"": task.weights}, task.buffers).seconds
    return seconds * images / sum(len(domain) for part in some.values() for domain in part), images
