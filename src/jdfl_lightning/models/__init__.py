"""Networks: the paper's, torchvision's, timm's, your own; their heads, and the layers that Phase 1 uses."""

from jdfl_lightning.models.backbones import OWN_ARGUMENTS as OWN_ARGUMENTS
from jdfl_lightning.models.backbones import Preprocessing as Preprocessing
from jdfl_lightning.models.backbones import backbone_on_features as backbone_on_features
from jdfl_lightning.models.backbones import build_backbone as build_backbone
from jdfl_lightning.models.backbones import eval_mode as eval_mode
from jdfl_lightning.models.backbones import num_features as num_features
from jdfl_lightning.models.backbones import own_arguments as own_arguments
from jdfl_lightning.models.backbones import preprocessing_of as preprocessing_of
from jdfl_lightning.models.frozen import Backbone as Backbone
from jdfl_lightning.models.heads import find_head as find_head
from jdfl_lightning.models.heads import replace_head as replace_head
from jdfl_lightning.models.layers import LAYER_SUBSETS as LAYER_SUBSETS
from jdfl_lightning.models.layers import conv_blocks as conv_blocks
from jdfl_lightning.models.layers import matching as matching
from jdfl_lightning.models.layers import select_parameters as select_parameters
from jdfl_lightning.models.paper_cnn import PaperCNN as PaperCNN
