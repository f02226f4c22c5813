"""Compare fine-tuning with training from scratch, for vil_nano at 96 px on five classes.

  python benchmarks/finetune.py                      trains vil_nano first
  python benchmarks/finetune.py --weights runs/nano  starts from a run or a weight file
  python benchmarks/finetune.py --json benchmarks/results/finetune-cpu.json

The config digits/vil_nano_96.yaml also has wider windows than vil_nano. Three variants are trained
for the same number of epochs, each with three seeds: fine-tuned; from scratch with the same recipe;
and from scratch with the learning rate and warm-up of vil_nano, which were tuned for training from
scratch. Prints top-1 after the last epoch.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from shared import add_json, make_parser, train, write_json

SEEDS = (0, 1, 2)
SCRATCH = ("FINETUNE.HEAD=keep",)
SCRATCH_RECIPE = (*SCRATCH, "OPTIM.LR=1.5e-3", "SOLVER.WARMUP_EPOCHS=2")


def run(args: argparse.Namespace, folder: Path) -> None:
    weights = args.weights
    if not weights:
        weights = str(folder / "nano")
        train("digits/vil_nano.yaml", folder / "nano")
    variants = {
        "fine-tuned": (f"MODEL.MODEL_PATH={weights}",),
        "from scratch": SCRATCH,
        "from scratch, its own learning rate": SCRATCH_RECIPE,
    }
    rows = {
        name: [
            train("digits/vil_nano_96.yaml", folder / f"{name} {seed}", f"SEED={seed}", *options)
            for seed in SEEDS
        ]
        for name, options in variants.items()
    }
    print(f"\ntop-1 of five digits at 96 px, {len(rows['fine-tuned'][0])} epochs, seeds {SEEDS}")
    for name, curves in rows.items():
        last = [curve[-1] for curve in curves]
        each = ", ".join(f"{top1:.2f}" for top1 in last)
        print(f"{name:28} {statistics.median(last):6.2f} (median of {each})")
    command = "python benchmarks/finetune.py"
    write_json(args.json, {"command": command, "seeds": SEEDS, "rows": rows})


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_json(parser)
    parser.add_argument("--weights", metavar="PATH", help="trained vil_nano; default: train one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(folder))
