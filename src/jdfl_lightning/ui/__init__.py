"""User interface: the display, tables, loggers."""
