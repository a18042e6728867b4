"""User interface: the display, Ctrl-C, loggers."""
