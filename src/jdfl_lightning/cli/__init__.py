"""The command line: a command is a function whose arguments and docstring define the options.

Libraries are imported by the command that needs them.
"""

from jdfl_lightning.cli.main import COMMANDS, main, summary
from jdfl_lightning.cli.program import BAD_INPUT, FAILED, PROGRAM

__all__ = ["BAD_INPUT", "COMMANDS", "FAILED", "PROGRAM", "main", "summary"]
