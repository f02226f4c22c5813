"""Compare ViL-Nano with a U-Net on NASA's image of the Earth: ocean, land or lake for each pixel.

  python benchmarks/earth.py                     three seeds each, about two hours on two cores
  python benchmarks/earth.py --seeds 1 --epochs 2    a short trial

Needs the extras `segmentation` and `geo`. Both models train from random weights, on the same crops,
with the recipe segmentation/blue_marble_vil_nano.yaml, in the same time: short runs of both
alternate, and the U-Net (smp/Unet on resnet18) gets the number of epochs that takes as long. The
recipe was chosen on the validation band of longitudes. The test band is evaluated once, after
training, with the checkpoint that is best on the validation band. Figures are medians over seeds,
in percent; all are written to benchmarks/results/earth.json.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from shared import RESULTS, add_json, make_parser, write_json

from vil.config import get_config
from vil.report.run_record import metrics
from vil.utils.machine import machine
from vil.utils.text_table import align

CONFIG, SET = "segmentation/blue_marble_vil_nano.yaml", "blue_marble"
MODELS = {
    "vil_nano, mlp": (),
    "resnet18, smp/Unet": ("MODEL.ARCH=timm/resnet18", "SEGMENTATION.MODEL=smp/Unet"),
}
ROUNDS = 3  # short runs of each model to measure the time of a step
COLUMNS = ("miou", "lake IoU", "boundary_f1")


def train(folder: Path, *options: str) -> Path:
    vil("train", "--config-file", CONFIG, "--output_dir", str(folder), *options)
    return folder


def vil(*words: str) -> None:
    """Run a command as a process of its own, whose peak memory is that of this command."""
    subprocess.run([sys.executable, "-m", "vil", *words], check=True)


def trained(folder: Path) -> list[dict]:
    """Return the lines about training in the log of a run."""
    return [line for line in metrics(folder / "metrics.jsonl") if line["split"] == "train"]


def measure_speed(root: Path) -> dict[str, float]:
    """Return the median training images per second of each model, from short alternating runs."""
    rates: dict[str, list[float]] = {name: [] for name in MODELS}
    for number in range(ROUNDS):
        for name, options in MODELS.items():
            folder = root / f"speed-{number}-{len(rates[name])}-{name.split(',')[0]}"
            train(folder, *options, "OPTIM.EPOCHS=1", "SOLVER.WARMUP_EPOCHS=0", "LOG_FREQ=1")
            lines = [line["img/s"] for line in trained(folder)]
            rates[name] += lines[len(lines) // 2 :]  # the first steps are slower
    return {name: statistics.median(values) for name, values in rates.items()}


def select(found: dict) -> dict[str, float]:
    """Return the figures of the table from the metrics of a set."""
    return {
        "miou": found["miou"],
        "lake IoU": found["per_class"]["iou"]["lake"],
        "boundary_f1": found["boundary_f1"],
    }


def run(model: str, folder: Path, epochs: int, seed: int) -> dict:
    """Train a model, and return its metrics on both bands, the minutes and the memory."""
    train(folder, *MODELS[model], f"OPTIM.EPOCHS={epochs}", f"SEED={seed}")
    test = json.loads((folder / "test_results.json").read_text())["metrics"][SET]
    vil("evaluate", "--run", str(folder), "--part", "val")
    val = json.loads((folder / "eval/results.json").read_text())[SET]
    return {
        "val": select(val),
        "test": select(test),
        "epochs": epochs,
        "seed": seed,
        "memory_mb": max(line["mem"] for line in trained(folder)),
    }


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (3)")
    parser.add_argument("--epochs", type=int, help="epochs of ViL-Nano (those of the recipe)")
    parser.add_argument("--keep", metavar="DIR", help="keep the runs in this folder")
    add_json(parser, RESULTS / "earth.json")
    args = parser.parse_args()
    epochs = args.epochs or get_config(CONFIG).OPTIM.EPOCHS
    with nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as place:
        speed = measure_speed(Path(place))
        first = next(iter(speed))
        scale = epochs / speed[first]
        lengths = {name: max(1, round(scale * rate)) for name, rate in speed.items()}
        rows = {name: [] for name in MODELS}
        for seed in range(args.seeds):
            for name in MODELS:
                folder = Path(place, f"{len(rows[name])}-{lengths[name]}")
                rows[name].append(run(name, folder / name.split(",")[0], lengths[name], seed))
    parts = [(part, column) for part in ("val", "test") for column in COLUMNS]
    table = [["model", "epochs", "images/s", "memory, MiB", *map(" ".join, parts)]]
    for name, runs in rows.items():
        medians = [
            f"{statistics.median(each[part][column] for each in runs):.2f}"
            for part, column in parts
        ]
        memory = max(each["memory_mb"] for each in runs)
        table.append([name, str(lengths[name]), f"{speed[name]:.1f}", f"{memory:.0f}", *medians])
    print(align(table))
    result = {"speed": speed, "runs": rows, "machine": machine(torch.device("cpu"))}
    write_json(args.json, result)
