"""What ONNX and int8 cost in accuracy and give in speed: of a run, and of vil_tiny at 224 pixels.

  vil train --config-file digits/vil_nano.yaml --output_dir runs/nano
  python benchmarks/export.py --run runs/nano --json benchmarks/results/export-cpu.json

Prints top-1 of the run's test set of the model, its ONNX file and the same with linears in int8;
and the time of an image, of the three in turns: medians over the rounds, and how many times as fast
as the model each file is, as the median of the rounds' ratios. The model computes attention with
the backends that torch takes untuned on a CPU (docs/internals/backends.md). vil_tiny's weights are
random.
"""

import argparse
import json
import statistics
import tempfile
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

import vil
from vil.engine.distributed import DistInfo
from vil.export import export_model, load_exported, quantize_linears
from vil.utils.machine import machine
from vil.utils.timing import seconds
from vil.workflows.configure import run_config
from vil.workflows.inference import load_model

DEVICE = torch.device("cpu")
BATCHES = (1, 16)
ENDINGS = {"onnx": ".onnx", "int8": ".int8.onnx"}


def files(model: nn.Module, size: int, folder: Path) -> dict[str, nn.Module]:
    """The model and its files, by name."""
    path, int8 = (folder / f"{size}{ending}" for ending in ENDINGS.values())
    export_model(model, path, size=(size, size))
    quantize_linears(path, int8)
    return {"eager": model, "onnx": load_exported(path), "int8": load_exported(int8)}


def sizes(model: nn.Module, size: int, folder: Path) -> dict[str, float]:
    """MiB of the weights in float32 and of the files."""
    weights = sum(p.numel() * 4 for p in model.parameters())
    on_disk = {name: folder / f"{size}{end}" for name, end in ENDINGS.items()}
    return {"eager": weights / 2**20} | {n: f.stat().st_size / 2**20 for n, f in on_disk.items()}


def speeds(models: dict[str, nn.Module], size: int, rounds: int) -> dict[str, dict[str, dict]]:
    """{batch: {name: {milliseconds of an image, times as fast as eager}}}."""
    found = {}
    for batch in BATCHES:
        images = torch.randn(batch, 3, size, size)
        times: dict[str, list[float]] = {name: [] for name in models}
        with torch.no_grad():
            for number in range(rounds + 2):  # the first two warm up
                for name, model in models.items():
                    taken = seconds(partial(model, images), DEVICE)
                    times[name] += [taken] if number > 1 else []
        found[str(batch)] = {
            name: {
                "ms": 1e3 * statistics.median(taken) / batch,
                "times eager": statistics.median(a / b for a, b in zip(times["eager"], taken)),
            }
            for name, taken in times.items()
        }
    return found


def of_a_run(args: argparse.Namespace, folder: Path) -> dict:
    """Accuracy, sizes and speeds of a run's model."""
    options = ["DEVICE=cpu", "AMP.ENABLED=False", "MODEL.COMPILE=False"]
    cfg, class_names = run_config(args.run, options, checkpoint=args.checkpoint)
    inference = load_model(cfg, class_names)
    model, task = inference.model, inference.task
    size = cfg.INPUT.IMAGE_SIZE
    models = files(model, size, folder)
    task.test_loaders(DistInfo())
    results = {name: task.evaluate(each) for name, each in models.items()}
    return {
        "size": size,
        "accuracy": results,
        "MiB": sizes(model, size, folder),
        "speed": speeds(models, size, args.rounds),
    }


def of_tiny(args: argparse.Namespace, folder: Path) -> dict:
    """Sizes and speeds of vil_tiny."""
    torch.manual_seed(0)
    model = vil.get_model("vil_tiny").eval()
    models = files(model, 224, folder)
    speed = speeds(models, 224, args.rounds)
    return {"size": 224, "MiB": sizes(model, 224, folder), "speed": speed}


def show(title: str, rows: dict) -> None:
    print(f"\n{title}, {rows['size']} pixels")
    accuracy = rows.get("accuracy", {"eager": {}})
    for test, figures in accuracy["eager"].items():
        each = "  ".join(f"{name} {found[test]['top1']:.2f}" for name, found in accuracy.items())
        print(f"  top-1 of {test}, {figures['count']} images: {each}")
    print("  MiB: " + "  ".join(f"{name} {mib:.2f}" for name, mib in rows["MiB"].items()))
    for batch, each in rows["speed"].items():
        told = (f"{n} {r['ms']:.2f} ms ({r['times eager']:.2f}x)" for n, r in each.items())
        print(f"  batch {batch}, of an image: {'  '.join(told)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", required=True, metavar="DIR", help="a trained run")
    parser.add_argument("--checkpoint", default="best", choices=["best", "last"])
    parser.add_argument("--rounds", type=int, default=21, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {"run": of_a_run(args, Path(folder)), "vil_tiny": of_tiny(args, Path(folder))}
    versions = {name: metadata.version(name) for name in ("onnx", "onnxscript", "onnxruntime")}
    about = machine(DEVICE) | versions
    print(
        f"{about['name']}, {about['threads']} threads, torch {about['torch']}, "
        f"onnxruntime {about['onnxruntime']}"
    )
    for title, found in rows.items():
        show(title, found)
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": about, **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
