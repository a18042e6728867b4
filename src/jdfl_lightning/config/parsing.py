"""Command lines -> settings, by jsonargparse: the parser of a run's settings, and of a command's own options."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from docstring_parser import parse_from_object
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings
from jsonargparse.typing import register_type
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jdfl_lightning.client.module import JointModule
from jdfl_lightning.clustering.criteria import Criterion
from jdfl_lightning.config.experiment import Experiment
from jdfl_lightning.config.files import as_dict, run_of, usable_settings
from jdfl_lightning.config.reading import (
    MOVED,
    line_of,
    named_in_full,
    no_such_option,
    read_config,
    take_configs,
    take_moved,
)
from jdfl_lightning.core.errors import InputError, Note, did_you_mean, subclasses
from jdfl_lightning.core.files import read_settings
from jdfl_lightning.core.lists import Fractions, Names, Numbers
from jdfl_lightning.core.parts import Part, load, parameters
from jdfl_lightning.supervision import short_names
from jdfl_lightning.ui.loggers import explain_logger

_REQUIRED = "the following arguments are required: "


for _list in (Names, Numbers, Fractions):
    register_type(_list)


def _explain(message: str, positional: Sequence[str] = ()) -> str:
    """Reword an error of jsonargparse in terms of the command line."""
    keys = re.findall(r'Parser key "([^"]+)"', message)
    flag = f"--{'.'.join(keys)}"
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    types = [name for name in re.findall(r"Expected a <class '(\w+)'>", message) if name != "NoneType"]
    choices = re.search(r"Literal\[(.*?)\]", message)
    unknown = re.search(r"Expected a dot import path string: (.*)", message)
    extra = re.search(r"class_path '(.*?)':\s+Option '(\w+)' is not accepted", message)
    if not keys and (extra := re.match(r"[Uu]nrecognized arguments: (?:--)?([\w.]+)", message)):
        return no_such_option(extra[1])
    if not keys:
        missing = message.removeprefix(_REQUIRED)
        names = [name.upper() if name in positional else f"--{name}" for name in missing.split(", ")]
        return f"{_REQUIRED}{', '.join(names)}" if missing != message else message
    if keys == ["logger"]:
        return explain_logger(message)
    if value and choices:
        given, known = value[1].strip(), [choice.strip(" '") for choice in choices[1].split(",")]
        return f"Expected {flag} to be one of {choices[1]} but got {given!r}.{did_you_mean(given, known)}"
    if value and types:
        return f"Expected {flag} to be of type {' or '.join(types)} but got {value[1].strip()!r}."
    if wanted := re.search(r"Not of type \w+: expected (.*)", message):
        what = wanted[1].rstrip(".") if " but got " in wanted[1] else "given, and with a value"
        return f"Expected {flag} to be {what}."
    if unknown:
        known = _possible(".".join(keys))
        listed = f" Known names: {', '.join(known)}." if known else ""
        near = did_you_mean(unknown[1], known).replace("'", "")
        return f"Expected {flag} to be the name or the import path of a class but got {unknown[1]!r}.{near}{listed}"
    if extra:
        options = [name for name in parameters(load(extra[1])) if name not in PARTS.get(keys[0], (None, ()))[1]]
        near = did_you_mean(extra[2], options).replace("'", "")
        name = extra[1].rpartition(".")[2]
        return f"Expected an option of {name} but it has no {flag}.{extra[2]}.{near} It has {', '.join(options)}."
    return f"{flag}: {message.rpartition(keys[-1])[2].lstrip(chr(34) + ':')}"


def _possible(setting: str) -> list[str]:
    """Return the names of the classes that a setting can have, short names where there are some."""
    if setting == "supervision":
        return list(short_names())
    if setting == "clustering.criterion":
        return list(Criterion.short_names())
    if setting in PARTS:
        home = import_module("torch.optim" if setting == "optimizer" else "torch.optim.lr_scheduler")
        parent = PARTS[setting][0]
        return [] if setting == "model" else [n for n in vars(home) if _is_below(getattr(home, n), parent)]
    hints = get_type_hints(Experiment)
    parents = [hint for hint in get_args(hints.get(setting)) or (hints.get(setting),) if isinstance(hint, type)]
    names = [found.__name__ for parent in parents for found in subclasses(parent)]
    return sorted({name for name in names if not name.startswith("_")})


def _is_below(value: Any, parent: type) -> bool:
    return isinstance(value, type) and issubclass(value, parent) and value is not parent


def _parser(program: str, description: str | None) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    return ArgumentParser(prog=program, exit_on_error=False, description=description, allow_abbrev=False)


PARTS: dict[str, tuple[type, set[str]]] = {
    "model": (JointModule, {"backbone", "in_features", "num_classes", "domains", "score", "targets", "regularizers"}),
    "optimizer": (Optimizer, {"params"}),
    "lr_scheduler": (LRScheduler, {"optimizer"}),
    "round_scheduler": (LRScheduler, {"optimizer"}),
}
"""Settings that name a class with its arguments, as in LightningCLI: the class's parent, and what the run supplies."""


def _part(value: Any) -> Part:
    """Return a part of plain values: an import path, the name of a Lightning callback, or class_path and init_args."""
    if isinstance(value, str):
        value = {"class_path": value}
    if not isinstance(value, Mapping) or not {"class_path"} <= set(value) <= {"class_path", "init_args"}:
        raise ValueError(f"expected a class_path with init_args but got {value!r}")
    path = str(value["class_path"])
    return Part(path if "." in path else f"lightning.pytorch.callbacks.{path}", **(value.get("init_args") or {}))


register_type(
    Part, serializer=lambda part: {"class_path": part.class_path, "init_args": part.init_args}, deserializer=_part
)


def _add_settings(parser: ArgumentParser, skip: set[str]) -> None:
    """Add the options that are a run's settings; the attribute docstrings of `Experiment` are their help."""
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
    parser.add_class_arguments(Experiment, skip={*skip, *PARTS})
    hints = {entry.arg_name: entry.description for entry in parse_from_object(Experiment).params if entry.description}
    for name, (parent, supplied) in PARTS.items():
        if name not in skip:
            parser.add_subclass_arguments(
                parent, name, skip=supplied, instantiate=False, fail_untyped=False, required=False, help=hints[name]
            )
    defaults = as_dict(Experiment())
    defaults["data"]["init_args"]["normalize"] = None  # a network's weights may have their own
    parser.set_defaults({name: defaults[name] for name in ("data", "algorithm", "backend", "supervision")})
    parser.set_defaults({"clustering.criterion": defaults["clustering"]["criterion"]})


def make_parser(program: str) -> ArgumentParser:
    """Return the parser of a run's settings."""
    parser = _parser(program, Experiment.__doc__)
    _add_settings(parser, set())
    return parser


def parse_command(program: str, command: Callable[..., Any], args: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments of a command, a function whose annotations and docstring define the options.

    A parameter `settings` gets all arguments that are not options of the command: the settings of a run, for
    `parse_experiment`. A list parameter without a default is positional, with one or more values. Two underscores in a
    name are a dot in the option's: ``data__root`` is ``--data.root``, a text.

    Args:
        program: name of the command in help texts.
        command: the function.
        args: the arguments.
    """
    signature = inspect.signature(command).parameters
    takes_settings = "settings" in signature
    own = {name for name in signature if name != "settings"}
    positional = [name for name, p in signature.items() if "list" in str(p.annotation) and p.default is p.empty]
    parser = _parser(program, (command.__doc__ or "").partition("\n")[0])
    dotted = {name: name.replace("__", ".") for name in own if "__" in name}
    parser.add_function_arguments(command, skip={"settings", *positional, *dotted})
    texts = dict(re.findall(r"^ +(\w+): (.*)", command.__doc__ or "", re.MULTILINE))
    for name in positional:
        parser.add_argument(name, nargs="+", type=Path, metavar=name.upper(), help=texts.get(name))
    for name, option in dotted.items():
        parser.add_argument(f"--{option}", type=str, default=signature[name].default, help=texts.get(name))
    if takes_settings and {"-h", "--help"} & set(args):
        _add_settings(parser, own)
    mine, settings = _split(args, own) if takes_settings else (list(args), [])
    try:
        found = parser.instantiate(parser.parse_args([*mine, *(arg for arg in settings if arg in ("-h", "--help"))]))
    except ArgumentError as error:
        raise InputError(f"{_explain(str(error), positional)} (see {program} --help)") from error
    return {name: found[dotted.get(name, name)] for name in own} | ({"settings": settings} if takes_settings else {})


def _split(args: Sequence[str], names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the options of these names with their values, and all other arguments.

    >>> _split(["--lr", "0.1", "--seeds", "0,1", "--num_domains=3"], {"seeds", "num_domains"})
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


def _values(args: Sequence[str], option: str) -> list[str]:
    """Return the values that are given to an option."""
    pairs = zip(args, [*args, ""][1:], strict=True)
    return [arg.partition("=")[2] if "=" in arg else after for arg, after in pairs if arg.partition("=")[0] == option]


def parse_experiment(
    program: str, args: Sequence[str], saved: Mapping[str, Any] | None = None, leave_out: Collection[str] = ()
) -> Experiment:
    """Turn command-line arguments into settings; raise an `InputError` that names what is wrong.

    Options win over configs, wherever they stand; what comes later wins over what comes before.

    Args:
        program: name of the command in help texts.
        args: the arguments.
        saved: settings that the arguments override; if not given, those of the resumed run, or the defaults.
        leave_out: settings of config files that are not used, so that no class of theirs is imported.
    """
    resumed = [value for value in _values(args, "--resume") if value not in ("auto", "null")]
    if saved is None and resumed:
        trust = "".join(_values(args, "--trust")[-1:]).lower() == "true"
        saved = usable_settings(run_of(resumed[0]), trust)
    files, options = take_configs(args)
    configs = [] if saved is None else [dict(saved)]
    configs += [{name: v for name, v in read_config(file).items() if name not in leave_out} for file in files]
    moved, options = take_moved(named_in_full(options))
    for config in configs:
        moved = {name: config.pop(name) for name in MOVED if name in config} | moved
    parser = make_parser(program)
    texts = [f"--config={yaml.safe_dump(config, sort_keys=False)}" for config in configs]
    try:
        settings = parser.parse_args([*texts, *options])
        _use_moved(settings, moved)
        parts = {name: _as_part(name, settings.pop(name, None)) for name in PARTS}
        settings = parser.instantiate(settings)
    except ArgumentError as error:
        raise InputError(_located(_explain(str(error)), files)) from error
    except InputError:
        raise
    except (ValueError, TypeError, ImportError) as error:  # raised by a class named in the settings
        raise InputError(explain_logger(str(error))) from error
    except OverflowError as error:
        raise InputError(f"Expected numbers of a usual size but one is too large: {error}.") from error
    found: dict[str, Any] = {
        entry.name: settings[entry.name] for entry in dataclasses.fields(Experiment) if entry.name not in PARTS
    }
    for entry in dataclasses.fields(Experiment):
        if entry.name in found and found[entry.name] is None and entry.default is not None:
            raise InputError(f"Expected --{entry.name} to have a value but got null.")
    return Experiment(**(found | parts))


def load_experiment(config: str | Path, *options: str) -> Experiment:
    """Return the settings of a config: a YAML file, or the name of one that comes with the package.

    Args:
        config: the file or name.
        options: further options, as on the command line, such as ``"--rounds=3"``.

    >>> load_experiment("digits", "--rounds=3").rounds
    3
    """
    return parse_experiment("load_experiment", [f"--config={config}", *options])


def _as_part(name: str, value: Any) -> Part | None:
    """Return a class of the settings, as jsonargparse has parsed it, as a part."""
    if value is None:
        return None
    plain = value.as_dict()
    return Part(plain["class_path"], **plain.get("init_args", {}))


def _use_moved(settings: Any, moved: Mapping[str, Any]) -> None:
    """Give the supervision the options that earlier versions had beside it."""
    if not moved:
        return
    options = settings.supervision.get("init_args") or {}
    used = {name: value for name, value in moved.items() if name in options}
    for name, value in used.items():
        settings[f"supervision.init_args.{name}"] = yaml.safe_load(value) if isinstance(value, str) else value
    unused = [name for name in moved if name not in used]
    rest = f"; this supervision has no {' and no '.join(unused)}" if unused else ""
    which = f"{', '.join(moved)}: now options of the supervision, as in --supervision.alpha"
    note = f"{which}; the old form still works{rest}."
    warnings.warn(note, Note, stacklevel=3)


def _located(message: str, files: Sequence[Path]) -> str:
    """Add the file and line of the setting that a message names, if a config has it."""
    flag = re.search(r"--([\w.]+)", message)
    names = flag[1].split(".") if flag else []
    for file in reversed(files):
        found: Any = read_settings(file, aliases=True)
        depth = 0
        for name in names:
            if isinstance(found, dict) and "init_args" in found and name not in found:
                found = found["init_args"]
            if not isinstance(found, dict) or name not in found:
                break
            found, depth = found[name], depth + 1
        if depth == len(names) > 0:
            return f"{message} ({file}, line {line_of(file, names)})"
    return message
