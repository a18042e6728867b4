"""`main`: runs a command and returns its exit code, with the user's own modules in reach; the command `completion`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from jdfl_lightning.cli.program import BAD_INPUT, CLOSED_PIPE, INTERRUPTED, PROGRAM, TERMINATED, starting
from jdfl_lightning.cli.runs import compare, evaluate, export, list_all, predict, report, rm, show
from jdfl_lightning.cli.training import diagnose, discover, download, fit, suite, validate, watch
from jdfl_lightning.core.errors import InputError, Interrupted, Note, Terminated, did_you_mean, plain
from jdfl_lightning.storage.trust import own_settings

_LONGEST = 2000
"""Limit on the characters of a message, which may quote a file."""


def completion(shell: Literal["bash", "zsh"] = "bash") -> int:
    """print a script for a shell that completes commands, options and values

    Args:
        shell: The shell. Save the script to a file that it reads when it starts.
    """
    from jdfl_lightning.config.parsing import command_options
    from jdfl_lightning.report.markup import render

    groups: dict[str, list[str]] = {}
    for group, word in (name.split() for name in COMMANDS if " " in name):
        groups.setdefault(group, []).append(word)
    options = {name: command_options(command) for name, command in COMMANDS.items()}
    commands = dict.fromkeys(name.partition(" ")[0] for name in COMMANDS)
    print(render("completion.sh", zsh=shell == "zsh", groups=groups, commands=commands, options=options), end="")
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "validate": validate,
    "fit": fit,
    "discover": discover,
    "diagnose": diagnose,
    "suite": suite,
    "test": evaluate,
    "predict": predict,
    "export": export,
    "report": report,
    "watch": watch,
    "runs list": list_all,
    "runs show": show,
    "runs compare": compare,
    "runs rm": rm,
    "download": download,
    "completion": completion,
}
"""By the words of the command line."""
_IMPORT_NOTHING = (report, list_all, show, compare, rm, watch, download, completion)
"""Commands that import no class that a config or a run folder names."""
_LONG = ("fit", "discover", "diagnose", "suite")
"""Commands that do more than print something."""


def summary(command: Callable[..., int]) -> str:
    """Return what a command does, in one line."""
    return (command.__doc__ or "").partition("\n")[0]


def _help(group: str = "") -> str:
    """Return the help of all commands, or of those whose first word is given."""
    chosen = {name: command for name, command in COMMANDS.items() if name.startswith(group)}
    width = max(map(len, chosen))
    commands = "\n".join(f"  {name:{width}}  {summary(command)}" for name, command in chosen.items())
    return (
        f"usage: {PROGRAM} COMMAND [OPTIONS]\n\n"
        "Joint Domain-Class Federated Learning with PyTorch Lightning.\n\n"
        f"commands:\n{commands}\n\n"
        f"{PROGRAM} COMMAND --help tells the options of a command; {PROGRAM} --version the version."
    )


def _show_note(message: Warning | str, *_: object, **__: object) -> None:
    print(f"note: {plain(str(message), _LONGEST)}", file=sys.stderr)


def add_own_modules(args: Sequence[str]) -> None:
    """Put the working folder and the folders of configs at the end of ``sys.path``, for classes that settings name.

    Nothing is added if the command uses a run folder that this user did not make: a file beside it could have the name
    of a module that some library tries to import. ``--trust true`` adds them nevertheless.

    Args:
        args: the arguments of a command.
    """
    from jdfl_lightning.config import given_values, joined

    args = joined(args)
    named = [*given_values(args, "run"), *given_values(args, "resume")]
    runs = [Path(run) for run in named if run not in ("auto", "null")]
    try:
        folders = [run.parent.parent if run.is_file() else run for run in runs]  # a checkpoint names its run
    except OSError:  # no name of a file, which the command reports
        return
    trust = "".join(given_values(args, "trust")[-1:]).lower() == "true"
    if not trust and not all(map(own_settings, folders)):
        return
    configs = [Path(config).parent for config in given_values(args, "config") if Path(config).is_file()]
    for folder in (*configs, Path.cwd()):
        if str(folder.absolute()) not in sys.path:
            sys.path.append(str(folder.absolute()))


def _find_command(args: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of a command, of one word or two, and the arguments after it."""
    for words in (1, 2):
        if (name := " ".join(args[:words])) in COMMANDS:
            return name, list(args[words:])
    given = [word for word in args[:2] if not word.startswith("-")]
    group = any(name.startswith(f"{args[0]} ") for name in COMMANDS)
    name = " ".join(given if group else given[:1])
    near = did_you_mean(name, list(COMMANDS))
    raise InputError(f"Expected a command, one of {', '.join(COMMANDS)}, but got {name or args[0]!r}.{near}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a user error ends in one line and exit code 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    group = f"{args[0]} " if args and any(name.startswith(f"{args[0]} ") for name in COMMANDS) else ""
    asked = args[1:] if group else args
    if not asked or asked[0] in ("-h", "--help"):
        print(_help(group))
        return 0 if asked else BAD_INPUT
    if args[0] == "--version":
        print(f"{PROGRAM} {version('jdfl-lightning')}")
        return 0
    try:
        name, rest = _find_command(args)
        with warnings.catch_warnings():
            # show notes to the user, but not the libraries' warnings to developers
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", Note)
            warnings.showwarning = _show_note
            with starting(args):
                from jdfl_lightning.config import parse_command

            command = COMMANDS[name]
            if command not in _IMPORT_NOTHING:
                add_own_modules(rest)
            return command(**parse_command(f"{PROGRAM} {name}", command, rest))
    except InputError as error:
        print(f"{PROGRAM}: {plain(' '.join(str(error).split()), _LONGEST)}", file=sys.stderr)
        return BAD_INPUT
    except (BrokenPipeError, SystemExit) as error:  # the reader closed the pipe; rich exits then
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if args[0] in _LONG:
            print(f"{PROGRAM}: the standard output was closed, which ended the command", file=sys.stderr)
        return CLOSED_PIPE
    except OSError as error:  # an error of a disk, folder or file
        print(f"{PROGRAM}: {plain(str(error), _LONGEST)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as error:
        terminated = isinstance(error, Terminated)
        print(f"{PROGRAM}: {'terminated' if terminated else 'interrupted'}", file=sys.stderr)
        if isinstance(error, Interrupted) and str(error):
            print(f"resume with: {error}")
        return TERMINATED if terminated else INTERRUPTED
