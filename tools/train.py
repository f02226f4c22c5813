"""`torchrun ... tools/train.py ...`, the same as `vil train ...`."""

import sys

from vil.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
