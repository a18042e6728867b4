"""The protocol of a run: who has which images, and which of them pick the round that counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jdfl_lightning.data.base import option_defaults
from jdfl_lightning.storage.names import Selection

PAPER = "paper"
"""Name of the paper's protocol: its numbers can stand beside runs that follow it."""
_WORDS = {
    "val_fraction": "validation",
    "unseen": "unseen",
    "domain_mix": "mixed",
    "label_skew": "skewed",
    "drop_duplicates": "without duplicates",
}
"""Arguments of a data module that the paper's protocol leaves unused, in words."""
_PICKED: dict[Selection, str] = {
    "test": "in the best round, picked on the test images, as in the paper",
    "val": "in the best round, picked on validation images",
    "last": "in the last round",
}


@dataclass(frozen=True)
class Protocol:
    """The protocol of a run."""

    select: Selection
    """How the round that counts is picked."""
    name: str
    """In a few words: in what it differs from the paper's."""

    @classmethod
    def of(cls, options: Mapping[str, object], select: Selection) -> Protocol:
        """Return the protocol of a data module's arguments.

        Args:
            options: the arguments by name; those that are left out have their defaults.
            select: how the round that counts is picked.

        >>> Protocol.of({"size": 32, "val_fraction": 0.1, "unseen": ["photo"]}, "val").name
        'validation 0.1, unseen photo'
        >>> Protocol.of({}, "test").name, Protocol.of({}, "last").name
        ('paper', 'last round')
        """
        changes = []
        for name, word in _WORDS.items():
            value = options.get(name, option_defaults()[name])
            if value != option_defaults()[name]:
                shown = " and ".join(map(str, value)) if isinstance(value, list) else "" if value is True else value
                changes.append(f"{word} {shown}".strip())
        changes += ["last round"] if select == "last" else []
        return cls(select, ", ".join(changes) or PAPER)

    @property
    def picked(self) -> str:
        """Which round an accuracy is of, in words."""
        return _PICKED[self.select]
