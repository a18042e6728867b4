"""Terms added to the loss of a joint head: one file for each, with its server side and client side."""

from jdfl_lightning.regularizers.agreement import Agreement
from jdfl_lightning.regularizers.base import Regularizer, Step, Term

__all__ = ["Agreement", "Regularizer", "Step", "Term"]
