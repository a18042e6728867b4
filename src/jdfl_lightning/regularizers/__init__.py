"""Terms added to the loss of a joint head: one file for each, with its server side and client side."""

from jdfl_lightning.regularizers.agreement import Agreement
from jdfl_lightning.regularizers.balance import Balance
from jdfl_lightning.regularizers.base import Regularizer, Step, Term
from jdfl_lightning.regularizers.prototype import Prototype

__all__ = ["Agreement", "Balance", "Prototype", "Regularizer", "Step", "Term"]
