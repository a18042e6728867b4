"""A class that the user names, with its arguments: kept as plain values, built where it is used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from jdfl_lightning.core.errors import InputError, did_you_mean, without_stop


@dataclass(frozen=True, init=False, repr=False)
class Part:
    """A class or function by its import path, with arguments: an optimizer, a callback, a network.

    A run builds it anew wherever it is used: for each fit, in each process. So it is kept as plain values, which can be
    written to a config and sent to a worker; to read them there imports nothing.

    Args:
        target: the class or function, or its import path.
        init_args: its arguments by name: plain values, and functions that can be imported; those that equal the default
            are left out.

    >>> import torch
    >>> part = Part(torch.optim.AdamW, lr=0.01)
    >>> part
    Part('torch.optim.adamw.AdamW', lr=0.01)
    >>> type(part.build([torch.zeros(1, requires_grad=True)])).__name__
    'AdamW'
    """

    class_path: str
    init_args: dict[str, Any]

    def __init__(self, target: str | Callable[..., Any], /, **init_args: Any) -> None:
        path = target if isinstance(target, str) else f"{target.__module__}.{target.__qualname__}"
        found = load(path)
        if inspect.getattr_static(found, "__module__", "") != "__main__":
            path = f"{found.__module__}.{found.__qualname__}"  # one name for a class, however it was imported
        defaults = {name: p.default for name, p in parameters(found).items() if p.default is not p.empty}
        plain = {name: _plain(value, name) for name, value in init_args.items()}
        given = {n: value for n, value in plain.items() if n not in defaults or not _equal(value, defaults[n])}
        object.__setattr__(self, "class_path", path)
        object.__setattr__(self, "init_args", given)

    def __repr__(self) -> str:
        """Show the path and the arguments."""
        return f"Part({', '.join([repr(self.class_path), *(f'{n}={v!r}' for n, v in self.init_args.items())])})"

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def name(self) -> str:
        """Name of the class, without its module."""
        return self.class_path.rpartition(".")[2]

    def load(self) -> Any:
        """Import the class or function."""
        return load(self.class_path)

    def accepts(self, name: str) -> bool:
        """Return whether it has an argument of this name."""
        return name in parameters(self.load())

    def argument(self, name: str) -> Any:
        """Return the value of an argument: as given, or its default; None if it has no such argument."""
        parameter = parameters(self.load()).get(name)
        default = None if parameter is None or parameter.default is parameter.empty else parameter.default
        return self.init_args.get(name, default)

    def build(self, *args: Any, **more: Any) -> Any:
        """Build it, with further arguments of the run."""
        target = self.load()
        texts = {name: value for name, value in self.init_args.items() if value and isinstance(value, (str, list))}
        known = parameters(target) if texts else {}  # to look at a signature takes longer than to make an optimizer
        # an argument that is declared as a function is given by its import path
        functions = {
            name: _functions(value)
            for name, value in texts.items()
            if "Callable" in str(getattr(known.get(name), "annotation", ""))
        }
        return target(*args, **(self.init_args | functions | more))

    def check(self, flag: str, kind: type, supplied: Collection[str] = ()) -> None:
        """Raise an `InputError` unless it is a class of a kind that takes these arguments.

        Args:
            flag: the setting, such as ``--optimizer``.
            kind: the class that it must be a subclass of.
            supplied: names of the arguments that the run supplies; the user may not.
        """
        found = self.load()
        if not isinstance(found, type) or not issubclass(found, kind):
            raise InputError(f"Expected {flag} to be a {kind.__name__} but {self.class_path} is not.")
        known = parameters(found)
        for name in self.init_args:
            if name in supplied:
                raise InputError(f"Expected {flag} without {name}, which the run supplies, but it is given.")
            if name not in known and not any(p.kind is p.VAR_KEYWORD for p in _signatures(found)[-1].values()):
                options = [option for option in known if option not in supplied]
                raise InputError(
                    f"Expected an option of {self.name} but it has no {flag}.{name}: it has {', '.join(options)}."
                    f"{did_you_mean(name, options)}"
                )
        missing = [
            name
            for name, p in known.items()
            if p.default is p.empty and name not in self.init_args and name not in supplied
        ]
        if missing:
            raise InputError(f"Expected {flag}.{missing[0]}: {self.name} needs it.")


def _plain(value: Any, name: str) -> Any:
    """Return a value as a YAML file has it: tuples as lists, a function or class by its import path."""
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, name) for key, item in value.items()}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Path):
        return str(value)
    path = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    if callable(value) and "<" not in path and load(path) is value:
        return path
    raise InputError(f"Expected {name} to be plain values or an importable function, for a config, but got {value!r}.")


def _equal(value: Any, default: Any) -> bool:
    """Return whether an argument is its default, a list being equal to a tuple of the same items."""
    try:
        return bool(value == _plain(default, ""))
    except (InputError, ValueError):  # a default of another kind
        return False


def _functions(value: Any) -> Any:
    """Import the functions that import paths name."""
    return [_functions(item) for item in value] if isinstance(value, list) else load(value)


def _signatures(target: Callable[..., Any]) -> list[Mapping[str, inspect.Parameter]]:
    """Return the signature of a function or class, and those of the parent classes that ``**`` arguments go to."""
    found: list[Mapping[str, inspect.Parameter]] = []
    for parent in target.__mro__ if isinstance(target, type) else (target,):
        own: Mapping[str, inspect.Parameter] = {}
        with suppress(TypeError, ValueError):  # a class of a compiled module may have none
            if isinstance(parent, type):
                own = dict([*inspect.signature(getattr(parent, "__init__")).parameters.items()][1:])  # noqa: B009
            else:
                own = inspect.signature(parent).parameters
        found.append(own)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
            break
    return found


def parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be given by name; those of parent classes too, where they are passed on.

    >>> from jdfl_lightning import DigitsDomains
    >>> list(parameters(DigitsDomains))[:4]
    ['size', 'num_clients', 'test_fraction', 'augment']
    """
    found: dict[str, inspect.Parameter] = {}
    for own in _signatures(target):
        for name, parameter in own.items():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(name, parameter)
    return found


def load(path: str) -> Any:
    """Import a class or function by its path; raise an `InputError` that names what is missing."""
    module, _, name = path.rpartition(".")
    if not module:
        raise InputError(f"Expected the import path of a class, such as package.module.Name, but got {path!r}.")
    try:
        home: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # the user's module lacks another one
            raise InputError(f"{module} cannot be imported: {without_stop(error)}.") from error
        if "." not in module:
            raise InputError(f"Expected an import path but got {path!r}: there is no module {module}.") from None
        home = load(module)  # a class inside a class
    except Exception as error:  # a user's module may raise anything
        raise InputError(f"{module} cannot be imported: {type(error).__name__}: {without_stop(error)}.") from error
    found = getattr(home, name, None)
    if not callable(found):
        names = [known for known, value in vars(home).items() if callable(value)]
        raise InputError(f"Expected an import path but {module} has no {name}.{did_you_mean(name, names)}")
    return found
