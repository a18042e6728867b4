"""Joint Domain-Class Federated Learning with PyTorch Lightning.

The names below are imported when they are first used, so that importing the joint head imports little more than torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdfl_lightning.algorithms import (
        MOON,
        SCAFFOLD,
        Algorithm,
        FedAvg,
        FedDC,
        FedDyn,
        FedProc,
        FedProx,
        LocalUpdate,
        PrivateFedAvg,
        RobustFedAvg,
    )
    from jdfl_lightning.backends import LocalBackend, PoolBackend, RayBackend
    from jdfl_lightning.client.groups import GroupDomains, discover_domains
    from jdfl_lightning.client.module import JointModule
    from jdfl_lightning.client.trainer import TrainerOptions
    from jdfl_lightning.config import Clustering, Experiment
    from jdfl_lightning.data import (
        PACS,
        DigitsDomains,
        DomainDataModule,
        ImageFolderDomains,
        OfficeCaltech,
        SiteFolders,
    )
    from jdfl_lightning.joint import (
        ClassScores,
        DomainAccuracy,
        GradedTargets,
        HardTargets,
        JointAccuracy,
        JointHead,
        PlainTargets,
        RandomTargets,
        SoftTargetKLLoss,
        TargetRule,
        class_probabilities,
        class_scores,
        predict_class,
    )
    from jdfl_lightning.models import PaperCNN, replace_head
    from jdfl_lightning.server.run import fit

_HOMES = {
    "algorithms": (
        "MOON",
        "SCAFFOLD",
        "Algorithm",
        "FedAvg",
        "FedDC",
        "FedDyn",
        "FedProc",
        "FedProx",
        "LocalUpdate",
        "PrivateFedAvg",
        "RobustFedAvg",
    ),
    "backends": ("LocalBackend", "PoolBackend", "RayBackend"),
    "config": ("Clustering", "Experiment"),
    "data": ("PACS", "DigitsDomains", "DomainDataModule", "ImageFolderDomains", "OfficeCaltech", "SiteFolders"),
    "server.run": ("fit",),
    "client.groups": ("GroupDomains", "discover_domains"),
    "joint": (
        "ClassScores",
        "DomainAccuracy",
        "GradedTargets",
        "HardTargets",
        "JointAccuracy",
        "JointHead",
        "PlainTargets",
        "RandomTargets",
        "SoftTargetKLLoss",
        "TargetRule",
        "class_probabilities",
        "class_scores",
        "predict_class",
    ),
    "models": ("PaperCNN", "replace_head"),
    "client.module": ("JointModule",),
    "client.trainer": ("TrainerOptions",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "MOON",
    "PACS",
    "SCAFFOLD",
    "Algorithm",
    "ClassScores",
    "Clustering",
    "DigitsDomains",
    "DomainAccuracy",
    "DomainDataModule",
    "Experiment",
    "FedAvg",
    "FedDC",
    "FedDyn",
    "FedProc",
    "FedProx",
    "GradedTargets",
    "GroupDomains",
    "HardTargets",
    "ImageFolderDomains",
    "JointAccuracy",
    "JointHead",
    "JointModule",
    "LocalBackend",
    "LocalUpdate",
    "OfficeCaltech",
    "PaperCNN",
    "PlainTargets",
    "PoolBackend",
    "PrivateFedAvg",
    "RandomTargets",
    "RayBackend",
    "RobustFedAvg",
    "SiteFolders",
    "SoftTargetKLLoss",
    "TargetRule",
    "TrainerOptions",
    "class_probabilities",
    "class_scores",
    "discover_domains",
    "fit",
    "predict_class",
    "replace_head",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
