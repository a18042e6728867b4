"""The command `completion`."""

from __future__ import annotations

from typing import Literal


def completion(shell: Literal["bash", "zsh"] = "bash") -> int:
    """print a script for a shell that completes commands, options and values

    Args:
        shell: The shell. Save the script to a file that it reads when it starts.
    """
    from jdfl_lightning.cli.main import COMMANDS
    from jdfl_lightning.config.completion import completion_script

    print(completion_script(COMMANDS, shell), end="")
    return 0
