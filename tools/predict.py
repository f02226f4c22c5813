"""`python tools/predict.py ...`, the same as `vil predict ...`."""

import sys

from vil.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["predict", *sys.argv[1:]]))
