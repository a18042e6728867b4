"""The program's name and its exit codes."""

PROGRAM = "jdfl-lightning"
FAILED, BAD_INPUT, INTERRUPTED, CLOSED_PIPE, TERMINATED = 1, 2, 130, 141, 143
