"""The settings of a run: a typed, frozen dataclass, each setting with its role."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from lightning.pytorch.loggers import Logger
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from jdfl_lightning.algorithms import Algorithm, FedAvg
from jdfl_lightning.backends import Backend, PoolBackend
from jdfl_lightning.callbacks import RunCallback
from jdfl_lightning.client.trainer import TrainerOptions
from jdfl_lightning.config.groups import PARTS, Checkpointing, Clustering
from jdfl_lightning.core.errors import require, require_choice, require_type, require_types
from jdfl_lightning.core.messages import SUPERVISION
from jdfl_lightning.core.parts import Part, parameters
from jdfl_lightning.core.settings import declared_settings, setting
from jdfl_lightning.data import DigitsDomains, DomainDataModule
from jdfl_lightning.data.base import PLACES
from jdfl_lightning.data.transforms import normalize_of
from jdfl_lightning.joint import Score
from jdfl_lightning.joint.head import Init
from jdfl_lightning.models import preprocessing_of
from jdfl_lightning.regularizers import Regularizer
from jdfl_lightning.storage.names import FigureFormat, Selection
from jdfl_lightning.supervision import Learned, Random, Supervision, short_names
from jdfl_lightning.ui.loggers import CSVLogger, TensorBoardLogger, WandbRounds

_SGD_RATE = 0.05
"""Learning rate of SGD if none is given."""


@dataclass(frozen=True)
class Experiment:
    """A federated run."""

    seed_everything: int = setting(0, phase_1=True)
    """Seed of everything random: initialisation, split, sampling, shuffling, random targets."""
    data: DomainDataModule = setting(factory=DigitsDomains, phase_1=True)
    """The images: DigitsDomains, RealDigits, PACS, OfficeCaltech, HubDomains, ImageFolderDomains, SiteFolders, or your
    own subclass of DomainDataModule. Each has options of its own, such as --data.root: --data.help NAME lists them."""
    model: Part | None = setting(None, phase_1=True, in_paper=False)
    """A subclass of JointModule by its import path, with its own arguments; null for JointModule."""
    backbone: str = setting("PaperCNN", phase_1=True)
    """The network below the head: PaperCNN, a torchvision classifier by name, timm/ and the name of a network of timm,
    or the import path of your own."""
    backbone_args: dict[str, Any] = setting(factory=dict, phase_1=True, in_paper=False)
    """Further arguments of the backbone, by name: weights (DEFAULT or another name of torchvision's, true for timm's,
    or a file), freeze (true, or a list of patterns of parameters), hidden (width of a trainable layer on the features),
    cache (false to run a frozen network for every batch); all others are the network's."""
    algorithm: Algorithm = setting(factory=FedAvg)
    """The federated optimizer: FedAvg, FedProx, SCAFFOLD, FedDyn, FedDC, FedProc, MOON, RobustFedAvg,
    PrivateFedAvg, Ditto, FedRep, ClusterAvg, or your own Algorithm."""
    supervision: Supervision = setting(factory=Random)
    """base: the optimizer alone, C outputs. hard, graded, random, uniform, em, online, or your own Supervision: joint
    head of M x C outputs with such targets."""
    regularizers: list[Regularizer] = setting(factory=list, in_paper=False)
    """Terms that are added to the loss: a list of Agreement, Balance, Prototype, or your own Regularizer."""
    num_domains: int | None = setting(None)
    """M, the number of pseudo-domains; null to choose it by clustering.criterion."""
    head_init: Init = setting("fresh", in_paper=False)
    """Weights of the joint head at the start: fresh, newly drawn (the paper), or tile, M copies of a plain head."""
    head_lr: float = setting(1.0, in_paper=False)
    """Learning rate of the head, as a multiple of the other layers'."""
    score: Literal["max", "sum", "own"] = setting("max", in_paper=False)
    """How a class is predicted in evaluations: max, by the largest of its M outputs (the paper), or sum, by its joint
    probabilities summed over the pseudo-domains. own: a client's own model predicts by the outputs of the client's
    pseudo-domain alone, and the global model by max. Training does not depend on it."""
    private: list[str] | str = setting(factory=list, phase_1=True, in_paper=False)
    """Patterns of the parameters and buffers that a client keeps and never sends, a list or separated by commas:
    head.* (FedPer), backbone.* (LG-FedAvg), *bn* where BatchNorm layers are named so (FedBN)."""
    finetune_epochs: int = setting(0, in_paper=False)
    """Local epochs after the last round, from its model, whose result is evaluated at each client and then dropped: a
    baseline for personal models. 0 for none."""
    statistics: Literal["saved", "estimated"] = setting("saved", in_paper=False)
    """BatchNorm's statistics in evaluations of the global model: saved, the model's own, or estimated anew from the
    images of each domain that it is evaluated on, without labels; for models whose statistics are private."""
    rounds: int = setting(25, role="length")
    """T, communication rounds."""
    client_fraction: float = setting(0.5)
    """Share of the clients that take part in a round, in (0, 1]."""
    epochs: int = setting(5)
    """E, local epochs of a participant."""
    batch_size: int = setting(32)
    """Images in a local batch."""
    lr: float | None = setting(None, phase_1=True)
    """Learning rate of the local optimizer; null for 0.05 with SGD, and for the optimizer's own default with others."""
    momentum: float = setting(0.0, phase_1=True)
    """Momentum of local SGD; every fit starts with a fresh optimizer."""
    weight_decay: float = setting(0.0, phase_1=True)
    """Weight decay of local SGD."""
    optimizer: Part | None = setting(None, phase_1=True, in_paper=False)
    """Another local optimizer: a class of torch.optim, or your own, with its arguments; null for SGD with lr, momentum
    and weight_decay."""
    lr_scheduler: Part | None = setting(None, phase_1=True, in_paper=False)
    """Scheduler of the learning rate within a fit, which steps after every epoch: a class of
    torch.optim.lr_scheduler, or your own; null for a constant rate."""
    round_scheduler: Part | None = setting(None, in_paper=False)
    """Scheduler of the learning rate over the rounds, which begins with lr and steps after every round, such as
    ExponentialLR with gamma 0.998; null for the same rate in all rounds."""
    select: Selection | None = setting(None, in_paper=False)
    """How the best round is picked. val: by the validation images. test: by the test images, as in the paper. last: not
    at all, the last round counts. null for val if data.val_fraction is above 0, else for test; with private tensors or
    ClusterAvg, whose global model no client uses, for last."""
    evaluate_every: int = setting(1, role="length", in_paper=False)
    """Rounds from one evaluation to the next; the last round is always evaluated."""
    max_update_norm: float | None = setting(None, in_paper=False)
    """Refuse an update whose norm is more than this many times the median of its round; null to refuse none."""
    min_clients: int = setting(1, in_paper=False)
    """Client answers that a round needs; with fewer it is repeated with newly sampled clients."""
    checkpoint: Checkpointing = setting(group=Checkpointing)
    """What is saved so that a run can be resumed."""
    clustering: Clustering = setting(group=Clustering)
    """Phase 1: how pseudo-domains are discovered."""
    discovery: str | None = setting(None, role="place")
    """Folder of a run, or of `discover`, whose discovery is reused instead of repeated; M may differ."""
    backend: Backend = setting(factory=PoolBackend, role="place")
    """Where clients are trained: PoolBackend (in parallel, where that pays), LocalBackend (one after the other),
    VectorBackend (small networks, together) or RayBackend (on a cluster)."""
    trainer: TrainerOptions = setting(group=TrainerOptions)
    """Options of the Lightning Trainer that every fit uses."""
    callbacks: list[RunCallback] = setting(factory=list, role="length", in_paper=False)
    """Callbacks of the server, which are told of every round and may stop the run: EarlyStopping, or your own
    RunCallback."""
    logger: WandbRounds | CSVLogger | TensorBoardLogger | Logger | bool = setting(False, role="output")
    """false, true for Weights & Biases (WandbRounds), CSVLogger or TensorBoardLogger (into the run's folder), or any
    Lightning logger; metrics.csv is written in any case."""
    figures: bool = setting(True, role="output")
    """Draw the pictures of the run folder; false saves some seconds, which count in a suite of many short runs."""
    figure_formats: list[FigureFormat] = setting(factory=list, role="output", in_paper=False)
    """Formats in which every picture is saved besides PNG, for papers: a list of pdf, svg."""
    run_dir: str | None = setting(None, role="output")
    """Folder of the run, new or empty; null for a new one in runs/."""
    resume: str | None = setting(None, role="place")
    """Resume a run: its folder, or a file in its checkpoints/; auto for the newest run of these settings, if any."""

    def __post_init__(self) -> None:
        if isinstance(self.supervision, str):  # a short name, in Python as on the command line
            require_choice("--supervision", self.supervision, list(short_names()))
            object.__setattr__(self, "supervision", short_names()[self.supervision]())
        if isinstance(self.private, str):
            patterns = [pattern.strip() for pattern in self.private.split(",")]
            object.__setattr__(self, "private", [pattern for pattern in patterns if pattern])
        if self.optimizer is None and self.lr is None:
            object.__setattr__(self, "lr", _SGD_RATE)
        require_type("--trainer", self.trainer, TrainerOptions)
        if self.trainer.fast_dev_run:
            for name in ("rounds", "epochs"):
                object.__setattr__(self, name, 1)
        require_types(self)
        if self.data.left_open and (look := preprocessing_of(self.backbone, self.backbone_args)) is not None:
            object.__setattr__(self, "data", self.data.prepared_for(look.size, normalize_of(look.mean, look.std)))
        for name in ("rounds", "epochs", "batch_size", "lr", "head_lr", "evaluate_every"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, f"--{name}", "positive and finite", value)
        require(0 < self.client_fraction <= 1, "--client_fraction", "above 0 and at most 1", self.client_fraction)
        most, domains, norm = self.clients_per_round, self.num_domains, self.max_update_norm
        limits = {
            "seed_everything": (self.seed_everything >= 0, "0 or more"),
            "momentum": (0 <= self.momentum < 1, "at least 0 and below 1"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "0 or more, and finite"),
            "max_update_norm": (norm is None or norm >= 1, "1 or more"),
            "min_clients": (1 <= self.min_clients <= most, f"between 1 and the {most} clients of a round"),
            "finetune_epochs": (self.finetune_epochs >= 0, "0 or more"),
        }
        for name, (holds, wanted) in limits.items():
            require(holds, f"--{name}", wanted, getattr(self, name))
        self._check_parts()
        self._check_select()
        self.algorithm.check_settings(self)
        self.supervision.check_settings(self)
        for callback in self.callbacks:
            kind = type(callback)
            lost = [name for name in parameters(kind) if not (hasattr(callback, name) or hasattr(callback, f"_{name}"))]
            kept = f"kept as an attribute of {kind.__name__}, from which a resumed run makes it again,"
            require(not lost, f"the argument {', '.join(lost)}", kept, "nothing of that name")
            callback.check_settings(self)
        wanted = f"between 1 and the number of clients in Phase 1, {self.discovery_clients},"
        require(domains is None or 1 <= domains <= self.discovery_clients, "--num_domains", wanted, domains)

    def _check_parts(self) -> None:
        """Check that the classes named exist, are of the right kind and take the arguments given."""
        for name, (parent, supplied) in PARTS.items():
            part: Part | None = getattr(self, name)
            if part is not None:
                part.check(f"--{name}", parent, supplied)
                plain = not issubclass(part.load(), ReduceLROnPlateau)
                require(plain, f"--{name}", "a schedule without a metric to watch", part.name)
        if self.optimizer is not None:
            one = self.optimizer.load() is not LBFGS
            require(one, "--optimizer", "one that takes a step with one gradient", self.optimizer.name)
            for name in ("momentum", "weight_decay"):
                fits = getattr(self, name) == 0 or self.optimizer.accepts(name)
                require(fits, f"--{name}", f"0 with {self.optimizer.name}, which has none,", getattr(self, name))
            for name in ("lr", "momentum", "weight_decay"):
                twice = bool(getattr(self, name)) and name in self.optimizer.init_args
                require(not twice, f"--{name}", f"left out, as --optimizer.{name} is given,", getattr(self, name))

    def _check_select(self) -> None:
        """Check that the images that pick the best round exist and may do so."""
        if not self.algorithm.keeps_best:
            why = f"with {type(self.algorithm).__name__}, whose guarantee does not cover a choice by accuracy,"
            refused, wanted = ["val", "test"], f"last or null {why}"
        elif self.data.val_fraction:
            refused, wanted = ["test"], "val or last with --data.val_fraction, so that test images decide nothing,"
        else:
            refused, wanted = ["val"], "test or last without --data.val_fraction, as there are no validation images,"
        require(self.select not in refused, "--select", wanted, self.select)

    @property
    def selection(self) -> Selection:
        """How the best round is picked; last if there is none, or if the global model is not what clients use."""
        if not self.algorithm.keeps_best:
            return "last"
        usual: Selection = "val" if self.data.val_fraction else "test"
        return self.select or ("last" if self.private or self.algorithm.by_domain else usual)

    @property
    def global_score(self) -> Score:
        """How the global model predicts a class."""
        return "max" if self.score == "own" else self.score

    @property
    def needs_discovery(self) -> bool:
        """Whether there is a Phase 1: for the supervision, or for an algorithm with a model for each pseudo-domain."""
        return self.supervision.needs_discovery or self.algorithm.by_domain

    @property
    def needs_own_domain(self) -> bool:
        """Whether a client needs to know its own pseudo-domain."""
        own = self.score == "own" and self.supervision.needs_discovery
        return self.supervision.needs_own_domain or self.algorithm.by_domain or own

    @property
    def has_personal(self) -> bool:
        """Whether clients' own models are evaluated at the end of a run; never if the run is differentially private."""
        own = bool(self.private) or self.algorithm.has_second_model or self.algorithm.by_domain
        return self.algorithm.keeps_best and (own or self.finetune_epochs > 0 or self.score == "own")

    @property
    def local_optimizer(self) -> Part:
        """The optimizer of a fit: SGD, or the one given, with lr, momentum and weight_decay where they are set."""
        if self.optimizer is None:
            return Part(SGD, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        short = {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}
        given = {name: value for name, value in short.items() if value}
        return Part(self.optimizer.class_path, **(self.optimizer.init_args | given))

    @property
    def regularizers_by_name(self) -> dict[str, Regularizer]:
        """The regularizers, by the names of their groups in messages."""
        return {f"regularizer{number}": one for number, one in enumerate(self.regularizers)}

    @property
    def learned(self) -> dict[str, Learned]:
        """The supervision and the regularizers, by the names of their groups in messages."""
        return {SUPERVISION: self.supervision, **self.regularizers_by_name}

    @property
    def clients_per_round(self) -> int:
        """Participants of a round: client_fraction of all clients, rounded half up, at least one."""
        return max(1, int(self.client_fraction * self.data.num_clients + 0.5))

    @property
    def discovery_clients(self) -> int:
        """Clients in Phase 1: clustering.fraction of all clients, rounded half up, at least one."""
        return max(1, int(self.clustering.fraction * self.data.num_clients + 0.5))

    @property
    def name(self) -> str:
        """A readable name: data set, algorithm, supervision and seed."""
        data, algorithm = type(self.data).__name__, type(self.algorithm).__name__
        return f"{data}-{algorithm}-{self.supervision.name}-seed{self.seed_everything}".lower()


def free_settings() -> tuple[str, ...]:
    """Return the dotted names of the settings that may change when a run is resumed: they change no round's numbers."""
    free = [setting.name for setting in declared_settings(Experiment) if setting.role != "result"]
    return (*free, *(f"data.init_args.{name}" for name in PLACES))
