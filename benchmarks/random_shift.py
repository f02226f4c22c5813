"""What random shift costs and saves: vil_nano_shift on the digits, and the same with MODE 0.

  python benchmarks/random_shift.py [--epochs 100] [--seed 0]

Prints both accuracies, the line of the log that tells of the switch, and the median step time of an
epoch with random shift over that of an epoch with all nine chunks, both of the same run.
"""

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path

from vil.cli import main
from vil.config import get_config

CONFIG = "digits/vil_nano_shift.yaml"


def train(folder: Path, mode: int, args: argparse.Namespace) -> list[dict]:
    """Train into `folder`; returns the points of metrics.jsonl."""
    words = ["train", "--config-file", CONFIG, "--output_dir", str(folder), "--seed", args.seed]
    keys = {"MODEL.VIT.MSVIT.MODE": mode, "LOG_FREQ": 11}
    if args.epochs is not None:
        keys["OPTIM.EPOCHS"] = args.epochs
    if main([*words, *(f"{key}={value}" for key, value in keys.items())]):
        raise SystemExit("training failed")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def accuracy(points: list[dict]) -> float:
    """Top-1 of the last evaluation."""
    return [point["top1"] for point in points if point["split"].startswith("val")][-1]


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        full = train(Path(folder, "full"), 0, args)
        shifted = train(Path(folder, "shifted"), 1, args)
        log = Path(folder, "shifted", "log.txt").read_text().splitlines()
    print(f"\n{platform.processor() or platform.machine()}, {platform.platform()}")
    print(next(line for line in log if "random shift is over" in line))
    times = [(point["epoch"], point["time"]) for point in shifted if point["split"] == "train"]
    share = get_config(CONFIG).MODEL.VIT.MSVIT.VIL_MODE_SWITCH
    switch = share * max(epoch for epoch, _ in times)
    before, after = (
        statistics.median(time for epoch, time in times if (epoch <= switch) == early)
        for early in (True, False)
    )
    print(f"step time: random shift / all nine chunks = {before / after:.2f}")
    print(f"top-1: MODE 0 {accuracy(full):.2f}, MODE 1 {accuracy(shifted):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", default="0")
    run(parser.parse_args())
