"""A frozen network runs over all images once, and clients train on its features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from jdfl_lightning.client.fit import Workspace, initial_backbone
from jdfl_lightning.client.module import JointModule
from jdfl_lightning.data.features import digest_network, features_of
from jdfl_lightning.models import OWN_ARGUMENTS, Backbone, own_arguments
from jdfl_lightning.models.backbones import is_file
from jdfl_lightning.models.networks import is_import_path

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment

NETWORK_PREFIX = "backbone.network."
"""Prefix of the names of a frozen network's tensors in a saved model."""


def why_no_features(experiment: Experiment) -> str | None:
    """Return why clients train on images and not on features; empty if that is what the settings ask for; else None.

    It depends on the settings alone, so that a server and its sites agree.
    """
    own = own_arguments(experiment.backbone, experiment.backbone_args)
    if own.get("freeze") is not True or own.get("cache") is False:
        return ""
    if experiment.data.augment:
        return "images are augmented (--data.augment)"
    if experiment.clustering.labels == "rotations":
        return "Phase 1 turns images (--clustering.labels)"
    kind: Any = JointModule if experiment.model is None else experiment.model.load()
    changed = [
        name for name in ("augment", "training_step", "forward") if getattr(kind, name) != getattr(JointModule, name)
    ]
    return f"{kind.__name__} has its own {changed[0]}" if changed else None


_built: dict[str, Backbone] = {}
"""The last frozen network that was built, by what decides it."""


def frozen_backbone(experiment: Experiment) -> nn.Module:
    """Return `initial_backbone`; of a network that is frozen as a whole, that of the last run with the same one.

    Nothing changes it, as a run trains a copy of its hidden layer. Many small runs would spend more time on building it
    than on a round.
    """
    name, arguments = experiment.backbone, experiment.backbone_args
    own = own_arguments(name, arguments)
    if why_no_features(experiment) is not None or is_import_path(name):
        return initial_backbone(experiment)
    file = Path(str(own["weights"])).expanduser() if is_file(own.get("weights")) else None
    found = file.stat() if file is not None and file.exists() else None
    seen = None if found is None else (found.st_size, found.st_mtime_ns, found.st_ino)
    key = repr((name, arguments, experiment.data.size, experiment.seed_everything, seen))
    if key not in _built:
        backbone = initial_backbone(experiment)
        assert isinstance(backbone, Backbone)
        _built.clear()
        _built[key] = backbone
    return _built[key]


def open_workspace(experiment: Experiment, first: int = 0, backbone: nn.Module | None = None) -> Workspace:
    """Return a workspace; where clients can train on features, these are computed, or read from the cache.

    Its `experiment` has the features among its data and is the one to give to a backend.

    Args:
        experiment: the run's settings; its data is loaded and partitioned.
        first: id of the first client whose images this process has.
        backbone: the network of `initial_backbone`, if it is already built.
    """
    if why_no_features(experiment) is not None:
        return Workspace(experiment, first, backbone)
    backbone = initial_backbone(experiment) if backbone is None else backbone
    assert isinstance(backbone, Backbone)
    data, network = experiment.data, backbone.network
    features = None
    if data.roster is None:
        others = {key: value for key, value in experiment.backbone_args.items() if key not in OWN_ARGUMENTS}
        own = is_import_path(experiment.backbone)
        about = None if own else {"name": experiment.backbone, "arguments": others}
        features = features_of(network, data.images, data.normalize, about, data.pixels, data.progress)
    tensors = {f"{NETWORK_PREFIX}{name}": tensor for name, tensor in network.state_dict().items()}
    data = data.with_features(features, digest_network(network, NETWORK_PREFIX))
    return Workspace(replace(experiment, data=data), first, backbone.without_network(), tensors)
