"""An mkdocs hook: what the site says of the code is made from the code whenever the site is built.

A page has a line ``<!-- generated: NAME -->`` where the text of the function of that name in `GENERATED` goes, and each
room of the package has a page of the API. What is missing is a warning, which ``mkdocs build --strict`` takes for an
error. What the site has of the README and of the notebooks is in `repository.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import patch

import griffe
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import jdfl_lightning
from jdfl_lightning.algorithms import Algorithm
from jdfl_lightning.backends import Backend
from jdfl_lightning.callbacks import RunCallback
from jdfl_lightning.cli import COMMANDS, PROGRAM, main, summary
from jdfl_lightning.config import Experiment, as_dict
from jdfl_lightning.core.parts import parameters
from jdfl_lightning.data import DomainDataModule
from jdfl_lightning.federation.server import SitesBackend
from jdfl_lightning.regularizers import Regularizer
from jdfl_lightning.supervision import Supervision
from jdfl_lightning.ui.loggers import CSVLogger, TensorBoardLogger, WandbRounds

SOURCE = Path(jdfl_lightning.__file__).parent
log = get_plugin_logger("generate")


# --- commands -------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Return the help of every command."""
    parts = [f"```text\n{_help()}\n```"]
    for name, command in COMMANDS.items():
        parts.append(f"## {name}\n\n{summary(command)}.\n\n```text\n{_help(*name.split())}\n```")
    return "\n\n".join(parts)


def _help(*command: str) -> str:
    """Return what a command prints with --help, in lines of a width that does not depend on the terminal."""
    out = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}), redirect_stdout(out):
        try:
            main([*command, "--help"])
        except SystemExit as left:
            if left.code:
                raise RuntimeError(f"Expected {PROGRAM} {' '.join(command)} --help to work.") from left
    return out.getvalue().strip()


# --- settings -------------------------------------------------------------------------------------------------------


def choices() -> dict[str, list[type]]:
    """Return the classes that a setting can name, by the setting."""
    exported = [getattr(jdfl_lightning, name) for name in jdfl_lightning.__all__]
    classes = [item for item in exported if inspect.isclass(item) and not inspect.isabstract(item)]
    return {
        "data": [item for item in classes if issubclass(item, DomainDataModule)],
        "algorithm": [item for item in classes if issubclass(item, Algorithm)],
        "supervision": [item for item in classes if issubclass(item, Supervision)],
        "regularizers": [item for item in classes if issubclass(item, Regularizer)],
        "backend": [*(item for item in classes if issubclass(item, Backend)), SitesBackend],
        "callbacks": [item for item in classes if issubclass(item, RunCallback) and item is not RunCallback],
        "logger": [WandbRounds, CSVLogger, TensorBoardLogger],
    }


def settings() -> str:
    """Return every setting with its type, default and meaning; then those of what is nested in them or can be named."""
    default = Experiment()
    fields = list(_fields(Experiment))
    nested = {
        name: type(getattr(default, name)) for name, *_ in fields if dataclasses.is_dataclass(getattr(default, name))
    }
    nested = {name: kind for name, kind in nested.items() if name not in choices()}
    rows = []
    for name, kind, value, text in fields:
        if name in nested:
            kind, value, text = "settings", f"[below](#{name})", text
        elif name in choices():
            lists = {"callbacks": "list of {}", "regularizers": "list of {}"}
            kind = ({"logger": "{}, true or false"} | lists).get(name, "{}").format(f"[class](#{name})")
            value = f"`{_plain(value) if name == 'logger' or name in lists else _named(value)}`"
        else:
            value = f"`{_plain(value)}`"
        rows.append((f"`{name}`", kind, value, text))
    parts = [_table(rows)]
    for name, group in nested.items():
        parts.append(f"## {name}\n\n{_first_line(group)}\n\n{_option_table(name, group)}")
    for name, kinds in choices().items():
        parts.append(f"## {name}")
        parts += [f"### {kind.__name__}\n\n{_first_line(kind)}\n\n{_option_table(name, kind)}" for kind in kinds]
    return "\n\n".join(parts)


def _option_table(prefix: str, kind: type) -> str:
    rows = [(f"`{prefix}.{name}`", of, f"`{_plain(value)}`", text) for name, of, value, text in _fields(kind)]
    return _table(rows) if rows else "It has no options."


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["| setting | type | default | |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows])


def _fields(kind: type) -> Iterator[tuple[str, str, Any, str]]:
    """Yield name, type, default and meaning of a class's options: a dataclass's fields, or `__init__`'s arguments."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        texts = {name: member.docstring.value for name, member in _members(kind) if member.docstring}
        default = kind()
        found = {entry.name: getattr(default, entry.name) for entry in dataclasses.fields(kind) if entry.init}
    else:
        hints, texts, found = {}, {}, {}
        for name in parameters(kind):  # also those of a base, which **options stand for
            signatures = {
                base: inspect.signature(vars(base)["__init__"]) for base in kind.__mro__ if "__init__" in vars(base)
            }
            base = next(base for base, signature in signatures.items() if name in signature.parameters)
            hints[name] = get_type_hints(vars(base)["__init__"])[name]
            found[name] = signatures[base].parameters[name].default
            if name in (described := _arguments(base)):
                texts[name] = described[name]
    for name, value in found.items():
        if name not in texts:
            log.warning(f"{kind.__name__}.{name} has no docstring: a setting that nobody can know the meaning of.")
        yield name, _kind(hints[name]), value, " ".join(texts.get(name, "").split())


def _kind(hint: Any) -> str:
    """Say a type in the words of YAML."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_kind(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) in (list, dict):
        return f"{get_origin(hint).__name__} of {_kind(get_args(hint)[-1])}"
    words = {NoneType: "null", bool: "true or false", str: "text", int: "whole number", float: "number"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def _named(value: Any) -> str:
    """Return the class of an object, with the arguments that are not the class's own defaults."""
    usual = {name: default for name, _, default, _ in _fields(type(value))}
    unusual = {n: item for n, item in as_dict(value)["init_args"].items() if item != as_dict(usual[n])}
    return type(value).__name__ + (f" {_plain(unusual)}" if unusual else "")


def _plain(value: Any) -> str:
    return yaml.safe_dump(as_dict(value), default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


# --- what the code says of itself -----------------------------------------------------------------------------------


@cache
def _package() -> griffe.Module:
    package = griffe.load("jdfl_lightning", search_paths=[str(SOURCE.parent)], docstring_parser="google")
    assert isinstance(package, griffe.Module)
    return package


def _path(item: Any) -> str:
    """Return where a class, function or module of the package is defined."""
    return str(item.__name__) if inspect.ismodule(item) else f"{item.__module__}.{item.__qualname__}"


def _described(item: Any) -> griffe.Object:
    """Return what the source says of a class, function or module of the package."""
    found = _package()[_path(item).removeprefix("jdfl_lightning.")]
    assert isinstance(found, griffe.Object)
    return found


def _members(kind: type) -> Iterator[tuple[str, griffe.Object]]:
    """Yield the members of a class, those of its bases first."""
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("jdfl_lightning"):
            for name, member in _described(base).members.items():
                if isinstance(member, griffe.Object):
                    yield name, member


def _arguments(kind: type) -> dict[str, str]:
    """Return what the docstring of a class says of the arguments."""
    docstring = _described(kind).docstring
    sections = docstring.parse() if docstring else []
    return {
        argument.name: argument.description
        for section in sections
        if isinstance(section, griffe.DocstringSectionParameters)
        for argument in section.value
    }


def _first_line(item: Any) -> str:
    return str(inspect.getdoc(item)).partition("\n\n")[0].replace("\n", " ")


def undocumented() -> Iterator[str]:
    """Yield what the package exports and does not explain, with the members that a reader of the API would meet."""
    for export in jdfl_lightning.__all__:
        item = getattr(jdfl_lightning, export)
        if not _described(item).has_docstring:
            yield export
        if inspect.isclass(item):
            explained = {name for name, member in _members(item) if member.has_docstring}
            for name, member in _described(item).members.items():
                own = isinstance(member, griffe.Object) and member.labels != {"instance-attribute"}
                if own and not name.startswith("_") and name not in explained:
                    yield f"{export}.{name}"


@cache
def rooms() -> dict[str, list[Any]]:
    """Return all that the package exports, by the part of the package it comes from."""
    groups: dict[str, list[Any]] = {}
    for name in sorted(jdfl_lightning.__all__, key=str.lower):
        item = getattr(jdfl_lightning, name)
        groups.setdefault(_path(item).split(".")[1], []).append(item)
    return dict(sorted(groups.items()))


def _about(room: str) -> str:
    return _first_line(import_module(f"jdfl_lightning.{room}"))


def api() -> str:
    """Return a table of the pages of the API."""
    lines = ["| package | what it has | names |", "|---|---|---|"]
    for room, items in rooms().items():
        names = ", ".join(f"[`{_name(item)}`](api/{room}.md#{_path(item)})" for item in items)
        lines.append(f"| [{room}](api/{room}.md) | {_about(room)} | {names} |")
    return "\n".join(lines)


def _name(item: Any) -> str:
    return str(item.__name__).rpartition(".")[2]


def api_page(room: str) -> str:
    """Return the page of a room: mkdocstrings' directives for all that the package exports of it."""
    return "\n\n".join([f"# {room}", _about(room), *(f"::: {_path(item)}" for item in rooms()[room])])


# --- the hook -------------------------------------------------------------------------------------------------------

GENERATED = {"commands": commands, "settings": settings, "api": api}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the API."""
    for name in undocumented():
        log.warning(f"jdfl_lightning.{name} has no docstring.")
    for room in rooms():
        files.append(File.generated(config, f"api/{room}.md", content=api_page(room)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in what is generated."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda place: GENERATED[place[1]](), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show formulas of docstrings as they are written: nothing on the site typesets them."""
    return html.replace(":math:<code>", "<code>")
