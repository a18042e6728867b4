"""The settings of a run: a typed, frozen dataclass that is read from YAML and the command line and written back."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings
from lightning.pytorch.loggers import Logger

from jdfl_lightning.algorithms import Algorithm, FedAvg
from jdfl_lightning.backends import Backend, PoolBackend
from jdfl_lightning.client.trainer import TrainerOptions
from jdfl_lightning.clustering.clusters import Criterion
from jdfl_lightning.clustering.sketch import BLOCKS
from jdfl_lightning.core.errors import InputError, did_you_mean, require, require_types
from jdfl_lightning.core.files import parse_settings, read_settings, write_whole
from jdfl_lightning.data import DigitsDomains, DomainDataModule
from jdfl_lightning.joint import Score
from jdfl_lightning.models import LAYER_SUBSETS
from jdfl_lightning.storage.trust import CONFIG, settings_to_use, sign
from jdfl_lightning.ui.loggers import WandbRounds

Supervision = Literal["base", "hard", "graded", "random"]


@dataclass(frozen=True)
class Clustering:
    """Phase 1: how pseudo-domains are discovered."""

    epochs: int = 3
    """E_0, local epochs from theta_0 whose update is looked at."""
    batch_size: int | None = None
    """Images in a batch of Phase 1; null for that of the training."""
    layers: str | list[str] = "B"
    """Parameters to look at: A (head), B (last conv block and head), C (last two conv blocks and head), or patterns."""
    criterion: Criterion = "elbow"
    """How M is chosen if num_domains is not given: elbow or silhouette. With fewer than 4 clients, or where no elbow is
    visible, the silhouette decides."""
    max_domains: int = 10
    """The largest M to try."""
    fraction: float = 1.0
    """Share of the clients that take part in Phase 1, in (0, 1]; others get a pseudo-domain when they first train."""
    sketch_dim: int | None = None
    """Length of the random sketch that a client sends instead of its update vector (1024, say); null for the vector."""
    newcomers: Literal["nearest", "update"] = "nearest"
    """How a client that was not in Phase 1 gets its pseudo-domain: by the nearest centroid; update: which it moves."""

    def __post_init__(self) -> None:
        require_types(self, "--clustering.")
        require(self.epochs > 0, "--clustering.epochs", "positive", self.epochs)
        require(self.batch_size is None or self.batch_size > 0, "--clustering.batch_size", "positive", self.batch_size)
        require(self.max_domains > 0, "--clustering.max_domains", "positive", self.max_domains)
        require(0 < self.fraction <= 1, "--clustering.fraction", "above 0 and at most 1", self.fraction)
        require(
            self.sketch_dim is None or (self.sketch_dim > 0 and self.sketch_dim % BLOCKS == 0),
            "--clustering.sketch_dim",
            f"a positive multiple of {BLOCKS}",
            self.sketch_dim,
        )
        named = isinstance(self.layers, list) or self.layers in LAYER_SUBSETS
        require(named, "--clustering.layers", "A, B, C or a list of patterns", self.layers)


@dataclass(frozen=True)
class Checkpointing:
    """What is kept so that a run can be continued."""

    every: int = 1
    """Rounds from one checkpoint to the next; the last round always has one."""
    keep: int = 2
    """Checkpoints to keep: the newest, and those before it in case that it is damaged."""
    reset_damaged_clients: bool = False
    """Let a client whose saved state is damaged start afresh, instead of ending the run."""

    def __post_init__(self) -> None:
        require_types(self, "--checkpoint.")
        require(self.every > 0, "--checkpoint.every", "positive", self.every)
        require(self.keep > 0, "--checkpoint.keep", "positive", self.keep)


@dataclass(frozen=True)
class Experiment:
    """A federated run."""

    seed_everything: int = 0
    """Seed of everything random: initialisation, split, sampling, shuffling, random targets."""
    data: DomainDataModule = field(default_factory=lambda: DigitsDomains(size=16))
    """The images: DigitsDomains, PACS, OfficeCaltech, ImageFolderDomains, SiteFolders, or your own subclass of
    DomainDataModule."""
    backbone: str = "PaperCNN"
    """The network below the head: PaperCNN, a torchvision classifier by name, or the import path of your own."""
    algorithm: Algorithm = field(default_factory=FedAvg)
    """The federated optimizer: FedAvg, FedProx, SCAFFOLD, FedDyn, FedDC, FedProc, MOON, or your own Algorithm."""
    presets: dict[str, dict[str, float | str]] = field(default_factory=dict)
    """Hyper-parameters that an algorithm takes when --algorithm names it after this config: {name: {option: value}}."""
    supervision: Supervision = "random"
    """base: the optimizer alone, C outputs. hard, graded, random: joint head of M x C outputs with such targets."""
    num_domains: int | None = None
    """M, the number of pseudo-domains; null to choose it by clustering.criterion."""
    alpha: float | None = None
    """Mass of graded targets on the own pseudo-domain, in (0, 1]; null for 0.55 if M <= 5 and 0.45 if more."""
    tau: float = 0.1
    """Temperature of graded targets over the similarities of pseudo-domains, above 0."""
    phi: float = 1.0
    """Mass of random targets on the drawn pseudo-domain, in [0, 1]."""
    score: Score = "max"
    """How a class is predicted in evaluations: max, by the largest of its M outputs (the paper), or sum, by its joint
    probabilities summed over the pseudo-domains. Training does not depend on it."""
    rounds: int = 25
    """T, communication rounds."""
    client_fraction: float = 0.5
    """Share of the clients that take part in a round, in (0, 1]."""
    epochs: int = 5
    """E, local epochs of a participant."""
    batch_size: int = 32
    """Images in a local batch."""
    lr: float = 0.05
    """Learning rate of local SGD."""
    momentum: float = 0.0
    """Momentum of local SGD; every fit starts with a fresh optimizer."""
    weight_decay: float = 0.0
    """Weight decay of local SGD."""
    evaluate_every: int = 1
    """Rounds from one evaluation to the next; the last round is always evaluated."""
    max_update_norm: float | None = None
    """Refuse an update that is longer than this many times the median of its round; null to refuse none."""
    min_clients: int = 1
    """Clients whose answers a round needs; with fewer it is void and repeated, with clients drawn anew."""
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    """What is kept so that a run can be continued."""
    clustering: Clustering = field(default_factory=Clustering)
    """Phase 1: how pseudo-domains are discovered."""
    discovery: str | None = None
    """Folder of a run, or of `discover`, whose Phase 1 is taken up instead of repeated; M may be another one."""
    backend: Backend = field(default_factory=PoolBackend)
    """Where clients are trained: PoolBackend (in parallel, where that pays), LocalBackend (one after the other) or
    RayBackend (on a cluster)."""
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    """Options of the Lightning Trainer that every fit uses."""
    logger: WandbRounds | Logger | bool = False
    """false, true for Weights & Biases (WandbRounds), or any Lightning logger; metrics.csv is written in any case."""
    run_dir: str | None = None
    """Folder of the run, new or empty; null for a new one in runs/."""
    resume: str | None = None
    """Continue a run: its folder, or a file in its checkpoints/; auto for the newest run of these settings, if any."""

    def __post_init__(self) -> None:
        require_types(self)
        require(self.seed_everything >= 0, "--seed_everything", "0 or more", self.seed_everything)
        for name in ("rounds", "epochs", "batch_size", "lr", "evaluate_every"):
            require(0 < getattr(self, name) < math.inf, f"--{name}", "positive and finite", getattr(self, name))
        require(0 < self.client_fraction <= 1, "--client_fraction", "above 0 and at most 1", self.client_fraction)
        require(0 <= self.momentum < 1, "--momentum", "at least 0 and below 1", self.momentum)
        require(0 <= self.weight_decay < math.inf, "--weight_decay", "0 or more, and finite", self.weight_decay)
        require(self.alpha is None or 0 < self.alpha <= 1, "--alpha", "above 0 and at most 1", self.alpha)
        require(self.tau > 0, "--tau", "positive", self.tau)
        require(0 <= self.phi <= 1, "--phi", "between 0 and 1", self.phi)
        require(
            self.max_update_norm is None or self.max_update_norm >= 1,
            "--max_update_norm",
            "1 or more",
            self.max_update_norm,
        )
        require(
            1 <= self.min_clients <= self.clients_per_round,
            "--min_clients",
            f"between 1 and the {self.clients_per_round} clients of a round",
            self.min_clients,
        )
        self.algorithm.check_settings(self)
        clients = self.discovery_clients
        require(
            self.num_domains is None or 1 <= self.num_domains <= clients,
            "--num_domains",
            f"between 1 and the number of clients in Phase 1, {clients},",
            self.num_domains,
        )

    @property
    def clients_per_round(self) -> int:
        """Participants of a round: the share of the clients, rounded, halves up, and at least one."""
        return max(1, int(self.client_fraction * self.data.num_clients + 0.5))

    @property
    def discovery_clients(self) -> int:
        """Clients in Phase 1: the share of them, rounded, halves up, and at least one."""
        return max(1, int(self.clustering.fraction * self.data.num_clients + 0.5))

    @property
    def name(self) -> str:
        """A readable name: data set, algorithm, supervision and seed."""
        parts = (
            type(self.data).__name__,
            type(self.algorithm).__name__,
            self.supervision,
            f"seed{self.seed_everything}",
        )
        return "-".join(parts).lower()


_PLAIN = (str, int, float, bool, type(None), list, tuple, dict, Path)


def as_dict(value: Any) -> Any:
    """Return settings as plain YAML values; an object becomes its ``class_path`` and ``init_args``.

    >>> as_dict(FedAvg())
    {'class_path': 'jdfl_lightning.algorithms.fedavg.FedAvg', 'init_args': {'weighting': 'samples'}}
    """
    if isinstance(value, (Experiment, Clustering, Checkpointing, TrainerOptions)):
        return {entry.name: as_dict(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [as_dict(item) for item in value]
    if isinstance(value, dict):
        return {key: as_dict(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, _PLAIN):
        return value
    stored = {name.removeprefix("_"): item for name, item in vars(value).items()}  # no properties: they may do things
    names = inspect.signature(type(value).__init__).parameters
    init_args = {name: as_dict(stored[name]) for name in names if isinstance(stored.get(name, ...), _PLAIN)}
    return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": init_args}


def save_config(experiment: Experiment, file: Path) -> None:
    """Write the complete settings; `fit --config` with this file repeats the run."""
    settings = as_dict(dataclasses.replace(experiment, run_dir=None, resume=None))
    write_whole(file, sign(yaml.safe_dump(settings, sort_keys=False).encode()))


def shipped_configs() -> dict[str, Path]:
    """Return the config files that come with the package, by name."""
    here = Path(__file__).parent
    for folder in (here / "configs", here.parents[1] / "configs"):  # in a wheel; in a checkout
        if folder.is_dir():
            return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    return {}


def find_config(name: str) -> Path:
    """Return a config file: a path, or the name of one that comes with the package, with or without ``.yaml``."""
    shipped = shipped_configs()
    file = Path(name) if Path(name).is_file() else shipped.get(name.removesuffix(".yaml"))
    if file is None:
        raise InputError(f"Expected --config to be a file or one of {', '.join(shipped)} but got {name!r}.")
    try:
        read_settings(file, aliases=True)
    except (OSError, ValueError) as error:
        raise InputError(f"Expected --config to be a YAML file of settings but {file} is not: {error}.") from error
    return file


def run_of(resume: str) -> Path:
    """Return the folder of the run that is to be continued: the path itself, or that of the checkpoint in it."""
    path = Path(resume)
    folder = path.parent.parent if path.is_file() else path
    if not (folder / CONFIG).is_file():
        raise InputError(f"Expected --resume to be the folder of a run or auto but {folder} has no {CONFIG}.")
    return folder


def _explain(message: str) -> str:
    """Say what jsonargparse found in the words of the command line."""
    keys = re.findall(r'Parser key "([^"]+)"', message)
    flag = f"--{'.'.join(keys)}"
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    types = [name for name in re.findall(r"Expected a <class '(\w+)'>", message) if name != "NoneType"]
    choices = re.search(r"Literal\[(.*?)\]", message)
    unknown = re.search(r"Expected a dot import path string: (.*)", message)
    extra = re.search(r"class_path '(?:.*\.)?(\w+)':\s+Option '(\w+)' is not accepted", message)
    if not keys:
        return message
    if value and choices:
        given, known = value[1].strip(), [choice.strip(" '") for choice in choices[1].split(",")]
        return f"Expected {flag} to be one of {choices[1]} but got {given!r}.{did_you_mean(given, known)}"
    if value and types:
        return f"Expected {flag} to be of type {' or '.join(types)} but got {value[1].strip()!r}."
    if unknown:
        return f"Expected {flag} to be the name or the import path of a class but got {unknown[1]!r}."
    if extra:
        return f"Expected an option of {extra[1]} but it has no {flag}.{extra[2]}."
    return f"{flag}: {message.rpartition(keys[-1])[2].lstrip(chr(34) + ':')}"


def make_parser(program: str) -> ArgumentParser:
    """Return the parser of a run's settings; the attribute docstrings above are its help."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog=program, exit_on_error=False, description=Experiment.__doc__)
    parser.add_argument(
        "--config",
        action="config",
        help="A YAML file, or the name of one that comes with the package; may be repeated.",
    )
    parser.add_argument(
        "--trust",
        type=bool,
        default=False,
        help="With --resume: import whatever classes the run folder names, even if you did not make it here.",
    )
    parser.add_class_arguments(Experiment)
    defaults = as_dict(Experiment())
    parser.set_defaults({name: defaults[name] for name in ("data", "algorithm", "backend")})
    return parser


def settings_argument(folder: Path, trust: bool, without: Sequence[str] = ()) -> str:
    """Return the settings of a run folder as a command-line argument, once they were found to be safe to use.

    Args:
        folder: the run folder.
        trust: whether the user trusts it, whoever made it.
        without: names of settings to leave out.
    """
    settings = {
        name: value
        for name, value in settings_to_use(folder, trust, as_dict(Experiment())).items()
        if name not in without
    }
    return f"--config={yaml.safe_dump(settings, sort_keys=False)}"


def _with_config_files(args: Sequence[str]) -> list[str]:
    """Join every option with its value, and replace names of configs by their files."""
    joined: list[str] = []
    for arg in args:
        if joined and joined[-1] in ("--config", "--algorithm", "--algorithm.class_path", "--resume", "--trust"):
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    prefix = "--config="
    joined[-1:] = [prefix if arg == "--config" else arg for arg in joined[-1:]]  # the last one may have no value
    files = [
        f"{prefix}{find_config(arg.removeprefix(prefix))}" if arg.startswith(prefix) and "\n" not in arg else arg
        for arg in joined
    ]
    for arg in joined:
        if arg.startswith("--resume=") and arg not in ("--resume=auto", "--resume=null"):
            folder = run_of(arg.removeprefix("--resume="))
            return [settings_argument(folder, _is_trusted(joined)), *files]
    return files


def _is_trusted(args: Sequence[str]) -> bool:
    given = [arg.partition("=")[2] for arg in args if arg.partition("=")[0] == "--trust"]
    return bool(given) and given[-1].lower() == "true"


def _settings_of(config: str) -> dict[str, Any]:
    """Return the settings that a --config argument stands for: a file, or the settings themselves."""
    return parse_settings(config) if "\n" in config else read_settings(Path(config), aliases=True)


def _with_presets(args: Sequence[str]) -> list[str]:
    """Follow the choice of an algorithm by what the configs so far preset for it; what is set explicitly wins."""
    presets: dict[str, dict[str, Any]] = {}
    completed: list[str] = []
    current = ""
    for arg in args:
        completed.append(arg)
        option, _, value = arg.partition("=")
        chosen = ""
        explicit: dict[str, Any] = {}
        if option == "--config":
            settings = _settings_of(value)
            found = settings.get("presets") or {}
            if not isinstance(found, dict) or not all(isinstance(options, dict) for options in found.values()):
                file = f"the {CONFIG} of the run" if "\n" in value else value
                raise InputError(f"Expected presets in {file} to be of the form {{FedDC: {{alpha: 0.1}}}}.")
            presets |= found
            algorithm = settings.get("algorithm")
            algorithm = {"class_path": algorithm} if isinstance(algorithm, str) else algorithm
            if isinstance(algorithm, dict):
                chosen, explicit = str(algorithm.get("class_path", "")), algorithm.get("init_args") or {}
        elif option in ("--algorithm", "--algorithm.class_path"):
            chosen = value
        chosen = chosen.rpartition(".")[2]
        if chosen and chosen != current:
            current = chosen
            options = presets.get(chosen, {})
            completed += [f"--algorithm.{name}={options[name]}" for name in options if name not in explicit]
    return completed


def parse_experiment(program: str, args: Sequence[str]) -> Experiment:
    """Turn command-line arguments into settings; raise an `InputError` that names what is wrong.

    Args:
        program: name of the command in help texts.
        args: the arguments; what comes later overrides what comes before.
    """
    args = _with_presets(_with_config_files(args))
    parser = make_parser(program)
    try:
        settings = parser.instantiate(parser.parse_args(args))
    except ArgumentError as error:
        raise InputError(_explain(str(error))) from error
    except InputError:
        raise
    except (ValueError, TypeError, ImportError) as error:  # what a class says that was named in the settings
        raise InputError(str(error)) from error
    for entry in dataclasses.fields(Experiment):
        if settings[entry.name] is None and entry.default is not None:
            raise InputError(f"Expected --{entry.name} to have a value but got null.")
    return Experiment(**{entry.name: settings[entry.name] for entry in dataclasses.fields(Experiment)})
