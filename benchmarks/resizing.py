"""What resizing positions costs: a model of 224 px and windows of 7 at other sizes and windows.

  python benchmarks/resizing.py --json benchmarks/results/resizing-cpu.json
  python benchmarks/resizing.py --folder runs/resizing   keeps the runs, takes those there

Trains a small model on the digits, shown at 224 px, once with the relative bias and once with the
absolute position; then, for each size and window, evaluates it as resized, fine-tunes it for one
epoch with each of three seeds, and evaluates it again. Prints the top-1 of all, the median of the
seeds, and how many keys were resized. The first row of each keeps size and window: what the epoch
does by itself. One of the 360 val digits is 0.28 points.
"""

import argparse
import json
import re
import statistics
import tempfile
from pathlib import Path

import torch

import vil
from vil.builders.model import find_weights
from vil.cli import main
from vil.config import get_config
from vil.report.run_record import metrics
from vil.tasks import task_for
from vil.utils.machine import machine

CONFIG = "digits/vil_nano.yaml"
# 28 x 28 tokens in 4 x 4 chunks of 7, 14 x 14 in 2 x 2, then 7 x 7 with full attention
ARCH = (
    "l1,h1,d32,n1,s1,g1,p8,f{w},a{a}_l2,h2,d64,n2,s1,g1,p2,f{w},a{a}_l3,h4,d128,n1,s0,g1,p2,f7,a{a}"
)
POSITIONS = {"relative bias": 0, "absolute position": 1}
START = (224, 7)
RESIZES = [(size, window) for size in (224, 384) for window in (7, 8, 12)]
# position: image size, window, rule of resizing; extended are tables of images as large as before,
# and absolute positions know no windows
TARGETS = {
    "relative bias": [
        (size, window, rule)
        for size, window in RESIZES
        for rule in ("linear", "extend")
        if rule == "linear" or size == START[0] and window != START[1]
    ],
    "absolute position": [(size, window, "linear") for size, window in RESIZES],
}
# crops of very different sizes, as on ImageNet: 384 px show the digits 1.7 times as large
SOURCE = ("AUG.SCALE=[0.15, 1.0]", "AUG.MIXUP_PROB=0")
FINETUNE = (
    "OPTIM.EPOCHS=1", "SOLVER.WARMUP_EPOCHS=0.1", "OPTIM.LR=5e-4", "DATALOADER.BSZ=2",
    "OPTIM.EMA=0.99", "AUG.MIXUP_PROB=0", "RUN.EVAL_EVERY=1",
)  # fmt: skip
SEEDS = (0, 1, 2)


def words(absolute: int, size: int, window: int, rule: str = "linear") -> list[str]:
    return [
        f"INPUT.IMAGE_SIZE={size}",
        f"DATA.KWARGS={{size: {size}}}",
        f"MODEL.VIT.MSVIT.ARCH={ARCH.format(w=window, a=absolute)}",
        f"FINETUNE.RESIZE={rule}",
        "LOG_FREQ=1000",
    ]


def train(folder: Path, *options: str) -> float:
    """Top-1 of the last epoch, of a new run or of one that is there."""
    line = ["train", "--config-file", CONFIG, "--output_dir", str(folder)]
    if not (folder / "config.yaml").exists() and main([*line, *options]):
        raise SystemExit("training failed")
    return [p for p in metrics(folder / "metrics.jsonl") if "val" in p["split"]][-1]["top1"]


def evaluate(folder: Path, *options: str) -> float:
    line = ["evaluate", "--config-file", CONFIG, "--output_dir", str(folder)]
    if main([*line, *options]):
        raise SystemExit("evaluation failed")
    return json.loads((folder / "eval/results.json").read_text())["digits"]["top1"]


def resized_keys(options: list[str]) -> int:
    """As the report of loading says it."""
    cfg = get_config(CONFIG, options)
    path = find_weights(cfg.MODEL.MODEL_PATH, cfg.DATA.DATA_DIR)
    task = task_for(cfg, torch.device("cpu"))
    report = str(task.load_weights(vil.build_model(cfg), path, strict=False))
    said = re.search(r"(\d+) resized", report)
    return int(said[1]) if said else 0


def run(args: argparse.Namespace, folder: Path) -> None:
    rows = []
    for position, absolute in POSITIONS.items():
        source = folder / f"source{absolute}"
        before = train(source, *words(absolute, *START), *SOURCE, f"OPTIM.EPOCHS={args.epochs}")
        for size, window, rule in TARGETS[position]:
            path = f"MODEL.MODEL_PATH={source}/checkpoints/last"
            options = [*words(absolute, size, window, rule), path]
            target = folder / f"{absolute} {size} {window} {rule}"
            row = {"position": position, "size": size, "window": window, "rule": rule}
            row |= {"resized": resized_keys(options), "before": before}
            row["as resized"] = evaluate(target / "at once", *options)
            row["each seed"] = [
                train(target / f"tuned{seed}", *options, *FINETUNE, f"SEED={seed}")
                for seed in SEEDS
            ]
            row["fine-tuned"] = statistics.median(row["each seed"])
            rows.append(row)
    shown = [name for name in rows[0] if name != "each seed"]
    print("  ".join(f"{name:>17}" for name in shown))
    for row in rows:
        cells = (f"{row[n]:.2f}" if isinstance(row[n], float) else row[n] for n in shown)
        print("  ".join(f"{cell:>17}" for cell in cells))
    if args.json:
        here = machine(torch.device("cpu"))
        found = {"command": "python benchmarks/resizing.py", "machine": here, "rows": rows}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=80, help="of the model of 224 px (80)")
    parser.add_argument(
        "--folder", metavar="DIR", help="of the runs; by default one that is removed"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(args.folder or folder))
