"""What the user sees and does: the display, Ctrl-C, loggers."""
