"""`torchrun ... tools/evaluate.py ...`, the same as `vil evaluate ...`."""

import sys

from vil.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
