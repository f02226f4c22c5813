"""Entry point of `python -m vil COMMAND ...`, which is the same as `vil COMMAND ...`."""

import sys

from vil.cli import main

if __name__ == "__main__":
    sys.exit(main())
