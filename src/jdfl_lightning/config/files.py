"""Settings as plain values, and the files that hold them: as a user writes them, and as a run saves them."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from jdfl_lightning.client.trainer import REFUSED, TrainerOptions
from jdfl_lightning.clustering.criteria import Criterion
from jdfl_lightning.config.experiment import Experiment
from jdfl_lightning.config.groups import Checkpointing, Clustering
from jdfl_lightning.config.words import place_of
from jdfl_lightning.core.errors import InputError, did_you_mean
from jdfl_lightning.core.files import read_settings, write_whole
from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.settings import declared_settings
from jdfl_lightning.storage.trust import CONFIG, settings_to_use, sign
from jdfl_lightning.supervision import short_names

_DUMPER: type = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
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
    write_whole(file, sign(as_yaml(settings).encode()))


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Return plain values as YAML, in their order."""
    text: str = yaml.dump(settings, Dumper=_DUMPER, sort_keys=False)
    return text


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
    if not resume:
        raise InputError("Expected --resume with a value: the folder of a run, or auto.")
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


MOVED = ("alpha", "tau", "phi")
"""Settings that are now options of the supervision."""
LISTS = ("callbacks", "regularizers", "trainer.callbacks")
"""Settings that are lists of classes."""
_TRAINER_CALLBACKS = "--trainer.callbacks"
_GROUPS = {field.name: field.metadata["group"] for field in dataclasses.fields(Experiment) if field.metadata["group"]}


def full_name(setting: str, value: Any) -> Any:
    """Return the import path that a short name stands for, where a setting has short names; else the value.

    >>> full_name("supervision", "graded"), full_name("supervision", "mine.Rule"), full_name("backbone", "graded")
    ('jdfl_lightning.supervision.graded.Graded', 'mine.Rule', 'graded')
    """
    known: Mapping[str, type] = {}
    if setting == "supervision":
        known = short_names()
    elif setting == "clustering.criterion":
        known = Criterion.short_names()
    if isinstance(value, dict) and "class_path" in value:
        return value | {"class_path": full_name(setting, value["class_path"])}
    found = known.get(value) if isinstance(value, str) else None
    return value if found is None else f"{found.__module__}.{found.__qualname__}"


def read_config(file: Path) -> dict[str, Any]:
    """Read a config file with short names replaced; raise an `InputError` that names the line of an unknown key."""
    settings = read_settings(file, aliases=True)
    for names in strange_keys(settings):
        where = place_of(file, names) or str(file)
        raise InputError(f"{where}: {names[-1]!r} is beside a class_path; options of the class go into init_args.")
    for names in _keys(settings):
        if names[-1] in MOVED and len(names) == 1:
            continue
        scope: Any = Experiment if len(names) == 1 else _GROUPS[names[0]]
        known = [field.name for field in dataclasses.fields(scope)]
        if names[-1] not in known:
            where = place_of(file, names) or str(file)
            name = ".".join(map(str, names))
            if names[0] == "trainer" and names[-1] in REFUSED:
                raise InputError(f"{where}: {name} is not a setting of a run: {REFUSED[names[-1]]}.")
            near = did_you_mean(names[-1], known)
            raise InputError(f"{where}: there is no setting {name!r}.{near or ' There are: ' + ', '.join(known) + '.'}")
    if "supervision" in settings:
        settings["supervision"] = full_name("supervision", settings["supervision"])
    clustering = settings.get("clustering")
    if isinstance(clustering, dict) and "criterion" in clustering:
        clustering["criterion"] = full_name("clustering.criterion", clustering["criterion"])
    for name in LISTS:
        group, _, inner = name.rpartition(".")
        holder = settings.get(group) if group else settings
        if isinstance(holder, dict) and isinstance(holder.get(inner), (str, dict)):
            holder[inner] = [holder[inner]]  # one, given without a list
    return settings


def strange_keys(settings: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the nested keys that are beside a class_path, which stands alone or with arguments."""
    if isinstance(settings, list):
        for item in settings:
            yield from strange_keys(item, above)
    elif isinstance(settings, dict):
        beside = set(settings) - {"class_path", "init_args", "dict_kwargs"} if "class_path" in settings else set()
        yield from ((*above, name) for name in settings if name in beside)
        for name, value in settings.items():
            yield from strange_keys(value, above if name == "init_args" else (*above, name))


def _keys(settings: Mapping[Any, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the keys at the top and within groups of settings."""
    for name, value in settings.items():
        yield (name,)
        if name in _GROUPS and isinstance(value, dict):
            for inner in value:
                yield name, inner


def joined(args: Sequence[str], flags: Collection[str] = ()) -> list[str]:
    """Return arguments with every option and its value in one, as in ``--lr=0.1``.

    Args:
        args: as they were given.
        flags: names of options that are true if they stand alone.

    >>> joined(["--lr", "0.1", "--json", "runs", "--yes", "false"], {"json", "yes"})
    ['--lr=0.1', '--json=true', 'runs', '--yes=false']
    >>> joined(["--run", "r", "--", "-a.png"])  # what follows is no option
    ['--run=r', '--', '-a.png']
    """
    found: list[str] = []
    for arg in args:
        before = found[-1] if found else ""
        option = before.startswith("--") and before != "--"
        waits = option and "=" not in before and not before.endswith(("help", "print_config"))
        switch = before[2:] in flags and arg.lower() not in ("true", "false", "yes", "no")
        if waits and not switch and not arg.startswith("--") and arg != "-h":
            found[-1] = f"{before}={arg}"
        else:
            found.append(arg)
    return [f"{arg}=true" if arg.startswith("--") and arg[2:] in flags else arg for arg in found]


def split_options(args: Sequence[str], names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the options of these names, and all other arguments; they are `joined`.

    >>> split_options(["--lr=0.1", "--seeds=0,1"], {"seeds", "num_domains"})
    (['--seeds=0,1'], ['--lr=0.1'])
    """
    mine = [arg for arg in args if arg.startswith("--") and arg[2:].partition("=")[0] in names]
    return mine, [arg for arg in args if arg not in mine]


def given_values(args: Sequence[str], name: str) -> list[str]:
    """Return the values that are given to an option, in arguments that are `joined`; empty where one is missing."""
    return [arg.partition("=")[2] for arg in split_options(args, {name})[0]]


def named_in_full(args: Sequence[str]) -> list[str]:
    """Return arguments with short names of classes replaced by their import paths.

    >>> named_in_full(["--supervision.help", "hard"])  # what follows a request for help is not `joined` with it
    ['--supervision.help', 'jdfl_lightning.supervision.hard.Hard']
    """
    found: list[str] = []
    for before, arg in pairwise(["", *args]):
        option, equals, value = (before, "", arg) if before.endswith(".help") else arg.partition("=")
        name = full_name(option[2:].removesuffix(".help"), value)
        found.append(name if before.endswith(".help") else f"{option}{equals}{name}")
    return found


def with_lists(args: Sequence[str]) -> list[str]:
    """Return arguments in which what is given for a list is a list, and a Trainer's callback has its options.

    >>> with_lists(["--callbacks=EarlyStopping", "--callbacks.patience=5"])
    ['--callbacks=[EarlyStopping]', '--callbacks.patience=5']
    >>> with_lists(["--trainer.callbacks+=Timer", "--trainer.callbacks.verbose=false"])
    ['--trainer.callbacks+=[{"class_path": "Timer", "init_args": {"verbose": false}}]']
    """
    found: list[str] = []
    callbacks: list[Any] = []  # plain values, which the parser cannot give options
    sign = "+="
    for arg in args:
        option, _, value = arg.partition("=")
        of_trainer = option.rstrip("+") == _TRAINER_CALLBACKS or option.startswith(f"{_TRAINER_CALLBACKS}.")
        if not value or not (of_trainer or option.removeprefix("--") in (*LISTS, "figure_formats")):
            found.append(arg)
        elif not of_trainer:
            found.append(f"{option}={value if value[0] == '[' or value == 'null' else f'[{value}]'}")
        elif option.startswith(f"{_TRAINER_CALLBACKS}."):
            _give_option(callbacks, option.removeprefix(f"{_TRAINER_CALLBACKS}."), yaml.safe_load(value))
        else:
            given = yaml.safe_load(value)
            sign, callbacks = ("+=", callbacks) if option.endswith("+") else ("=", [])
            callbacks += given if isinstance(given, list) else [given]
    return [*found, f"{_TRAINER_CALLBACKS}{sign}{json.dumps(callbacks)}"] if callbacks or sign == "=" else found


def _give_option(callbacks: list[Any], name: str, value: Any) -> None:
    """Give the last callback an option."""
    if not callbacks:
        raise InputError(f"Expected {_TRAINER_CALLBACKS}.{name} after {_TRAINER_CALLBACKS}+=NAME, whose option it is.")
    last = callbacks[-1] if isinstance(callbacks[-1], dict) else {"class_path": callbacks[-1]}
    name = name.removeprefix("init_args.")
    callbacks[-1] = last | {"init_args": (last.get("init_args") or {}) | {name: value}}
