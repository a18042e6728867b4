"""The joint head, its targets, loss and metrics; they need only torch and torchmetrics."""

from jdfl_lightning.joint.accuracy import DomainAccuracy as DomainAccuracy
from jdfl_lightning.joint.accuracy import JointAccuracy as JointAccuracy
from jdfl_lightning.joint.accuracy import joint_correct as joint_correct
from jdfl_lightning.joint.head import ClassScores as ClassScores
from jdfl_lightning.joint.head import JointHead as JointHead
from jdfl_lightning.joint.head import Score as Score
from jdfl_lightning.joint.head import class_probabilities as class_probabilities
from jdfl_lightning.joint.head import class_scores as class_scores
from jdfl_lightning.joint.head import joint_index as joint_index
from jdfl_lightning.joint.head import of_class as of_class
from jdfl_lightning.joint.head import predict_class as predict_class
from jdfl_lightning.joint.head import split_index as split_index
from jdfl_lightning.joint.loss import SoftTargetKLLoss as SoftTargetKLLoss
from jdfl_lightning.joint.loss import soft_target_kl as soft_target_kl
from jdfl_lightning.joint.targets import GradedTargets as GradedTargets
from jdfl_lightning.joint.targets import HardTargets as HardTargets
from jdfl_lightning.joint.targets import PlainTargets as PlainTargets
from jdfl_lightning.joint.targets import RandomTargets as RandomTargets
from jdfl_lightning.joint.targets import TargetRule as TargetRule
from jdfl_lightning.joint.targets import cosine_similarities as cosine_similarities
from jdfl_lightning.joint.targets import default_alpha as default_alpha
from jdfl_lightning.joint.targets import dense_targets as dense_targets
from jdfl_lightning.joint.targets import graded_table as graded_table
from jdfl_lightning.joint.targets import transfer_weights as transfer_weights
from jdfl_lightning.joint.targets import with_own as with_own
