"""Measure how much time a large cache of compiled convolutions saves on a CPU if image sizes vary.

  python benchmarks/kernel_cache.py

Trains scenes/mask_rcnn_vil_nano.yaml for some hundred steps with oneDNN's default cache of 1,024
kernels, and with the larger cache that `vil` sets. The runs alternate, each in a new process.
Prints the median time of a step in the second half of a run, and the ratio.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from shared import CPU, make_parser

from vil.engine.build import ONEDNN_KERNELS
from vil.report.run_record import metrics
from vil.utils.machine import machine

ONEDNN_DEFAULT = 1024


def step_seconds(kernels: int, scenes: int, data: str) -> float:
    """Train with a cache of `kernels` kernels. Returns the median seconds of a step in the second
    half of the run. scenes: number of training images. data: folder of the dataset."""
    words = ["--config-file", "scenes/mask_rcnn_vil_nano.yaml", "--data", data]
    options = [f"DATA.KWARGS={{train: {scenes}, val: 1}}", "OPTIM.EPOCHS=1", "LOG_FREQ=10"]
    with tempfile.TemporaryDirectory() as run:
        command = [sys.executable, "-m", "vil", "detect", "train", *words, "--output_dir", run]
        environment = os.environ | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(kernels)}
        subprocess.run([*command, *options], env=environment, check=True, stdout=subprocess.DEVNULL)
        times = [line["time"] for line in metrics(Path(run, "metrics.jsonl")) if "time" in line]
    return statistics.median(times[len(times) // 2 :])


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs per cache size (3)")
    parser.add_argument("--scenes", type=int, default=800, help="images per run, 2 a step (800)")
    args = parser.parse_args()
    caches = (ONEDNN_DEFAULT, ONEDNN_KERNELS)
    seconds = {kernels: [] for kernels in caches}
    with tempfile.TemporaryDirectory() as data:
        for _ in range(args.rounds):
            for kernels in caches:
                seconds[kernels].append(step_seconds(kernels, args.scenes, data))
    print(f"{machine(CPU)['name']}, {torch.get_num_threads()} threads")
    before, now = (statistics.median(seconds[kernels]) for kernels in caches)
    for kernels, median in zip(caches, (before, now)):
        print(f"{kernels:,} kernels: {median:.3f} s per step")
    print(f"ratio {now / before:.2f}")
