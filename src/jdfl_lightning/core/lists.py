"""Lists on the command line: values separated by commas."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")
_MOST = 10_000
"""Numbers that a list can have."""


class _Separated(list[T]):
    def __init__(self, value: object) -> None:
        """Read a string, or the number or list that a YAML parser makes of it."""
        super().__init__(self._read(",".join(map(str, value)) if isinstance(value, list) else str(value)))

    def _read(self, text: str) -> list[T]:
        raise NotImplementedError

    def __str__(self) -> str:
        return ",".join(map(str, self))


class Names(_Separated[str]):
    """Words.

    >>> Names("base, graded")
    ['base', 'graded']
    """

    def _read(self, text: str) -> list[str]:
        return [part.strip() for part in text.split(",")]


class Numbers(_Separated[int]):
    """Integers, separated by commas or as a range.

    >>> Numbers("0,1,5"), Numbers("2..4")
    ([0, 1, 5], [2, 3, 4])
    """

    def _read(self, text: str) -> list[int]:
        first, dots, last = text.partition("..")
        try:
            if dots:
                begin = int(first)
                numbers = list(range(begin, min(int(last), begin + _MOST) + 1))
            else:
                numbers = [int(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if not 0 < len(numbers) <= _MOST:
            raise ValueError(f"expected numbers such as 0,1,2 or 2..7 but got {text!r}")
        return numbers


class Fractions(_Separated[float]):
    """Floating-point numbers; the list may be empty.

    >>> Fractions("0.7,0.85"), Fractions("")
    ([0.7, 0.85], [])
    """

    def _read(self, text: str) -> list[float]:
        try:
            return [float(part) for part in text.split(",")] if text else []
        except ValueError:
            raise ValueError(f"expected numbers such as 0.7,0.8 but got {text!r}") from None
