"""Where clients are trained: tasks in, results out."""

from jdfl_lightning.backends.base import Backend, Runner
from jdfl_lightning.backends.local import LocalBackend

__all__ = ["Backend", "LocalBackend", "Runner"]
