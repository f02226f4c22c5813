"""Measure accuracy and speed of ONNX and int8 files: of a run, and of vil_tiny at 224 px.

  vil train --config-file digits/vil_nano.yaml --output_dir runs/nano
  python benchmarks/export.py --run runs/nano --json benchmarks/results/export-cpu.json

Prints top-1 on the run's test set of the model, its ONNX file and that file with int8 linears; and
the time per image of the three in turns: medians of the rounds, and each file's speed-up over the
model, as the median of the rounds' ratios. The model computes attention with the backends that
torch selects untuned on a CPU (docs/internals/backends.md). vil_tiny's weights are random.
"""

import argparse
import statistics
import tempfile
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from shared import CPU, MIB, add_json, make_parser, time_in_turns, write_json
from torch import nn

import vil
from vil.engine.distributed import DistInfo
from vil.export import export_model, load_exported, quantize_linears
from vil.utils.machine import machine
from vil.workflows.configure import Options, run_config
from vil.workflows.inference import load_model

BATCHES = (1, 16)
ENDINGS = {"onnx": ".onnx", "int8": ".int8.onnx"}


def export_files(model: nn.Module, size: int, folder: Path) -> dict[str, nn.Module]:
    """The model and its files, by name."""
    path, int8 = (folder / f"{size}{ending}" for ending in ENDINGS.values())
    export_model(model, path, size=(size, size))
    quantize_linears(path, int8)
    return {"eager": model, "onnx": load_exported(path), "int8": load_exported(int8)}


def measure(models: dict[str, nn.Module], size: int, rounds: int, folder: Path) -> dict:
    """Image size, MiB of the float32 weights and of the files, and speeds."""
    mib = {"eager": sum(p.numel() * 4 for p in models["eager"].parameters()) / MIB}
    for name, ending in ENDINGS.items():
        mib[name] = (folder / f"{size}{ending}").stat().st_size / MIB
    speed = {str(batch): measure_speed(models, batch, size, rounds) for batch in BATCHES}
    return {"size": size, "MiB": mib, "speed": speed}


@torch.no_grad()
def measure_speed(
    models: dict[str, nn.Module], batch: int, size: int, rounds: int
) -> dict[str, dict[str, float]]:
    """{name: {milliseconds per image, speed-up over eager}}."""
    images = torch.randn(batch, 3, size, size)
    functions = {name: partial(model, images) for name, model in models.items()}
    times = time_in_turns(functions, rounds, CPU)
    return {
        name: {
            "ms": 1e3 * statistics.median(taken) / batch,
            "times eager": statistics.median(a / b for a, b in zip(times["eager"], taken)),
        }
        for name, taken in times.items()
    }


def measure_run(args: argparse.Namespace, folder: Path) -> dict:
    """Accuracy, sizes and speeds of a run's model."""
    options = ["DEVICE=cpu", "AMP.ENABLED=False", "MODEL.COMPILE=False"]
    cfg, class_names = run_config(args.run, Options(options), checkpoint=args.checkpoint)
    inference = load_model(cfg, class_names)
    models = export_files(inference.model, cfg.INPUT.IMAGE_SIZE, folder)
    inference.task.test_loaders(DistInfo())
    accuracy = {name: inference.task.evaluate(model) for name, model in models.items()}
    return measure(models, cfg.INPUT.IMAGE_SIZE, args.rounds, folder) | {"accuracy": accuracy}


def measure_tiny(args: argparse.Namespace, folder: Path) -> dict:
    """Sizes and speeds of vil_tiny."""
    torch.manual_seed(0)
    models = export_files(vil.get_model("vil_tiny").eval(), 224, folder)
    return measure(models, 224, args.rounds, folder)


def show(title: str, rows: dict) -> None:
    print(f"\n{title}, {rows['size']} pixels")
    accuracy = rows.get("accuracy", {"eager": {}})
    for test, scores in accuracy["eager"].items():
        each = "  ".join(f"{name} {sets[test]['top1']:.2f}" for name, sets in accuracy.items())
        print(f"  top-1 of {test}, {scores['count']} images: {each}")
    print("  MiB: " + "  ".join(f"{name} {mib:.2f}" for name, mib in rows["MiB"].items()))
    for batch, each in rows["speed"].items():
        cells = (f"{n} {r['ms']:.2f} ms ({r['times eager']:.2f}x)" for n, r in each.items())
        print(f"  batch {batch}, per image: {'  '.join(cells)}")


def main() -> None:
    parser = make_parser(__doc__)
    add_json(parser)
    parser.add_argument("--run", required=True, metavar="DIR", help="a trained run")
    parser.add_argument("--checkpoint", default="best", choices=["best", "last"])
    parser.add_argument("--rounds", type=int, default=21, metavar="N")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "run": measure_run(args, Path(folder)),
            "vil_tiny": measure_tiny(args, Path(folder)),
        }
    versions = {name: metadata.version(name) for name in ("onnx", "onnxscript", "onnxruntime")}
    about = machine(CPU) | versions
    threads = f"{about['threads']} threads"
    print(f"{about['name']}, {threads}, torch {about['torch']}, ORT {about['onnxruntime']}")
    for title, row in rows.items():
        show(title, row)
    write_json(args.json, {"machine": about, **rows})


if __name__ == "__main__":
    main()
