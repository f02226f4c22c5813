"""What it is worth that convolutions stay compiled where pictures have many sizes, on a CPU.

  python benchmarks/kernel_cache.py

Trains scenes/mask_rcnn_vil_nano.yaml for some hundred steps with oneDNN's own cache of 1,024
kernels and with that of `vil`, in turns, each in a process of its own, and prints the median
seconds of a step in the second half of each.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from vil.builders.device import ONEDNN_KERNELS
from vil.report.run_record import metrics
from vil.utils.machine import machine

ONEDNN_DEFAULT = 1024


def step_seconds(kernels: int, scenes: int, data: str) -> float:
    """The median step of a run's second half."""
    words = ["--config-file", "scenes/mask_rcnn_vil_nano.yaml", "--data", data]
    options = [f"DATA.KWARGS={{train: {scenes}, val: 1}}", "OPTIM.EPOCHS=1", "LOG_FREQ=10"]
    with tempfile.TemporaryDirectory() as run:
        command = [sys.executable, "-m", "vil", "detect", "train", *words, "--output_dir", run]
        environment = os.environ | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(kernels)}
        subprocess.run([*command, *options], env=environment, check=True, stdout=subprocess.DEVNULL)
        times = [line["time"] for line in metrics(Path(run, "metrics.jsonl")) if "time" in line]
    return statistics.median(times[len(times) // 2 :])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turns (3)")
    parser.add_argument("--scenes", type=int, default=800, help="of a run, two a step (800)")
    args = parser.parse_args()
    caches = (ONEDNN_DEFAULT, ONEDNN_KERNELS)
    seconds = {kernels: [] for kernels in caches}
    with tempfile.TemporaryDirectory() as data:
        for _ in range(args.rounds):
            for kernels in caches:
                seconds[kernels].append(step_seconds(kernels, args.scenes, data))
    print(f"{machine(torch.device('cpu'))['name']}, {torch.get_num_threads()} threads")
    before, now = (statistics.median(seconds[kernels]) for kernels in caches)
    for kernels, median in zip(caches, (before, now)):
        print(f"{kernels:,} kernels: {median:.3f} s a step")
    print(f"ratio {now / before:.2f}")
