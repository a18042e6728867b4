"""``python -m jdfl_lightning``: the command line."""

import sys

from jdfl_lightning.cli import PROGRAM, main

if __name__ == "__main__":
    sys.argv[0] = PROGRAM  # the name in the help of --data.help and the like
    sys.exit(main())
