"""The role of a setting, declared on its field and used where settings are compared: resume, report, sites, trust."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Literal, get_type_hints

Role = Literal["result", "length", "place", "output"]
"""result: changes the numbers of a round. length: how many rounds are run, which are evaluated. place: where and how
fast they are computed. output: what is shown, kept and written. All but `result` may change when a run is resumed."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    factory: Callable[[], Any] | None = None,
    role: Role = "result",
    phase_1: bool = False,
    in_paper: bool = True,
    group: type | None = None,
) -> Any:
    """Return a dataclass field with its role.

    Args:
        default: the default value.
        factory: makes the default value, in place of `default`.
        role: the role of the setting.
        phase_1: whether clients' updates in Phase 1 depend on it.
        in_paper: whether the paper has it; if not, its default is what the paper does.
        group: a dataclass of settings with their own roles, which is the setting's type; its defaults are the default.
    """
    metadata = {"role": role, "phase_1": phase_1, "in_paper": in_paper, "group": group}
    factory = factory or group
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Declared:
    """A declared setting."""

    name: str
    """Dotted name: ``clustering.epochs``."""
    default: Any
    role: Role
    phase_1: bool
    in_paper: bool
    hint: Any
    """Its type."""


def declared_settings(settings: type, prefix: str = "") -> Iterator[Declared]:
    """Yield all settings of a dataclass, including those of its groups.

    Args:
        settings: the dataclass.
        prefix: prefix of the names.
    """
    hints = _hints(settings)
    for field in dataclasses.fields(settings):
        role, name = field.metadata, f"{prefix}{field.name}"
        if role["group"] is not None:
            yield from declared_settings(role["group"], f"{name}.")
        else:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            yield Declared(name, default, role["role"], role["phase_1"], role["in_paper"], hints[field.name])


@cache
def _hints(settings: type) -> dict[str, Any]:
    return get_type_hints(settings)


def flat_settings(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config one by one, with their dotted names.

    >>> dict(flat_settings({"lr": 0.1, "data": {"class_path": "PACS", "init_args": {"size": 8}}}))
    {'lr': 0.1, 'data.class_path': 'PACS', 'data.init_args.size': 8}
    """
    if isinstance(settings, dict) and settings:
        for key, value in settings.items():
            yield from flat_settings(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, settings


def chosen(settings: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the settings that have one of these dotted names or are below it.

    >>> chosen({"data.class_path": "PACS", "data.init_args.size": 32, "lr": 0.1}, ("data",))
    {'data.class_path': 'PACS', 'data.init_args.size': 32}
    """
    starts = tuple(f"{name}." for name in names)
    return {key: value for key, value in settings.items() if f"{key}.".startswith(starts)}


def option_name(key: str) -> str:
    """Return the name on the command line of a setting in a config.

    >>> option_name("data.class_path"), option_name("data.init_args.size")
    ('data', 'data.size')
    """
    return key.replace(".init_args", "").removesuffix(".class_path")
