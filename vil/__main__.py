"""Entry point of the command `vil`, also as `python -m vil COMMAND ...`."""

import sys
from collections.abc import Sequence

from vil.utils.stop_signals import stop_signals


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code, see `vil.cli.main`."""
    with stop_signals():  # before the imports, in which Ctrl-C would print a traceback
        from vil.cli import main as run

        return run(argv)


if __name__ == "__main__":
    sys.exit(main())
