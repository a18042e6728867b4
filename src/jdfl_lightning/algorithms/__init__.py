"""Federated optimizers, one file each."""

from jdfl_lightning.algorithms.base import Algorithm, LocalUpdate
from jdfl_lightning.algorithms.fedavg import FedAvg

__all__ = ["Algorithm", "FedAvg", "LocalUpdate"]
