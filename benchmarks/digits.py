"""Train vil_nano on the scanned digits with three seeds, to measure the accuracy in the README.

  python benchmarks/digits.py

The recipe was tuned on the same validation images, so the accuracy is optimistic. Prints top-1 on
the 360 validation digits (best checkpoint and last epoch), the time of each run, and the medians.
tests/test_training.py (marker slow) checks the accuracy.
"""

import platform
import statistics
import tempfile
import time
from pathlib import Path

from shared import make_parser, train

SEEDS = (0, 1, 2)


def run(seed: int) -> tuple[float, float, float]:
    """Train with a seed. Returns (best top-1, top-1 after the last epoch, minutes)."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        top1 = train("digits/vil_nano.yaml", Path(folder), f"SEED={seed}")
        return max(top1), top1[-1], (time.perf_counter() - start) / 60


if __name__ == "__main__":
    make_parser(__doc__).parse_args()
    rows = [run(seed) for seed in SEEDS]
    print(f"\n{platform.processor() or platform.machine()}, {platform.platform()}")
    for seed, (best, last, minutes) in zip(SEEDS, rows):
        print(f"seed {seed}: best {best:.2f}, last {last:.2f}, {minutes:.1f} min")
    best, last, minutes = (statistics.median(column) for column in zip(*rows))
    print(f"median: best {best:.2f}, last {last:.2f}, {minutes:.1f} min")
