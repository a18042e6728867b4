"""Config files as a user writes them: short names, settings that have moved, and where a wrong key is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jdfl_lightning.client.trainer import REFUSED
from jdfl_lightning.clustering.criteria import Criterion
from jdfl_lightning.config.experiment import Experiment
from jdfl_lightning.config.lines import place_of
from jdfl_lightning.core.errors import InputError, did_you_mean
from jdfl_lightning.core.files import read_settings
from jdfl_lightning.supervision import short_names

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


def split_options(args: Sequence[str], names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the options of these names with their values, and all other arguments.

    >>> split_options(["--lr", "0.1", "--seeds", "0,1", "--num_domains=3"], {"seeds", "num_domains"})
    (['--seeds', '0,1', '--num_domains=3'], ['--lr', '0.1'])
    """
    options = {f"--{name}" for name in names}
    parts: tuple[list[str], list[str]] = ([], [])
    value_follows = False
    for arg in args:
        mine = value_follows or arg.partition("=")[0] in options
        parts[0 if mine else 1].append(arg)
        value_follows = mine and not value_follows and "=" not in arg
    return parts


def given_values(args: Sequence[str], name: str) -> list[str]:
    """Return the values that are given to an option; empty where one is missing at the end."""
    pairs = zip(args, [*args, ""][1:], strict=True)
    return [
        arg.partition("=")[2] if "=" in arg else after for arg, after in pairs if arg.partition("=")[0] == f"--{name}"
    ]


def named_in_full(args: Sequence[str]) -> list[str]:
    """Return arguments with short names of classes replaced by their import paths."""
    found: list[str] = []
    before = ""
    for arg in args:
        option, equals, value = arg.partition("=")
        if equals and option.startswith("--"):
            found.append(f"{option}={full_name(option[2:], value)}")
        else:
            found.append(str(full_name(before[2:], arg)) if before.startswith("--") else arg)
        before = arg
    return found


def with_lists(args: Sequence[str]) -> list[str]:
    """Return arguments in which what is given for a list is a list, and a Trainer's callback has its options.

    >>> with_lists(["--callbacks", "EarlyStopping", "--callbacks.patience", "5"])
    ['--callbacks=[EarlyStopping]', '--callbacks.patience', '5']
    >>> with_lists(["--trainer.callbacks+=Timer", "--trainer.callbacks.verbose=false"])
    ['--trainer.callbacks+=[{"class_path": "Timer", "init_args": {"verbose": false}}]']
    """
    found: list[str] = []
    callbacks: list[Any] = []  # plain values, which the parser cannot give options
    sign = "+="
    rest = iter(args)
    for arg in rest:
        option, equals, value = arg.partition("=")
        of_trainer = option.rstrip("+") == _TRAINER_CALLBACKS or option.startswith(f"{_TRAINER_CALLBACKS}.")
        if not of_trainer and option.removeprefix("--") not in (*LISTS, "figure_formats"):
            found.append(arg)
            continue
        value = value if equals else next(rest, "")
        if not value:
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
