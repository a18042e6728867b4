"""What a sample's target is: one file for each supervision, with its server side and client side.

A supervision distributes the mass of a sample's class over the M pseudo-domains. It uses `joint/` and knows nothing of
networks, data, clients or algorithms.
"""

from jdfl_lightning.supervision.base import ClientSums as ClientSums
from jdfl_lightning.supervision.base import Learned as Learned
from jdfl_lightning.supervision.base import RoundInfo as RoundInfo
from jdfl_lightning.supervision.base import Supervision as Supervision
from jdfl_lightning.supervision.em import EM as EM
from jdfl_lightning.supervision.em import EMTargets as EMTargets
from jdfl_lightning.supervision.graded import Graded as Graded
from jdfl_lightning.supervision.hard import Hard as Hard
from jdfl_lightning.supervision.names import SUPERVISIONS as SUPERVISIONS
from jdfl_lightning.supervision.names import short_names as short_names
from jdfl_lightning.supervision.names import supervision_name as supervision_name
from jdfl_lightning.supervision.online import Online as Online
from jdfl_lightning.supervision.plain import Plain as Plain
from jdfl_lightning.supervision.random import Random as Random
from jdfl_lightning.supervision.uniform import Uniform as Uniform
