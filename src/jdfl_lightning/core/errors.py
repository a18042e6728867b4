"""Messages to the user: errors that end a command with one clear line and exit code 2, and notes."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class InputError(ValueError):
    """The user's input cannot be used; the message names it and a remedy."""


class StorageError(InputError):
    """Something cannot be written or read back: a full disk, a folder without permission, a damaged file."""


@contextmanager
def reading(expected: str, file: Path, missing: InputError | None = None) -> Iterator[None]:
    """Raise a `StorageError` if a file cannot be read in the block, or holds something else, whatever that causes.

    Args:
        expected: what it should hold.
        file: the file.
        missing: raised instead if it does not exist.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if missing is not None and isinstance(error, FileNotFoundError):
            raise missing from error
        raise StorageError(f"Expected {expected} but {file} cannot be read: {error}.") from error


class PublicError(InputError):
    """An `InputError` whose message names no file and nothing of the data, so that it may leave a site."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a run that can be resumed; holds the command to resume it."""


class Terminated(Interrupted):
    """SIGTERM, as job queues send it, where Ctrl-C would have been `Interrupted`; the command may be empty."""


class Note(UserWarning):
    """Something the user should know; the command continues."""


def notify(text: str) -> None:
    """Tell the user something; `Note` says how it can be caught or silenced."""
    warnings.warn(text, Note, stacklevel=3)


def last_line(reason: str) -> str:
    """Return the last line of an error's text; of a traceback, what happened, in one line.

    >>> last_line("Traceback (most recent call last):" + chr(10) + "KeyError: 'x'")
    "KeyError: 'x'"
    >>> last_line(chr(10).join(["Traceback (most recent call last):", '  File "x.py"', "    y()", "Error: one", "two"]))
    'Error: one two'
    """
    lines = reason.strip().splitlines() or ["no reason was given"]
    heads = [place for place, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not heads:
        return lines[-1]
    message = dropwhile(lambda line: line.startswith(" "), lines[heads[-1] + 1 :])
    return " ".join(line.strip() for line in message) or lines[-1]


def without_stop(error: object) -> str:
    """Return the text of an error without its full stop, to put at the end of a sentence.

    >>> without_stop(ValueError("Expected a number."))
    'Expected a number'
    """
    return str(error).rstrip(" .\n")


def require(holds: bool, flag: str, expected: str, value: object) -> None:
    """Raise an `InputError` that names the flag, unless the condition holds.

    >>> require(1.5 <= 1, "--phi", "between 0 and 1", 1.5)
    Traceback (most recent call last):
    jdfl_lightning.core.errors.InputError: Expected --phi to be between 0 and 1 but got 1.5.
    """
    if not holds:
        raise InputError(f"Expected {flag} to be {expected} but got {value!r}.")


def require_choice(flag: str, value: object, choices: Sequence[object]) -> None:
    """Raise an `InputError` that names the choices, and the nearest of them, unless the value is one.

    >>> require_choice("--score", "Max", ("max", "sum"))
    Traceback (most recent call last):
    jdfl_lightning.core.errors.InputError: Expected --score to be one of 'max', 'sum' but got 'Max'. Did you mean 'max'?
    """
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise InputError(f"Expected {flag} to be one of {listed} but got {value!r}.{did_you_mean(value, choices)}")


def did_you_mean(value: object, choices: Sequence[object]) -> str:
    """Return a question that suggests the choice spelt most like a value; empty if none is similar.

    >>> did_you_mean("Graded", ["hard", "graded"]), did_you_mean("x", ["hard", "graded"])
    (" Did you mean 'graded'?", '')
    """
    spelt = {str(choice).lower(): choice for choice in choices}
    near = difflib.get_close_matches(str(value).lower(), list(spelt), n=1)
    return f" Did you mean {spelt[near[0]]!r}?" if near else ""


def require_type(flag: str, value: object, hint: Any) -> None:
    """Raise an `InputError` unless a value matches a type hint; the hint may hold choices (`Literal`).

    A bool or NaN is not accepted as a number; a path is accepted as a string.

    >>> require_type("--rounds", "3", int)
    Traceback (most recent call last):
    jdfl_lightning.core.errors.InputError: Expected --rounds to be of type int but got '3'.
    """
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if any(_is_a(value, option) for option in options):
        return
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    if len(options) == 1 and choices:
        require_choice(flag, value, choices)
    plain_types = [option for option in options if get_origin(option) is None]  # in Python 3.10 list[str] is a type
    classes = [option for option in plain_types if isinstance(option, type) and option is not type(None)]
    names = [option.__name__ for option in classes] + [repr(choice) for choice in choices]
    names += [str(option) for option in options if get_origin(option) in (list, dict)]
    name = value.__name__ if isinstance(value, type) else value
    known = [f"{found.__name__}()" for option in classes for found in subclasses(option)]
    question = did_you_mean(f"{name}()", known).replace("'", "") if isinstance(name, str) else ""
    raise InputError(f"Expected {flag} to be of type {' or '.join(names)} but got {_shown(value)}.{question}")


def _shown(value: object) -> str:
    """Return a value with its type, if it is a number of NumPy, which before version 2 showed it as a plain one."""
    shown, kind = repr(value), type(value)
    plain_number = kind.__module__ == "numpy" and shown == str(value)
    return f"np.{kind.__name__}({shown})" if plain_number else shown


def _is_a(value: object, option: Any) -> bool:
    if option is Any:
        return True
    if get_origin(option) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(option))
    if get_origin(option) is list:
        return isinstance(value, list) and all(_is_a(item, get_args(option)[0]) for item in value)
    if get_origin(option) is dict:
        return isinstance(value, dict)
    if option is int:
        return type(value) is int
    if option is float:
        return type(value) in (int, float) and value == value  # NaN is not equal to itself
    if option is str:
        return isinstance(value, (str, os.PathLike))
    return not isinstance(option, type) or isinstance(value, option)  # other hints are not checked


def subclasses(parent: type) -> Iterator[type]:
    """Yield all subclasses of a class, unless it is a built-in."""
    children: list[type] = [] if parent.__module__ == "builtins" else parent.__subclasses__()
    for child in children:
        yield child
        yield from subclasses(child)


def require_types(settings: Any, prefix: str = "--") -> None:
    """Raise an `InputError` that names the first field of a dataclass whose value is not of its type.

    Args:
        settings: the object.
        prefix: prefix of a field's name on the command line, such as ``--trainer.``.
    """
    kind: Any = type(settings)
    hints = _hints(kind)
    for entry in dataclasses.fields(settings):
        if hasattr(settings, entry.name):
            require_type(f"{prefix}{entry.name}", getattr(settings, entry.name), hints.get(entry.name, Any))


@functools.cache  # evaluating them takes longer than looking at the values
def _hints(kind: type) -> dict[str, Any]:
    """Return the types of a class's fields, as far as they exist when the code runs."""
    hints: dict[str, Any] = {}
    for parent in reversed(kind.__mro__):
        try:
            hints |= get_type_hints(parent)
        except (NameError, AttributeError, TypeError):  # a subclass may have hints that exist only for type checkers
            continue
    return hints


def plain(text: str, most: int = 300) -> str:
    """Return untrusted text as one line that is safe to show: printable characters, at most `most`.

    >>> plain("no\\x1b[2J luck\\n"), plain("x" * 9, most=4)
    ('no [2J luck', 'x...')
    """
    line = "".join(c if c.isprintable() else " " for c in text[: most + 1]).strip()
    return line if len(line) <= most else f"{line[: most - 3]}..."
