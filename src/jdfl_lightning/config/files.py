"""Settings as plain values, and the files that hold them: shipped configs, and those of run folders."""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from jdfl_lightning.client.trainer import TrainerOptions
from jdfl_lightning.config.experiment import Experiment
from jdfl_lightning.config.groups import Checkpointing, Clustering
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.files import read_settings, write_whole
from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.settings import declared_settings
from jdfl_lightning.storage.trust import CONFIG, settings_to_use, sign

_PLAIN = (str, int, float, bool, type(None), list, tuple, dict, Path)


def as_dict(value: Any) -> Any:
    """Return settings as plain YAML values; an object becomes its ``class_path`` and ``init_args``.

    >>> from jdfl_lightning import FedAvg
    >>> as_dict(FedAvg())
    {'class_path': 'jdfl_lightning.algorithms.fedavg.FedAvg', 'init_args': {'weighting': 'samples'}}
    """
    if isinstance(value, Part):
        return {"class_path": value.class_path, "init_args": as_dict(value.init_args)}
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
    stored = {name.removeprefix("_"): item for name, item in vars(value).items()}  # properties may have side effects
    kind: Any = type(value)
    names = _argument_names(kind)
    init_args = {name: as_dict(stored[name]) for name in names if isinstance(stored.get(name, ...), _PLAIN)}
    return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": init_args}


@cache
def _argument_names(kind: Any) -> tuple[str, ...]:
    """Return the names of a class's arguments; ``**options`` stands for those of its base that it does not fix."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(parameter.name for parameter in parameters)
    # found as the command line finds them, which has to read them again
    return tuple(ArgumentParser(exit_on_error=False).add_class_arguments(kind, fail_untyped=False))


def save_config(experiment: Experiment, file: Path) -> None:
    """Write the complete settings; `fit --config` with this file repeats the run."""
    settings = as_dict(dataclasses.replace(experiment, run_dir=None, resume=None))
    write_whole(file, sign(yaml.safe_dump(settings, sort_keys=False).encode()))


def shipped_configs() -> dict[str, Path]:
    """Return the config files that come with the package, by name."""
    here = Path(__file__).parents[1]
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
    """Return the folder of the run to resume; the path is the folder or a checkpoint in it."""
    path = Path(resume)
    folder = path.parent.parent if path.is_file() else path
    if not (folder / CONFIG).is_file():
        raise InputError(f"Expected --resume to be the folder of a run or auto but {folder} has no {CONFIG}.")
    return folder


def usable_settings(folder: Path, trust: bool) -> dict[str, Any]:
    """Return the settings of a run folder, after checking that they are safe to use.

    Args:
        folder: the run folder.
        trust: whether the user trusts the folder, whoever made it.
    """
    places = [setting.name for setting in declared_settings(Experiment) if setting.role in ("place", "output")]
    return settings_to_use(folder, trust, as_dict(Experiment()), places)
