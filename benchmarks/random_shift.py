"""Measure how random shift changes accuracy and step time, with vil_nano_shift on the digits.

  python benchmarks/random_shift.py [--epochs 100] [--seed 0]

Trains with random shift (MODE 1) and without (MODE 0). Prints both accuracies, the log line about
the end of random shift, and a ratio of median step times in the run with random shift: epochs with
random shift, divided by the later epochs with all nine chunks.
"""

import argparse
import platform
import statistics
import tempfile
from pathlib import Path

from shared import make_parser, train

from vil.config import get_config
from vil.report.run_record import metrics

CONFIG = "digits/vil_nano_shift.yaml"


def run(args: argparse.Namespace) -> None:
    options = [f"SEED={args.seed}", "LOG_FREQ=11"]
    if args.epochs is not None:
        options.append(f"OPTIM.EPOCHS={args.epochs}")
    with tempfile.TemporaryDirectory() as folder:
        full, shifted = (
            train(CONFIG, Path(folder, f"{mode}"), f"MODEL.VIT.MSVIT.MODE={mode}", *options)
            for mode in (0, 1)
        )
        log = Path(folder, "1/log.txt").read_text().splitlines()
        points = list(metrics(Path(folder, "1/metrics.jsonl")))
    print(f"\n{platform.processor() or platform.machine()}, {platform.platform()}")
    print(next(line for line in log if "random shift is over" in line))
    times = [(point["epoch"], point["time"]) for point in points if point["split"] == "train"]
    share = get_config(CONFIG).MODEL.VIT.MSVIT.VIL_MODE_SWITCH
    switch = share * max(epoch for epoch, _ in times)
    before, after = (
        statistics.median(time for epoch, time in times if (epoch <= switch) == early)
        for early in (True, False)
    )
    print(f"step time: random shift / all nine chunks = {before / after:.2f}")
    print(f"top-1: MODE 0 {full[-1]:.2f}, MODE 1 {shifted[-1]:.2f}")


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--epochs", type=int, help="default: as in the config")
    parser.add_argument("--seed", default="0", help="seed of both runs (0)")
    run(parser.parse_args())
