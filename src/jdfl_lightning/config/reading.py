"""Config files as a user writes them: short names, settings that have moved, and where a wrong key is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jdfl_lightning.client.trainer import REFUSED
from jdfl_lightning.clustering.criteria import Criterion
from jdfl_lightning.config.experiment import Experiment
from jdfl_lightning.config.files import find_config
from jdfl_lightning.core.errors import InputError, did_you_mean
from jdfl_lightning.core.files import read_settings
from jdfl_lightning.core.settings import declared_settings
from jdfl_lightning.supervision import short_names

MOVED = ("alpha", "tau", "phi")
"""Settings that are now options of the supervision."""
_GROUPS = {field.name: field.metadata["group"] for field in dataclasses.fields(Experiment) if field.metadata["group"]}


def known_options() -> list[str]:
    """Return the names of all settings, with their groups."""
    return [setting.name for setting in declared_settings(Experiment)]


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


def no_such_option(name: str) -> str:
    """Return what to say about an option that does not exist."""
    group, _, inner = name.rpartition(".")
    if group == "trainer" and inner in REFUSED:
        return f"--{name} is not an option of a run: {REFUSED[inner]}."
    return f"There is no option --{name}.{did_you_mean(name, known_options()).replace(chr(39), '')}"


def read_config(file: Path) -> dict[str, Any]:
    """Read a config file with short names replaced; raise an `InputError` that names the line of an unknown key."""
    settings = read_settings(file, aliases=True)
    for names in _keys(settings):
        if names[-1] in MOVED and len(names) == 1:
            continue
        scope: Any = Experiment if len(names) == 1 else _GROUPS[names[0]]
        known = [field.name for field in dataclasses.fields(scope)]
        if names[-1] not in known:
            where = f"{file}, line {line_of(file, names)}"
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
    return settings


def _keys(settings: Mapping[Any, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the keys at the top and within groups of settings."""
    for name, value in settings.items():
        yield (name,)
        if name in _GROUPS and isinstance(value, dict):
            for inner in value:
                yield name, inner


def line_of(file: Path, names: Sequence[Any]) -> int:
    """Return the line of a nested key in a YAML file, counted from 1."""
    node = yaml.compose(file.read_text(), yaml.SafeLoader)
    line = 1
    for name in map(str, names):
        inside = _children(node)
        if name not in inside and "init_args" in inside:  # an option of a class
            inside = _children(inside["init_args"][1])
        if name in inside:
            line, node = inside[name]
    return line


def _children(node: yaml.Node | None) -> dict[str, tuple[int, yaml.Node]]:
    """Return the keys of a mapping, each with its line and its value."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return {key.value: (key.start_mark.line + 1, value) for key, value in pairs}


def take_configs(args: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the config files that arguments name, in their order, and all other arguments."""
    files: list[Path] = []
    others: list[str] = []
    waiting = False
    for arg in args:
        if waiting or arg.startswith("--config="):
            files.append(find_config(arg if waiting else arg.removeprefix("--config=")))
            waiting = False
        elif arg == "--config":
            waiting = True
        else:
            others.append(arg)
    if waiting:
        find_config("")
    return files, others


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


def take_moved(args: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options that are now the supervision's, and all other arguments."""
    moved: dict[str, str] = {}
    others: list[str] = []
    waiting = ""
    for arg in args:
        option, equals, value = arg.partition("=")
        if waiting:
            moved[waiting], waiting = arg, ""
        elif option.removeprefix("--") in MOVED and option.startswith("--"):
            waiting = "" if equals else option[2:]
            if equals:
                moved[option[2:]] = value
        else:
            others.append(arg)
    return moved, others
