"""Federated optimizers, one file each."""

from jdfl_lightning.algorithms.base import Algorithm, LocalUpdate
from jdfl_lightning.algorithms.clusteravg import ClusterAvg
from jdfl_lightning.algorithms.ditto import Ditto
from jdfl_lightning.algorithms.fedavg import FedAvg
from jdfl_lightning.algorithms.feddc import FedDC
from jdfl_lightning.algorithms.feddyn import FedDyn
from jdfl_lightning.algorithms.fedproc import FedProc
from jdfl_lightning.algorithms.fedprox import FedProx
from jdfl_lightning.algorithms.fedrep import FedRep
from jdfl_lightning.algorithms.moon import MOON
from jdfl_lightning.algorithms.private import PrivateFedAvg
from jdfl_lightning.algorithms.robust import RobustFedAvg
from jdfl_lightning.algorithms.scaffold import SCAFFOLD

__all__ = [
    "MOON",
    "SCAFFOLD",
    "Algorithm",
    "ClusterAvg",
    "Ditto",
    "FedAvg",
    "FedDC",
    "FedDyn",
    "FedProc",
    "FedProx",
    "FedRep",
    "LocalUpdate",
    "PrivateFedAvg",
    "RobustFedAvg",
]
