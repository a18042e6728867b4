"""Networks: the paper's, torchvision's, your own; their heads, and the layers that Phase 1 uses."""

from jdfl_lightning.models.backbones import build_backbone, eval_mode, num_features
from jdfl_lightning.models.heads import find_head, replace_head
from jdfl_lightning.models.layers import LAYER_SUBSETS, conv_blocks, select_parameters
from jdfl_lightning.models.paper_cnn import PaperCNN

__all__ = [
    "LAYER_SUBSETS",
    "PaperCNN",
    "build_backbone",
    "conv_blocks",
    "eval_mode",
    "find_head",
    "num_features",
    "replace_head",
    "select_parameters",
]
