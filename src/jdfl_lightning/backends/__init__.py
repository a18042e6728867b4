"""Where clients are trained: tasks in, results out."""

from jdfl_lightning.backends.base import Backend, Runner
from jdfl_lightning.backends.local import LocalBackend
from jdfl_lightning.backends.pool import PoolBackend
from jdfl_lightning.backends.ray import RayBackend
from jdfl_lightning.backends.vector import VectorBackend

__all__ = ["Backend", "LocalBackend", "PoolBackend", "RayBackend", "Runner", "VectorBackend"]
