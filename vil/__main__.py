"""`python -m vil COMMAND ...`, the same as `vil COMMAND ...`."""

import sys

from vil.cli import main

if __name__ == "__main__":
    sys.exit(main())
