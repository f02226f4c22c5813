"""The README's accuracy: vil_nano on the scanned digits, one run for each of three seeds.

  python benchmarks/digits.py

The recipe was chosen by its accuracy on these same images, so the figures flatter it.
Prints top-1 on the 360 digits that are never trained on (best checkpoint and last epoch), the time
each run took, and the medians. tests/test_training.py (marker slow) asserts the accuracy.
"""

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path

from vil.cli import main
from vil.report.curves import read_series

SEEDS = (0, 1, 2)
CONFIG = "digits/vil_nano.yaml"


def run(seed: int, *options: str) -> tuple[float, float, float]:
    """Best top-1, last top-1 and minutes of one training run."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "--config-file", CONFIG, "--output_dir", folder, "--seed", str(seed)]
        began = time.perf_counter()
        if main([*words, "LOG_FREQ=1000", *options]):
            raise SystemExit("training failed")
        minutes = (time.perf_counter() - began) / 60
        points = [
            top1 for _, top1 in read_series(Path(folder, "metrics.jsonl"))["val/digits", "top1"]
        ]
    return max(points), points[-1], minutes


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    rows = [run(seed) for seed in SEEDS]
    print(f"\n{platform.processor() or platform.machine()}, {platform.platform()}")
    for seed, (best, last, minutes) in zip(SEEDS, rows):
        print(f"seed {seed}: best {best:.2f}, last {last:.2f}, {minutes:.1f} min")
    best, last, minutes = (statistics.median(column) for column in zip(*rows))
    print(f"median: best {best:.2f}, last {last:.2f}, {minutes:.1f} min")
