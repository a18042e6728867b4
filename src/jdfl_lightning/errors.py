"""What a user is told: an error that ends a command with one clear line and exit code 2, or a note."""

from __future__ import annotations


class InputError(ValueError):
    """Something the user gave cannot be used; the message names it and the way out."""


class StorageError(InputError):
    """Something cannot be written or read back: a full disk, a folder without permission, a damaged file."""


class PublicError(InputError):
    """An `InputError` whose message names no file and nothing of the data, so that it may leave a site."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a run that can be continued; what it holds is the command for that."""


class Note(UserWarning):
    """Something the user should know; the command goes on."""


def require(holds: bool, flag: str, expected: str, value: object) -> None:
    """Raise an `InputError` that names the flag, unless the condition holds.

    >>> require(1.5 <= 1, "--phi", "between 0 and 1", 1.5)
    Traceback (most recent call last):
    jdfl_lightning.errors.InputError: Expected --phi to be between 0 and 1 but got 1.5.
    """
    if not holds:
        raise InputError(f"Expected {flag} to be {expected} but got {value!r}.")


def plain(text: str, most: int = 300) -> str:
    """Return text that somebody else wrote as one line that is safe to show: printable characters, and not too many.

    >>> plain("no\\x1b[2J luck\\n"), plain("x" * 9, most=4)
    ('no [2J luck', 'x...')
    """
    line = "".join(letter if letter.isprintable() else " " for letter in text[: most + 1]).strip()
    return line if len(line) <= most else f"{line[: most - 3]}..."
