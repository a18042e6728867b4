"""What a setting is for, declared on its field and read by all who compare settings: resume, report, sites, trust."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

Role = Literal["result", "length", "place", "output"]
"""result: it alters the numbers of a round. length: how far a run goes, which rounds are evaluated. place: where and
how fast it is computed. output: what is shown, kept and written. All but the first may change when a run is resumed."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    factory: Callable[[], Any] = dataclasses.MISSING,  # type: ignore[assignment]
    role: Role = "result",
    phase_1: bool = False,
    in_paper: bool = True,
    group: bool = False,
) -> Any:
    """Return a dataclass field with its role.

    Args:
        default: the default value.
        factory: makes the default value, in place of `default`.
        role: what the setting is for.
        phase_1: whether it decides what clients send in Phase 1.
        in_paper: whether the paper has it; its default is what the paper does, if not.
        group: whether its value is a dataclass of further settings, whose roles count.
    """
    metadata = {"role": role, "phase_1": phase_1, "in_paper": in_paper, "group": group}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Declared:
    """A setting, as it was declared."""

    name: str
    """With dots: ``clustering.epochs``."""
    default: Any
    role: Role
    phase_1: bool
    in_paper: bool


def declared_settings(settings: type, prefix: str = "") -> Iterator[Declared]:
    """Give all settings of a dataclass, those of its groups included.

    Args:
        settings: the dataclass.
        prefix: of the names.
    """
    for field in dataclasses.fields(settings):
        role, name = field.metadata, f"{prefix}{field.name}"
        if role["group"]:
            yield from declared_settings(field.default_factory, f"{name}.")  # type: ignore[arg-type]
        else:
            yield Declared(name, field.default, role["role"], role["phase_1"], role["in_paper"])


def flat_settings(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Give the settings of a config one by one, with their dotted names.

    >>> dict(flat_settings({"lr": 0.1, "data": {"class_path": "PACS", "init_args": {"size": 8}}}))
    {'lr': 0.1, 'data.class_path': 'PACS', 'data.init_args.size': 8}
    """
    if isinstance(settings, dict) and settings:
        for key, value in settings.items():
            yield from flat_settings(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, settings


def chosen(settings: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return, of settings with dotted names, those that have one of these names or are part of it.

    >>> chosen({"data.class_path": "PACS", "data.init_args.size": 32, "lr": 0.1}, ("data",))
    {'data.class_path': 'PACS', 'data.init_args.size': 32}
    """
    starts = tuple(f"{name}." for name in names)
    return {key: value for key, value in settings.items() if f"{key}.".startswith(starts)}
