"""The joint head, its targets, loss and metrics; they need only torch and torchmetrics."""

from jdfl_lightning.joint.accuracy import DomainAccuracy, JointAccuracy, joint_correct
from jdfl_lightning.joint.head import (
    ClassScores,
    JointHead,
    Score,
    class_probabilities,
    class_scores,
    joint_index,
    of_class,
    predict_class,
    split_index,
)
from jdfl_lightning.joint.loss import SoftTargetKLLoss, soft_target_kl
from jdfl_lightning.joint.targets import (
    GradedTargets,
    HardTargets,
    PlainTargets,
    RandomTargets,
    TargetRule,
    cosine_similarities,
    default_alpha,
    dense_targets,
    graded_table,
    transfer_weights,
    with_own,
)

__all__ = [
    "ClassScores",
    "DomainAccuracy",
    "GradedTargets",
    "HardTargets",
    "JointAccuracy",
    "JointHead",
    "PlainTargets",
    "RandomTargets",
    "Score",
    "SoftTargetKLLoss",
    "TargetRule",
    "class_probabilities",
    "class_scores",
    "cosine_similarities",
    "default_alpha",
    "dense_targets",
    "graded_table",
    "joint_correct",
    "joint_index",
    "of_class",
    "predict_class",
    "soft_target_kl",
    "split_index",
    "transfer_weights",
    "with_own",
]
