"""``python -m jdfl_lightning``: the command line."""

import sys

from jdfl_lightning.cli import main

if __name__ == "__main__":
    sys.exit(main())
