"""Callbacks of the server: they are told of every event of a run and may ask it to stop."""

from jdfl_lightning.callbacks.base import RoundReport, RunCallback
from jdfl_lightning.callbacks.early_stopping import EarlyStopping

__all__ = ["EarlyStopping", "RoundReport", "RunCallback"]
