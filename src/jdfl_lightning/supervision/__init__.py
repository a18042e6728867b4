"""What a sample's target is: one file for each supervision, with its server side and client side.

A supervision distributes the mass of a sample's class over the M pseudo-domains. It uses `joint/` and knows nothing of
networks, data, clients or algorithms.
"""

from jdfl_lightning.supervision.base import ClientSums, Learned, RoundInfo, Supervision
from jdfl_lightning.supervision.em import EM, EMTargets
from jdfl_lightning.supervision.graded import Graded
from jdfl_lightning.supervision.hard import Hard
from jdfl_lightning.supervision.names import SUPERVISIONS, short_names, supervision_name
from jdfl_lightning.supervision.online import Online
from jdfl_lightning.supervision.plain import Plain
from jdfl_lightning.supervision.random import Random
from jdfl_lightning.supervision.uniform import Uniform

__all__ = [
    "EM",
    "SUPERVISIONS",
    "ClientSums",
    "EMTargets",
    "Graded",
    "Hard",
    "Learned",
    "Online",
    "Plain",
    "Random",
    "RoundInfo",
    "Supervision",
    "Uniform",
    "short_names",
    "supervision_name",
]
