"""Check a run's settings and data before its folder is made; the server's state before round 1."""

from __future__ import annotations

from torch import nn

from jdfl_lightning.client.evaluation import has_statistics
from jdfl_lightning.client.features import frozen_backbone, open_workspace, why_no_features
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.client.trainer import check_trainer
from jdfl_lightning.clustering.clusters import PseudoDomains
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import notify, require
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.models import num_features
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.server.tasks import init_learned
from jdfl_lightning.ui.display import Display


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


def initial_state(workspace: Workspace, domains: PseudoDomains | None) -> ServerState:
    """Return the server's state before round 1: theta_0 with a head of M x C outputs, and empty records."""
    experiment, algorithm = workspace.experiment, workspace.experiment.algorithm
    in_head = domains if experiment.supervision.needs_discovery else None
    num_domains = 1 if in_head is None else in_head.num_domains
    weights, buffers = workspace.start(num_domains)
    record = algorithm.init_server(weights)
    if domains is not None:
        record |= algorithm.init_models(weights, buffers, domains.num_domains)
    learned = init_learned(experiment, workspace.initial(num_domains)[0], in_head)
    return ServerState(0, weights, buffers, record, learned, domains=domains)


def initial_private(workspace: Workspace, domains: PseudoDomains | None) -> Tensors:
    """Return what clients never send, as it is before round 1."""
    in_head = domains if workspace.experiment.supervision.needs_discovery else None
    weights, buffers = workspace.initial(1 if in_head is None else in_head.num_domains)
    return {name: tensor for name, tensor in {**weights, **buffers}.items() if name in workspace.private}
