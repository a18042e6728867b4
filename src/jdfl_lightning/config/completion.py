"""What a shell can complete: the options of commands and of a run's settings, and the values that some of them take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_type_hints

import jdfl_lightning
from jdfl_lightning.config.experiment import Experiment
from jdfl_lightning.config.files import shipped_configs
from jdfl_lightning.config.words import possible_values
from jdfl_lightning.core.errors import subclasses
from jdfl_lightning.core.parts import parameters
from jdfl_lightning.core.settings import declared_settings

Options = dict[str, list[str]]
"""Options, each with the values that it takes; none where it takes any."""
_NAMED_CLASSES = (
    *("data", "algorithm", "supervision", "backend", "logger"),
    *("optimizer", "lr_scheduler", "round_scheduler", "clustering.criterion"),
)
"""Settings whose values are names of classes."""

Shell = Literal["bash", "zsh"]
_SCRIPT = """\
_jdfl_lightning() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
    local options="" values="" first=1
    case "$command" in
        {groups}) command="$command ${{COMP_WORDS[2]}}"; first=2 ;;
    esac
    if (( COMP_CWORD <= first )); then
        case "$command" in
{second}
            *) values="{commands}" ;;
        esac
        COMPREPLY=($(compgen -W "$values" -- "$word"))
        return
    fi
    case "$command" in
{options}
    esac
    case "$command $before" in
{values}
    esac
    if [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$word"))
        [[ ${{#COMPREPLY[@]}} -gt 0 ]] || COMPREPLY=($(compgen -f -- "$word"))
    elif [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _jdfl_lightning jdfl-lightning
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def completion_script(commands: Mapping[str, Callable[..., Any]], shell: Shell) -> str:
    """Return a script that has a shell complete commands, options and values; it runs no Python.

    Args:
        commands: the functions of the commands by their words, of which there may be two.
        shell: the shell; zsh uses bash's script.
    """
    known = {name: command_options(command) for name, command in commands.items()}
    groups = sorted({name.partition(" ")[0] for name in known if " " in name})
    pairs = [name.split() for name in known if " " in name]
    second = [
        f'            "{group} "*) values="{" ".join(word for first, word in pairs if first == group)}" ;;'
        for group in groups
    ]
    options = [f'        "{name}") options="{" ".join(found)}" ;;' for name, found in known.items()]
    values = [
        f'        "{name} {option}") values="{" ".join(words)}" ;;'
        for name, found in known.items()
        for option, words in found.items()
        if words
    ]
    script = _SCRIPT.format(
        groups="|".join(groups),
        second="\n".join(second),
        commands=" ".join(dict.fromkeys(name.partition(" ")[0] for name in known)),
        options="\n".join(options),
        values="\n".join(values),
    )
    return _ZSH + script if shell == "zsh" else script


def command_options(command: Callable[..., Any]) -> Options:
    """Return the options of a command; those of a run too, if it takes settings."""
    signature, hints = inspect.signature(command).parameters, get_type_hints(command)
    found: Options = {}
    for name, parameter in signature.items():
        if name != "settings" and str(parameter.annotation) != "list[Path]":
            found[f"--{name.replace('__', '.')}"] = _choices(hints[name])
    if "settings" in signature:
        found = setting_options() | found
    return found | {"--help": []}


def setting_options() -> Options:
    """Return the options that are a run's settings, with those of all classes of this package that they can name."""
    found: Options = {"--config": sorted(shipped_configs()), "--trust": ["true", "false"], "--print_config": []}
    found |= {f"--{setting.name}": _choices(setting.hint) for setting in declared_settings(Experiment)}
    hints = get_type_hints(Experiment)
    for name in ("data", "algorithm", "supervision", "backend"):
        for kind in subclasses(hints[name]):
            if kind.__name__ in jdfl_lightning.__all__:
                found |= {f"--{name}.{argument}": [] for argument in parameters(kind)}
    for name in _NAMED_CLASSES:
        found[f"--{name}"] = possible_values(name)
    return found


def _choices(hint: Any) -> list[str]:
    """Return the values that a type allows; none if they cannot be listed.

    >>> _choices(Literal["max", "sum"] | None), _choices(bool), _choices(int)
    (['max', 'sum'], ['true', 'false'], [])
    """
    if hint is bool:
        return ["true", "false"]
    parts = get_args(hint)
    if parts and all(isinstance(part, str) for part in parts):  # a Literal
        return list(parts)
    return [choice for part in parts for choice in _choices(part)] if parts else []
