"""Networks: the paper's, torchvision's, timm's, your own; their heads, and the layers that Phase 1 uses."""

from jdfl_lightning.models.backbones import (
    OWN_ARGUMENTS,
    Preprocessing,
    backbone_on_features,
    build_backbone,
    eval_mode,
    num_features,
    own_arguments,
    preprocessing_of,
)
from jdfl_lightning.models.frozen import Backbone
from jdfl_lightning.models.heads import find_head, replace_head
from jdfl_lightning.models.layers import LAYER_SUBSETS, conv_blocks, matching, select_parameters
from jdfl_lightning.models.paper_cnn import PaperCNN

__all__ = [
    "LAYER_SUBSETS",
    "OWN_ARGUMENTS",
    "Backbone",
    "PaperCNN",
    "Preprocessing",
    "backbone_on_features",
    "build_backbone",
    "conv_blocks",
    "eval_mode",
    "find_head",
    "matching",
    "num_features",
    "own_arguments",
    "preprocessing_of",
    "replace_head",
    "select_parameters",
]
