"""All public names: the only list of them, for ``__init__.py``, type checkers and editors."""

from jdfl_lightning.algorithms import (
    MOON as MOON,
    SCAFFOLD as SCAFFOLD,
    Algorithm as Algorithm,
    ClusterAvg as ClusterAvg,
    Ditto as Ditto,
    FedAvg as FedAvg,
    FedDC as FedDC,
    FedDyn as FedDyn,
    FedProc as FedProc,
    FedProx as FedProx,
    FedRep as FedRep,
    LocalUpdate as LocalUpdate,
    PrivateFedAvg as PrivateFedAvg,
    RobustFedAvg as RobustFedAvg,
)
from jdfl_lightning.backends import (
    LocalBackend as LocalBackend,
    PoolBackend as PoolBackend,
    RayBackend as RayBackend,
    VectorBackend as VectorBackend,
)
from jdfl_lightning.callbacks import (
    EarlyStopping as EarlyStopping,
    RoundReport as RoundReport,
    RunCallback as RunCallback,
)
from jdfl_lightning.client.groups import (
    GroupDomains as GroupDomains,
    discover_domains as discover_domains,
)
from jdfl_lightning.client.module import JointModule as JointModule
from jdfl_lightning.client.trainer import TrainerOptions as TrainerOptions, quiet as quiet
from jdfl_lightning.clustering.criteria import Criterion as Criterion
from jdfl_lightning.config import (
    Clustering as Clustering,
    Experiment as Experiment,
    load_experiment as load_experiment,
)
from jdfl_lightning.core import tensors as tensors
from jdfl_lightning.core.errors import InputError as InputError
from jdfl_lightning.core.system import reuse_memory as reuse_memory
from jdfl_lightning.core.parts import Part as Part
from jdfl_lightning.data import (
    PACS as PACS,
    DigitsDomains as DigitsDomains,
    DomainDataModule as DomainDataModule,
    HubDomains as HubDomains,
    ImageFolderDomains as ImageFolderDomains,
    OfficeCaltech as OfficeCaltech,
    RealDigits as RealDigits,
    SiteFolders as SiteFolders,
)
from jdfl_lightning.data.transforms import to_input as to_input
from jdfl_lightning.joint import (
    ClassScores as ClassScores,
    DomainAccuracy as DomainAccuracy,
    GradedTargets as GradedTargets,
    HardTargets as HardTargets,
    JointAccuracy as JointAccuracy,
    JointHead as JointHead,
    PlainTargets as PlainTargets,
    RandomTargets as RandomTargets,
    SoftTargetKLLoss as SoftTargetKLLoss,
    TargetRule as TargetRule,
    class_probabilities as class_probabilities,
    class_scores as class_scores,
    predict_class as predict_class,
)
from jdfl_lightning.models import (
    PaperCNN as PaperCNN,
    build_backbone as build_backbone,
    num_features as num_features,
    replace_head as replace_head,
)
from jdfl_lightning.regularizers import (
    Agreement as Agreement,
    Balance as Balance,
    Prototype as Prototype,
    Regularizer as Regularizer,
    Step as Step,
    Term as Term,
)
from jdfl_lightning.report.discovery import Discovery as Discovery
from jdfl_lightning.report.statistics import (
    paired_difference as paired_difference,
    spread as spread,
)
from jdfl_lightning.report.write import Report as Report, write_report as write_report
from jdfl_lightning.studies.diagnose import (
    Diagnosis as Diagnosis,
    Sweep as Sweep,
    diagnose as diagnose,
)
from jdfl_lightning.studies.export import export as export
from jdfl_lightning.studies.inference import evaluate as evaluate, predict as predict
from jdfl_lightning.studies.model import TrainedModel as TrainedModel, from_pretrained as from_pretrained
from jdfl_lightning.studies.run import Run as Run, discover as discover, fit as fit
from jdfl_lightning.studies.suite import Suite as Suite, suite as suite
from jdfl_lightning.studies.validation import (
    Estimate as Estimate,
    Validation as Validation,
    validate as validate,
)
from jdfl_lightning.supervision import (
    EM as EM,
    ClientSums as ClientSums,
    EMTargets as EMTargets,
    Graded as Graded,
    Hard as Hard,
    Learned as Learned,
    Online as Online,
    Plain as Plain,
    Random as Random,
    Supervision as Supervision,
    Uniform as Uniform,
)
from jdfl_lightning.ui.display import Display as Display
from jdfl_lightning.ui.loggers import WandbRounds as WandbRounds

__all__: list[str]
