"""What is said of settings that cannot be used: what is possible, the nearest name, the file and line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

import jdfl_lightning
from jdfl_lightning.client.trainer import REFUSED
from jdfl_lightning.clustering.criteria import Criterion
from jdfl_lightning.config.experiment import Experiment
from jdfl_lightning.config.groups import PARTS
from jdfl_lightning.core.errors import InputError, did_you_mean, subclasses
from jdfl_lightning.core.parts import load, parameters
from jdfl_lightning.core.settings import declared_settings
from jdfl_lightning.supervision import short_names
from jdfl_lightning.ui.loggers import explain_logger

_REQUIRED, _SCHEDULERS = "the following arguments are required: ", "torch.optim.lr_scheduler"
OWN_OPTIONS = ("config", "trust", "help", "print_config")
"""Options of the parser that are no settings."""


def explain(message: str, positional: Sequence[str] = (), given: Sequence[str] = ()) -> str:
    """Reword an error of jsonargparse in terms of the command line.

    Args:
        message: the error.
        positional: names of arguments that are not options.
        given: the arguments, whose order may be the reason.
    """
    keys = re.findall(r'Parser key "([^"]+)"', message)
    flag = f"--{'.'.join(keys)}"
    if not keys and (extra := re.match(r"[Uu]nrecognized arguments: (\S+)", message)):
        return no_such_option(extra[1].partition("=")[0])
    if not keys:
        missing = message.removeprefix(_REQUIRED)
        names = [name.upper() if name in positional else f"--{name}" for name in missing.split(", ")]
        return f"{_REQUIRED}{', '.join(names)}" if missing != message else message
    if keys == ["logger"]:
        return explain_logger(message)
    return (
        _of_a_class(flag, keys, message, given)
        or _of_a_value(flag, message)
        or f"{flag}: {message.rpartition(keys[-1])[2].lstrip(chr(34) + ':')}"
    )


def _of_a_value(flag: str, message: str) -> str | None:
    """Reword an error about a plain value; None if it is about something else."""
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    types = [name for name in re.findall(r"Expected a <class '(\w+)'>", message) if name != "NoneType"]
    choices = re.search(r"Literal\[(.*?)\]", message)
    if value and choices:
        got, known = value[1].strip(), [choice.strip(" '") for choice in choices[1].split(",")]
        return f"Expected {flag} to be one of {choices[1]} but got {got!r}.{did_you_mean(got, known)}"
    if value and types:
        return f"Expected {flag} to be of type {' or '.join(types)} but got {value[1].strip()!r}."
    if part := re.search(r"Not of type Part: (.*)", message):
        return f"{flag}: {part[1]}"
    if wanted := re.search(r"Not of type \w+: (?:expected|argument should be) (.*)", message):
        what = wanted[1].rstrip(".") if " but got " in wanted[1] else "given, and with a value"
        return f"Expected {flag} to be {what}."
    return None


def _of_a_class(flag: str, keys: Sequence[str], message: str, given: Sequence[str]) -> str | None:
    """Reword an error about a class and its options; None if it is about something else."""
    if unknown := re.search(r"Expected a dot import path string: (.*)", message):
        known = possible_values(".".join(keys))
        listed = f" Known names: {', '.join(known)}." if known else ""
        near = did_you_mean(unknown[1], known).replace("'", "")
        return f"Expected {flag} to be the name or the import path of a class but got {unknown[1]!r}.{near}{listed}"
    if kind := re.search(r"Import path (?:(\S+) )?does not correspond to a subclass of (\w+)", message):
        value = kind[1] or message.rpartition("Given value: ")[2].strip()
        return f"Expected {flag} to be a {kind[2]} but {value} is not."
    problem = re.search(r"class_path '([^']*)':\s+(.*)", message)
    if problem is None or problem[2].startswith("Parser key"):
        return None
    path, reason = problem[1], problem[2]
    name = path.rpartition(".")[2]
    try:
        kind_named: Any = load(path)
    except InputError as error:
        return f"{flag}: {error}"
    if missing := re.match(rf"{_REQUIRED}(.*)", reason):
        return f"Expected {', '.join(f'{flag}.{one}' for one in missing[1].split(', '))}: {name} needs it."
    if extra := re.match(r"Option '(\w+)' is not accepted", reason):
        supplied = PARTS.get(keys[0], (None, ()))[1]
        if extra[1] in supplied:
            return f"Expected {flag} without {extra[1]}, which the run supplies, but {flag}.{extra[1]} is given."
        options = [option for option in parameters(kind_named) if option not in supplied]
        near = did_you_mean(extra[1], options).replace("'", "")
        has = f" It has {', '.join(options)}." if options else " It has no options."
        order = f" {flag} is given after its option: give it first." if _is_late(flag, given) else ""
        images = (flag, extra[1]) == ("--data", "root")
        own = " For images of your own, name their kind: --data ImageFolderDomains." if images else ""
        return f"Expected an option of {name} but it has no {flag}.{extra[1]}.{near}{has}{order}{own}"
    return None


def _is_late(flag: str, given: Sequence[str]) -> bool:
    """Return whether a class is named after its options: these were taken for those of the class before it."""
    names = [arg.partition("=")[0] for arg in given]
    before = names[: len(names) - names[::-1].index(flag)] if flag in names else []
    return any(name.startswith(f"{flag}.") for name in before)


def possible_values(setting: str) -> list[str]:
    """Return the names of the classes that a setting can have, short names where there are some."""
    if setting == "supervision":
        return list(short_names())
    if setting == "clustering.criterion":
        return list(Criterion.short_names())
    if setting == "model":
        return []
    if setting in PARTS:
        home, parent = import_module("torch.optim" if setting == "optimizer" else _SCHEDULERS), PARTS[setting][0]
        kinds = {name: kind for name, kind in vars(home).items() if name[0] != "_" and isinstance(kind, type)}
        return [name for name, kind in kinds.items() if issubclass(kind, parent) and kind is not parent]
    hints = get_type_hints(Experiment)
    parents = [hint for hint in get_args(hints.get(setting)) or (hints.get(setting),) if isinstance(hint, type)]
    found = [one for parent in parents for one in subclasses(parent) if one.__name__[0] != "_"]
    ours = f"{jdfl_lightning.__name__}."
    return sorted(
        {c.__name__ for c in found if not c.__module__.startswith(ours) or c.__name__ in jdfl_lightning.__all__}
    )


def no_such_option(arg: str, others: Collection[str] = ()) -> str:
    """Return what to say of an argument that is no option.

    Args:
        arg: the argument, without a value.
        others: names of options besides the settings.

    >>> no_such_option("--roudns"), no_such_option("rounds")
    ('There is no option --roudns. Did you mean --rounds?', "Expected an option, as in --rounds, but got 'rounds'.")
    """
    known = [*(setting.name for setting in declared_settings(Experiment)), *OWN_OPTIONS, *others]
    if not arg.startswith("--"):
        return f"Expected an option, as in --{arg if arg in known else 'rounds'}, but got {arg!r}."
    name = arg.removeprefix("--").removesuffix("+")
    group, _, inner = name.rpartition(".")
    if group == "trainer" and inner in REFUSED:
        return f"--{name} is not an option of a run: {REFUSED[inner]}."
    near = did_you_mean(name, known).replace("'", "").replace("mean ", "mean --")
    return f"There is no option --{name}.{near}"


def located(message: str, files: Sequence[Path], given: Sequence[str]) -> str:
    """Add the file and line of the setting that a message names, if it is from a config.

    Args:
        message: the message.
        files: the configs; later ones win.
        given: the arguments that win over all configs.
    """
    flag = re.search(r"--([\w.]*\w)", message)
    if flag is None or any(
        f"{name}.".startswith(f"{flag[1]}.") or f"{flag[1]}.".startswith(f"{name}.")
        for name in (arg.partition("=")[0].strip("-+") for arg in given if arg[:2] == "--")
    ):
        return message
    names = flag[1].split(".")
    for length in range(len(names), 0, -1):  # if a needed option is missing, the line of its class
        for file in reversed(files):
            if place := place_of(file, names[:length]):
                return f"{message} ({place})"
    return message


def place_of(file: Path, names: Sequence[Any]) -> str | None:
    """Return the file and the line, counted from 1, of a nested key; None if it is not there, or more than once.

    Lists and the level of ``init_args`` are looked through, so that ``callbacks.patience`` is a callback's option.
    """
    found = list(_lines(yaml.compose(file.read_text(), yaml.SafeLoader), [str(name) for name in names]))
    return f"{file}, line {found[0]}" if len(found) == 1 else None


def _lines(node: yaml.Node | None, names: Sequence[str]) -> Iterator[int]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _lines(item, names)
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == names[0] and len(names) == 1:
            yield key.start_mark.line + 1
        elif key.value == names[0]:
            yield from _lines(value, names[1:])
        elif key.value == "init_args":
            yield from _lines(value, names)
