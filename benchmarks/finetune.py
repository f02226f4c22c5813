"""Fine-tuning against training from scratch: vil_nano at 96 px, wider windows, five classes.

  python benchmarks/finetune.py                     trains vil_nano first
  python benchmarks/finetune.py --weights runs/nano  starts from a run or a weight file
  python benchmarks/finetune.py --json benchmarks/results/finetune-cpu.json

Prints top-1 of the last epoch for every seed, with the same number of epochs: fine-tuned; from
scratch with the same recipe; from scratch with the rate and warm-up of vil_nano, which was chosen
for training from scratch.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from vil.cli import main
from vil.report.curves import read_series

SEEDS = (0, 1, 2)
SCRATCH = ("FINETUNE.HEAD=keep",)
SCRATCH_RECIPE = (*SCRATCH, "OPTIM.LR=1.5e-3", "SOLVER.WARMUP_EPOCHS=2")


def train(folder: Path, config: str, *options: str) -> list[float]:
    """Top-1 after each epoch."""
    words = ["train", "--config-file", config, "--output_dir", str(folder), "LOG_FREQ=1000"]
    if main([*words, *options]):
        raise SystemExit("training failed")
    return [top1 for _, top1 in read_series(folder / "metrics.jsonl")["val/digits", "top1"]]


def run(args: argparse.Namespace, folder: Path) -> None:
    weights = args.weights
    if not weights:
        weights = str(folder / "nano")
        train(folder / "nano", "digits/vil_nano.yaml")
    variants = {
        "fine-tuned": (f"MODEL.MODEL_PATH={weights}",),
        "from scratch": SCRATCH,
        "from scratch, its own rate": SCRATCH_RECIPE,
    }
    rows = {
        name: [
            train(folder / f"{name} {seed}", "digits/vil_nano_96.yaml", f"SEED={seed}", *options)
            for seed in SEEDS
        ]
        for name, options in variants.items()
    }
    print(f"\ntop-1 of five digits at 96 px, {len(rows['fine-tuned'][0])} epochs, seeds {SEEDS}")
    for name, curves in rows.items():
        last = [curve[-1] for curve in curves]
        each = ", ".join(f"{top1:.2f}" for top1 in last)
        print(f"{name:28} {statistics.median(last):6.2f} (median of {each})")
    if args.json:
        found = {"command": "python benchmarks/finetune.py", "seeds": SEEDS, "rows": rows}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", metavar="PATH", help="a trained vil_nano; default: train one")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(folder))
