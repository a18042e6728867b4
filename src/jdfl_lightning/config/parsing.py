"""Command lines -> settings, by jsonargparse: the options of runs and of commands, for parsers and for shells."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from docstring_parser import parse_from_object
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings
from jsonargparse.typing import register_type

import jdfl_lightning
from jdfl_lightning.config.experiment import Experiment
from jdfl_lightning.config.files import (
    MOVED,
    as_dict,
    as_yaml,
    find_config,
    given_values,
    joined,
    named_in_full,
    read_config,
    run_of,
    shipped_configs,
    split_options,
    usable_settings,
    with_lists,
)
from jdfl_lightning.config.groups import PARTS
from jdfl_lightning.config.words import OWN_OPTIONS, explain, located, no_such_option, possible_values
from jdfl_lightning.core.errors import InputError, notify, subclasses
from jdfl_lightning.core.lists import Fractions, Names, Numbers
from jdfl_lightning.core.parts import Part, parameters
from jdfl_lightning.core.settings import declared_settings
from jdfl_lightning.ui.loggers import explain_logger

for _list in (Names, Numbers, Fractions):
    register_type(_list)


def _parser(program: str, description: str | None) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    return ArgumentParser(prog=program, exit_on_error=False, description=description, allow_abbrev=False)


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


def _add_settings(parser: ArgumentParser, skip: set[str], data: str | None = None) -> None:
    """Add the options that are a run's settings; the attribute docstrings of `Experiment` are their help.

    Args:
        parser: gets the options.
        skip: settings to leave out.
        data: the data module that the user names; defaults of another one would stay where arguments share a name.
    """
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
                parent,
                name,
                skip=set(supplied),
                instantiate=False,
                fail_untyped=False,
                required=False,
                help=hints[name],
            )
    defaults = as_dict(Experiment())
    parser.set_defaults({name: defaults[name] for name in ("algorithm", "backend", "supervision")})
    # no arguments: what they leave open, a network's weights decide
    usual = defaults["data"]["class_path"]
    try:
        parser.set_defaults({"data": {"class_path": data or usual}})
    except Exception:  # no such class: the parser says so when it reads the name
        parser.set_defaults({"data": {"class_path": usual}})
    parser.set_defaults({"clustering.criterion": defaults["clustering"]["criterion"]})


def make_parser(program: str, data: str | None = None) -> ArgumentParser:
    """Return the parser of a run's settings, for a data module that is named or the default one."""
    parser = _parser(program, Experiment.__doc__)
    _add_settings(parser, set(), data)
    return parser


def parse_command(program: str, command: Callable[..., Any], args: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments of a command, a function whose annotations and docstring define the options.

    A parameter `settings` gets all arguments that are not options of the command: the settings of a run, for
    `parse_experiment`. A list of paths is positional, with one or more values; with none, too, if it has a default.
    Two underscores in a name are a dot in the option's: ``data__root`` is ``--data.root``, a text. A bool alone is
    true: ``--json`` is ``--json true``.

    Args:
        program: name of the command in help texts.
        command: the function.
        args: the arguments.
    """
    signature = inspect.signature(command).parameters
    takes_settings = "settings" in signature
    own = {name for name in signature if name != "settings"}
    positional = [name for name, p in signature.items() if str(p.annotation) == "list[Path]"]
    args = joined(args, {name for name, p in signature.items() if str(p.annotation) == "bool"})
    parser = _parser(program, (command.__doc__ or "").partition("\n")[0])
    dotted = {name: name.replace("__", ".") for name in own if "__" in name}
    parser.add_function_arguments(command, skip={"settings", *positional, *dotted})
    texts = dict(re.findall(r"^ +(\w+): (.*)", command.__doc__ or "", re.MULTILINE))
    for name in positional:
        some = signature[name].default is inspect.Parameter.empty
        options: dict[str, Any] = {"nargs": "+"} if some else {"nargs": "*", "default": []}
        parser.add_argument(name, type=Path, metavar=name.upper(), help=texts.get(name), **options)
    for name, option in dotted.items():
        parser.add_argument(f"--{option}", type=str, default=signature[name].default, help=texts.get(name))
    if takes_settings and {"-h", "--help"} & set(args):
        _add_settings(parser, own)
    mine, settings = split_options(args, own) if takes_settings else (list(args), [])
    try:
        found = parser.instantiate(parser.parse_args([*mine, *(arg for arg in settings if arg in ("-h", "--help"))]))
    except ArgumentError as error:
        raise InputError(f"{explain(str(error), positional)} (see {program} --help)") from error
    tops = {setting.name.partition(".")[0] for setting in declared_settings(Experiment)}
    for name in (arg.removeprefix("--").partition("=")[0] for arg in settings if arg.startswith("--")):
        top = name.partition(".")[0].removesuffix("+")
        if top not in {*tops, *OWN_OPTIONS, *MOVED} and top.isidentifier():
            raise InputError(no_such_option(f"--{name}", own))
    return {name: found[dotted.get(name, name)] for name in own} | ({"settings": settings} if takes_settings else {})


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
    args = joined(args)
    resumed = [value for value in given_values(args, "resume") if value not in ("auto", "null")]
    if saved is None and resumed:
        trust = "".join(given_values(args, "trust")[-1:]).lower() == "true"
        saved = usable_settings(run_of(resumed[0]), trust)
    configs_given, options = split_options(args, {"config"})
    files = [find_config(name) for name in given_values(configs_given, "config")]
    configs = [] if saved is None else [dict(saved)]
    configs += [{name: v for name, v in read_config(file).items() if name not in leave_out} for file in files]
    options = named_in_full(with_lists(options))
    moved_given, options = split_options(options, MOVED)
    moved: dict[str, Any] = {name: values[-1] for name in MOVED if (values := given_values(moved_given, name))}
    for config in configs:
        moved = {name: config.pop(name) for name in MOVED if name in config} | moved
    try:
        return _parse(program, configs, options, moved)
    except ArgumentError as error:
        raise InputError(located(explain(str(error), given=options), files, options)) from error
    except InputError as error:
        if type(error) is not InputError:
            raise
        raise InputError(located(str(error), files, options)) from error
    except (ValueError, TypeError, ImportError) as error:  # raised by a class named in the settings
        raise InputError(explain_logger(str(error))) from error
    except OverflowError as error:
        raise InputError(f"Expected numbers of a usual size but one is too large: {error}.") from error


def _parse(
    program: str, configs: Sequence[Mapping[str, Any]], options: Sequence[str], moved: Mapping[str, Any]
) -> Experiment:
    """Parse settings, of which later ones win, and options, which win over all of them."""
    parser = make_parser(program, _named_data(configs, options))
    texts = [f"--config={as_yaml(config)}" for config in configs]
    settings = parser.parse_args([*texts, *options])
    _use_moved(settings, moved)
    parts = {name: _as_part(settings.pop(name, None)) for name in PARTS}
    settings = parser.instantiate(settings)
    found: dict[str, Any] = {
        entry.name: settings[entry.name] for entry in dataclasses.fields(Experiment) if entry.name not in PARTS
    }
    for entry in dataclasses.fields(Experiment):
        if entry.name in found and found[entry.name] is None and entry.default is not None:
            raise InputError(f"Expected --{entry.name} to have a value but got null.")
    return Experiment(**(found | parts))


def _named_data(configs: Sequence[Mapping[str, Any]], options: Sequence[str]) -> str | None:
    """Return the name of the data module that settings and options give, the last one if there are several."""
    given = [config.get("data") for config in configs]
    for value in given_values(options, "data"):
        with suppress(yaml.YAMLError):  # the parser says what is wrong with it
            given.append(yaml.safe_load(value) if value.startswith("{") else value)
    found = [value.get("class_path") if isinstance(value, Mapping) else value for value in given]
    found += given_values(options, "data.class_path")
    return next(
        (name for name in reversed(found) if isinstance(name, str) and name.replace(".", "").isidentifier()), None
    )


def load_experiment(config: str | Path, *options: str) -> Experiment:
    """Return the settings of a config: a YAML file, or the name of one that comes with the package.

    Args:
        config: the file or name.
        options: further options, as on the command line, such as ``"--rounds=3"``.

    >>> load_experiment("digits", "--rounds=3").rounds
    3
    """
    return parse_experiment("load_experiment", [f"--config={config}", *options])


def _as_part(value: Any) -> Part | None:
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
    notify(note)


Options = dict[str, list[str]]
"""Options, each with the values that it takes; none where it takes any."""
_NAMED_CLASSES = (
    *("data", "algorithm", "supervision", "backend", "logger"),
    *("optimizer", "lr_scheduler", "round_scheduler", "clustering.criterion"),
)
"""Settings whose values are names of classes."""


def command_options(command: Callable[..., Any]) -> Options:
    """Return the options of a command; those of a run too, if it takes settings."""
    signature, hints = inspect.signature(command).parameters, get_type_hints(command)
    found: Options = {}
    for name, parameter in signature.items():
        if name != "settings" and str(parameter.annotation) != "list[Path]":
            found[f"--{name.replace('__', '.')}"] = _choices(hints[name])
    if "settings" in signature:
        found = setting_options() | found
    return found | {"--help": []}


def setting_options() -> Options:
    """Return the options that are a run's settings, with those of all classes of this package that they can name."""
    found: Options = {"--config": sorted(shipped_configs()), "--trust": ["true", "false"], "--print_config": []}
    found |= {f"--{setting.name}": _choices(setting.hint) for setting in declared_settings(Experiment)}
    hints = get_type_hints(Experiment)
    for name in ("data", "algorithm", "supervision", "backend"):
        for kind in subclasses(hints[name]):
            if kind.__name__ in jdfl_lightning.__all__:
                found |= {f"--{name}.{argument}": [] for argument in parameters(kind)}
    for name in _NAMED_CLASSES:
        found[f"--{name}"] = possible_values(name)
    return found


def _choices(hint: Any) -> list[str]:
    """Return the values that a type allows; none if they cannot be listed.

    >>> from typing import Literal
    >>> _choices(Literal["max", "sum"] | None), _choices(bool), _choices(int)
    (['max', 'sum'], ['true', 'false'], [])
    """
    if hint is bool:
        return ["true", "false"]
    parts = get_args(hint)
    if parts and all(isinstance(part, str) for part in parts):  # a Literal
        return list(parts)
    return [choice for part in parts for choice in _choices(part)] if parts else []
