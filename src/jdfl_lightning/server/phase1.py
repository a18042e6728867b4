"""Before the first round: settings and data are checked, Phase 1 finds pseudo-domains, the server gets its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from jdfl_lightning.backends import Runner
from jdfl_lightning.client.evaluation import has_statistics
from jdfl_lightning.client.features import frozen_backbone, open_workspace, why_no_features
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.client.trainer import check_trainer
from jdfl_lightning.clustering.clusters import PseudoDomains
from jdfl_lightning.clustering.updates import Updates, reason_unusable
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import InputError, last_line, notify, plain, require, without_stop
from jdfl_lightning.core.messages import DISCOVERY_ROUND, SUPERVISION, UNKNOWN, FitFailure, FitResult, FitTask
from jdfl_lightning.core.seeding import numpy_generator
from jdfl_lightning.core.tensors import Record, Tensors, is_record
from jdfl_lightning.data.base import Progress
from jdfl_lightning.models import num_features
from jdfl_lightning.server.screening import Form, why_not
from jdfl_lightning.server.state import ServerState, init_learned
from jdfl_lightning.supervision import RoundInfo
from jdfl_lightning.ui.display import Display

Theta = tuple[Tensors, Tensors]
"""Weights and buffers."""
LeaveOut = Callable[[int, str], None]
"""Called with (client, reason) for a client that has no pseudo-domain yet."""


def discovery_clients(experiment: Experiment) -> list[int]:
    """Return the clients that take part in Phase 1, sorted: a function of the seed."""
    generator = numpy_generator(experiment.seed_everything, "discovery")
    return sorted(generator.choice(experiment.data.num_clients, experiment.discovery_clients, replace=False).tolist())


def collect_updates(
    experiment: Experiment,
    runner: Runner,
    workspace: Workspace,
    step: Progress,
    leave_out: LeaveOut,
) -> Updates:
    """Have clients train E_0 epochs from theta_0; return their normalised updates.

    Args:
        experiment: the run's settings.
        runner: an open backend.
        workspace: has the shared initialisation, theta_0.
        step: called after each client.
        leave_out: called for a client whose update cannot be used; it gets a pseudo-domain later.
    """
    theta_0, length = workspace.start(1), experiment.clustering.sketch_dim or workspace.update_length()
    tasks = [_probe(experiment, client, theta_0) for client in discovery_clients(experiment)]
    vectors, left_out = _updates(runner, tasks, length, "discovery", step, leave_out)
    if not vectors:
        client, reason = next(iter(left_out.items()))
        raise InputError(
            f"Expected clients with an update to cluster but none has one. Client {client}: {last_line(reason)}"
        ) from RuntimeError(reason)
    down, up = sum(task.num_bytes for task in tasks), sum(vector.nbytes for vector in vectors.values())
    return Updates(list(vectors), torch.stack(list(vectors.values())), left_out, down, up)


def _probe(experiment: Experiment, client: int, theta_0: Theta, attempt: int = 0) -> FitTask:
    weights, buffers = theta_0
    return FitTask(client, DISCOVERY_ROUND, experiment.seed_everything, weights, buffers, attempt=attempt)


def _updates(
    runner: Runner, tasks: Sequence[FitTask], length: int, stage: str, step: Progress, leave_out: LeaveOut
) -> tuple[dict[int, Tensor], dict[int, str]]:
    """Have clients compute their updates; return those that can be used, and why the others cannot, by client."""
    vectors: dict[int, Tensor] = {}
    left_out: dict[int, str] = {}
    for done, (task, result) in enumerate(zip(tasks, runner.fit(tasks), strict=True), start=1):
        update = _update_of(result, length)
        if isinstance(update, str):
            left_out[task.client] = update
            leave_out(task.client, update)
        else:
            vectors[task.client] = update
        step(stage, done, len(tasks))
    return vectors, left_out


def _update_of(result: FitResult | FitFailure, length: int) -> Tensor | str:
    """Return a client's update vector, or why it cannot be used; ``length`` is the number of entries expected."""
    if isinstance(result, FitFailure):
        return result.reason
    form = Form({}, {}, {"update": {"u": torch.empty(length, device="meta")}})
    problem = why_not(result, form)
    if problem is None:
        update = result.upload["update"]["u"]
        problem = reason_unusable(update)
        if problem is None and not 0.99 < float(update.double().norm()) < 1.01:
            problem = "its update is not of length 1"
    return problem or update


def assign_newcomers(
    experiment: Experiment,
    runner: Runner,
    theta_0: Theta,
    domains: PseudoDomains,
    clients: Sequence[int],
    draw: int,
    step: Progress,
    leave_out: LeaveOut,
) -> tuple[PseudoDomains, int, int]:
    """Assign pseudo-domains to the newcomers among a round's clients; clients that fail stay unassigned.

    A client asked for the first time sends the update it would have sent in Phase 1. A client that failed before
    trains with new random numbers.

    Args:
        experiment: the run's settings.
        runner: an open backend.
        theta_0: where Phase 1 starts.
        domains: the pseudo-domains so far.
        clients: the round's clients.
        draw: number of this attempt, from 1, unique over all rounds.
        step: called after each newcomer.
        leave_out: called for a client that stays unassigned.

    Returns:
        The pseudo-domains, and the bytes sent to the clients and by them.
    """
    newcomers = [client for client in clients if domains.of(client) == UNKNOWN]
    if not newcomers:
        return domains, 0, 0
    asked = {*discovery_clients(experiment), *domains.joined}
    tasks = [_probe(experiment, client, theta_0, draw if client in asked else 0) for client in newcomers]
    vectors, _ = _updates(runner, tasks, domains.centroids.shape[1], "newcomers", step, leave_out)
    for client in newcomers:
        domains = domains.join(client, vectors.get(client), experiment.clustering.newcomers == "update")
    return domains, sum(task.num_bytes for task in tasks), sum(vector.nbytes for vector in vectors.values())


def prepare(experiment: Experiment, display: Display, backbone: nn.Module | None = None) -> Workspace:
    """Load the images and check trainer, backbone, data and layers, before a run folder is made.

    Args:
        experiment: the settings.
        display: where progress is shown.
        backbone: the network of `initial_backbone`, if it is already built.
    """
    data = experiment.data
    data.progress = display.step
    check_trainer(experiment.trainer)
    backbone = frozen_backbone(experiment) if backbone is None else backbone
    num_features(backbone, data.size)  # runs the backbone, which raises if it does not fit the images
    if data.roster is None:
        data.deal(experiment.seed_everything)
        for domain, classes in data.untested().items():
            notify(
                f"The test images of {domain} have none of {', '.join(classes)}: too few images for "
                f"--data.test_fraction {data.test_fraction:g}. Its accuracy says nothing about them.",
            )
        if copies := data.duplicated():
            notify(
                f"{copies} of the {len(data.partition.held_out)} held-out images are training images too, pixel for "
                "pixel, so accuracies are too high. Pass --data.drop_duplicates true to train without these.",
            )
    if why := why_no_features(experiment):
        note = f"The frozen network runs for every batch, as {why}; else its features would be computed once."
        notify(note)
    workspace = open_workspace(experiment, backbone=backbone)
    workspace.check_optimizer()
    length, short = workspace.update_length(), experiment.clustering.sketch_dim
    fits = short is None or short <= length
    require(fits, "--clustering.sketch_dim", f"at most the {length} entries of --clustering.layers", short)
    experiment.algorithm.check_run(experiment, workspace.start(num_domains=1)[1])
    if experiment.statistics == "estimated":
        module = workspace.module(*workspace.initial(num_domains=1))
        require(has_statistics(module), "--statistics", "saved without BatchNorm layers", "estimated")
    return workspace


def require_discovery(experiment: Experiment) -> None:
    """Refuse Phase 1 with an algorithm under which the server may not see a client's update."""
    allowed, name = experiment.algorithm.allows_discovery, type(experiment.algorithm).__name__
    require(allowed, "--algorithm", "another one, as discovery looks at every client's update,", name)


def initial_state(workspace: Workspace, domains: PseudoDomains | None) -> tuple[ServerState, Tensors]:
    """Return the server's state before round 1, and what clients never send, as it is then.

    The state is theta_0 with a head of M x C outputs, and empty records.
    """
    experiment, algorithm = workspace.experiment, workspace.experiment.algorithm
    in_head = domains if experiment.supervision.needs_discovery else None
    whole, others = workspace.initial(1 if in_head is None else in_head.num_domains)
    weights, buffers = workspace.sent(whole), workspace.sent(others)
    record = algorithm.init_server(weights)
    if not is_record(record):
        name = type(algorithm).__name__
        raise InputError(
            f"Expected {name}.init_server to return groups of named tensors but got {plain(repr(record))}."
        )
    if domains is not None:
        record |= algorithm.init_models(weights, buffers, domains.num_domains)
    learned = init_learned(experiment, whole, in_head)
    if in_head is not None:
        _check_targets(experiment, learned, in_head)
    state = ServerState(0, weights, buffers, record, learned, domains=domains)
    return state, {name: tensor for name, tensor in {**whole, **others}.items() if name in workspace.private}


def _check_targets(experiment: Experiment, learned: Record, domains: PseudoDomains) -> None:
    """Raise an `InputError` if the supervision gives no targets over M pseudo-domains; a client would fail in turn."""
    supervision, count = experiment.supervision, domains.num_domains
    try:
        info = RoundInfo(1, experiment.rounds, domains.centroids)
        sent = supervision.broadcast(learned.get(SUPERVISION, {}), info)
        require(is_record({SUPERVISION: sent}), "what clients are sent", "named tensors", sent)
        found = supervision.rule(sent, 0).num_domains
    except Exception as error:  # whatever a user's class raises
        what = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        name = type(supervision).__name__
        raise InputError(
            f"Expected {name} to give targets over {count} pseudo-domains but: {without_stop(what)}."
        ) from error
    require(found == count, f"the targets of {type(supervision).__name__}", f"over {count} pseudo-domains", found)
