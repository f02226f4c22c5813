"""Measure the accuracy of a model whose position embeddings are resized to other sizes and windows.

  python benchmarks/resizing.py --json benchmarks/results/resizing-cpu.json
  python benchmarks/resizing.py --folder runs/resizing   keep the runs, and skip finished ones

Trains a small model on the digits at 224 px with windows of 7, once with relative position biases
and once with absolute position embeddings. Then, for each image size and window, the script
evaluates the resized model, fine-tunes it for one epoch with each of three seeds, and evaluates it
again. Prints top-1 before resizing, after resizing and after fine-tuning (median of the seeds), and
the number of resized keys. The first row of each kind keeps the image size and the window, so it
shows the effect of the epoch alone. One of the 360 validation digits is 0.28 points.
"""

import argparse
import json
import re
import statistics
import tempfile
from pathlib import Path

from shared import CPU, add_json, finish, make_parser, run_vil, write_json

import vil
from vil.config import get_config
from vil.tasks import task_for
from vil.tasks.weight_files import find_weights
from vil.utils.machine import machine

CONFIG = "digits/vil_nano.yaml"
# 28 x 28 tokens in 4 x 4 chunks of 7, 14 x 14 in 2 x 2, then 7 x 7 with full attention
ARCH = (
    "l1,h1,d32,n1,s1,g1,p8,f{w},a{a}_l2,h2,d64,n2,s1,g1,p2,f{w},a{a}_l3,h4,d128,n1,s0,g1,p2,f7,a{a}"
)
POSITIONS = {"relative bias": 0, "absolute position": 1}
START = (224, 7)
RESIZES = [(size, window) for size in (224, 384) for window in (7, 8, 12)]
# {position: tuples (image size, window, value of FINETUNE.RESIZE)}. "extend" is only for relative
# biases at the same image size; absolute positions do not depend on windows.
TARGETS = {
    "relative bias": [
        (size, window, rule)
        for size, window in RESIZES
        for rule in ("linear", "extend")
        if rule == "linear" or size == START[0] and window != START[1]
    ],
    "absolute position": [(size, window, "linear") for size, window in RESIZES],
}
# crops of very different sizes, as on ImageNet, because at 384 px the digits are 1.7 times as large
SOURCE = ("AUG.SCALE=[0.15, 1.0]", "AUG.MIXUP_PROB=0")
FINETUNE = ("OPTIM.EPOCHS=1", "SOLVER.WARMUP_EPOCHS=0.1", "OPTIM.LR=5e-4", "OPTIM.EMA=0.99")
FINETUNE += ("DATALOADER.BSZ=2", "AUG.MIXUP_PROB=0", "RUN.EVAL_EVERY=1")
SEEDS = (0, 1, 2)


def settings(absolute: int, size: int, window: int, rule: str = "linear") -> list[str]:
    return [
        f"INPUT.IMAGE_SIZE={size}",
        f"DATA.KWARGS={{size: {size}}}",
        f"MODEL.VIT.MSVIT.ARCH={ARCH.format(w=window, a=absolute)}",
        f"FINETUNE.RESIZE={rule}",
    ]


def evaluate(folder: Path, *options: str) -> float:
    """Evaluate the weights in `options` without training. Returns top-1."""
    run_vil("evaluate", CONFIG, folder, *options)
    return json.loads((folder / "eval/results.json").read_text())["digits"]["top1"]


def resized_keys(options: list[str]) -> int:
    """Load the weights in `options` and return the number of keys that were resized."""
    cfg = get_config(CONFIG, options)
    path = find_weights(cfg.MODEL.MODEL_PATH, cfg.DATA.DATA_DIR)
    task = task_for(cfg, CPU)
    report = str(task.load_weights(vil.build_model(cfg), path, strict=False))
    match = re.search(r"(\d+) resized", report)
    return int(match[1]) if match else 0


def run(args: argparse.Namespace, folder: Path) -> None:
    rows = []
    for position, absolute in POSITIONS.items():
        source = folder / f"source{absolute}"
        options = [*settings(absolute, *START), *SOURCE, f"OPTIM.EPOCHS={args.epochs}"]
        before = finish(CONFIG, source, *options)
        for size, window, rule in TARGETS[position]:
            path = f"MODEL.MODEL_PATH={source}/checkpoints/last"
            options = [*settings(absolute, size, window, rule), path]
            target = folder / f"{absolute} {size} {window} {rule}"
            row = {"position": position, "size": size, "window": window, "rule": rule}
            row |= {"resized": resized_keys(options), "before": before}
            row["as resized"] = evaluate(target / "at once", *options)
            row["each seed"] = [
                finish(CONFIG, target / f"tuned{seed}", *options, *FINETUNE, f"SEED={seed}")
                for seed in SEEDS
            ]
            row["fine-tuned"] = statistics.median(row["each seed"])
            rows.append(row)
    shown = [name for name in rows[0] if name != "each seed"]
    print("  ".join(f"{name:>17}" for name in shown))
    for row in rows:
        cells = (f"{row[n]:.2f}" if isinstance(row[n], float) else row[n] for n in shown)
        print("  ".join(f"{cell:>17}" for cell in cells))
    command = "python benchmarks/resizing.py"
    write_json(args.json, {"command": command, "machine": machine(CPU), "rows": rows})


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_json(parser)
    parser.add_argument("--epochs", type=int, default=80, help="epochs at 224 px (80)")
    parser.add_argument("--folder", metavar="DIR", help="keep the runs here; default: temporary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(args.folder or folder))
