"""Check a run's settings and data before its folder is made."""

from __future__ import annotations

from torch import nn

from jdfl_lightning.client.features import open_workspace, why_no_features
from jdfl_lightning.client.fit import Workspace, initial_backbone
from jdfl_lightning.client.trainer import check_trainer
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import notify, require
from jdfl_lightning.models import num_features
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
    backbone = initial_backbone(experiment) if backbone is None else backbone
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
    experiment.algorithm.check_run(experiment, workspace.initial(num_domains=1)[1])
    return workspace


def require_discovery(experiment: Experiment) -> None:
    """Refuse Phase 1 with an algorithm under which the server may not see a client's update."""
    allowed, name = experiment.algorithm.allows_discovery, type(experiment.algorithm).__name__
    require(allowed, "--algorithm", "another one, as discovery looks at every client's update,", name)
