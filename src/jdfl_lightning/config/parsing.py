"""Command lines -> settings, by jsonargparse: the parser of a run's settings, and of a command's own options."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings
from jsonargparse.typing import register_type

from jdfl_lightning.config.experiment import Experiment
from jdfl_lightning.config.files import as_dict, find_config, run_of, usable_settings
from jdfl_lightning.core.errors import InputError, did_you_mean
from jdfl_lightning.core.lists import Fractions, Names, Numbers

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
    extra = re.search(r"class_path '(?:.*\.)?(\w+)':\s+Option '(\w+)' is not accepted", message)
    if not keys:
        missing = message.removeprefix(_REQUIRED)
        names = [name.upper() if name in positional else f"--{name}" for name in missing.split(", ")]
        return f"{_REQUIRED}{', '.join(names)}" if missing != message else message
    if value and choices:
        given, known = value[1].strip(), [choice.strip(" '") for choice in choices[1].split(",")]
        return f"Expected {flag} to be one of {choices[1]} but got {given!r}.{did_you_mean(given, known)}"
    if value and types:
        return f"Expected {flag} to be of type {' or '.join(types)} but got {value[1].strip()!r}."
    if wanted := re.search(r"Not of type \w+: expected (.*)", message):
        what = wanted[1].rstrip(".") if " but got " in wanted[1] else "given, and with a value"
        return f"Expected {flag} to be {what}."
    if unknown:
        return f"Expected {flag} to be the name or the import path of a class but got {unknown[1]!r}."
    if extra:
        return f"Expected an option of {extra[1]} but it has no {flag}.{extra[2]}."
    return f"{flag}: {message.rpartition(keys[-1])[2].lstrip(chr(34) + ':')}"


def _parser(program: str, description: str | None) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    return ArgumentParser(prog=program, exit_on_error=False, description=description, allow_abbrev=False)


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
    parser.add_class_arguments(Experiment, skip=skip)
    defaults = as_dict(Experiment())
    parser.set_defaults({name: defaults[name] for name in ("data", "algorithm", "backend")})


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


def _with_config_files(args: Sequence[str]) -> list[str]:
    """Replace names of configs by their files."""
    found: list[str] = []
    for arg in args:
        if found and found[-1] == "--config":
            found[-1] = f"--config={find_config(arg)}"
        else:
            given = arg.startswith("--config=")
            found.append(f"--config={find_config(arg.removeprefix('--config='))}" if given else arg)
    if found and found[-1] == "--config":
        find_config("")
    return found


def parse_experiment(program: str, args: Sequence[str], saved: Mapping[str, Any] | None = None) -> Experiment:
    """Turn command-line arguments into settings; raise an `InputError` that names what is wrong.

    Args:
        program: name of the command in help texts.
        args: the arguments; what comes later overrides what comes before.
        saved: settings that the arguments override; if not given, those of the resumed run, or the defaults.
    """
    resumed = [value for value in _values(args, "--resume") if value not in ("auto", "null")]
    if saved is None and resumed:
        trust = "".join(_values(args, "--trust")[-1:]).lower() == "true"
        saved = usable_settings(run_of(resumed[0]), trust)
    args = _with_config_files(args)
    if saved is not None:
        args = [f"--config={yaml.safe_dump(dict(saved), sort_keys=False)}", *args]
    parser = make_parser(program)
    try:
        settings = parser.instantiate(parser.parse_args(args))
    except ArgumentError as error:
        raise InputError(_explain(str(error))) from error
    except InputError:
        raise
    except (ValueError, TypeError, ImportError) as error:  # raised by a class named in the settings
        raise InputError(str(error)) from error
    except OverflowError as error:
        raise InputError(f"Expected numbers of a usual size but one is too large: {error}.") from error
    for entry in dataclasses.fields(Experiment):
        if settings[entry.name] is None and entry.default is not None:
            raise InputError(f"Expected --{entry.name} to have a value but got null.")
    return Experiment(**{entry.name: settings[entry.name] for entry in dataclasses.fields(Experiment)})
