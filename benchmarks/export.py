"""Measure accuracy and speed of exported ONNX and int8 files, for a run and for vil_tiny at 224 px.

  vil train --config-file digits/vil_nano.yaml --output_dir runs/nano
  python benchmarks/export.py --run runs/nano --json benchmarks/results/export-cpu.json

Compares the model in eager mode, its ONNX file, and the ONNX file with int8 linear layers. Prints
the top-1 of each on the test sets of the run, and the time per image. The three are timed in
interleaved rounds: the time is the median over the rounds, and the speed-up over eager mode is the
median of the ratios in each round. Attention backends are those that vil selects untuned on a CPU
(docs/internals/backends.md). The weights of vil_tiny are random.
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
    """Export a model to an ONNX and an int8 file. Returns {name: model} for the model in eager mode
    and the loaded files. size: side of the images in pixels."""
    path, int8 = (folder / f"{size}{ending}" for ending in ENDINGS.values())
    export_model(model, path, size=(size, size))
    quantize_linears(path, int8)
    return {"eager": model, "onnx": load_exported(path), "int8": load_exported(int8)}


def measure(models: dict[str, nn.Module], size: int, rounds: int, folder: Path) -> dict:
    """Measure sizes and speeds. Returns the image size, the MiB of the float32 weights and of the
    files, and the speeds for each batch size."""
    mib = {"eager": sum(p.numel() * 4 for p in models["eager"].parameters()) / MIB}
    for name, ending in ENDINGS.items():
        mib[name] = (folder / f"{size}{ending}").stat().st_size / MIB
    speed = {str(batch): measure_speed(models, batch, size, rounds) for batch in BATCHES}
    return {"size": size, "MiB": mib, "speed": speed}


@torch.no_grad()
def measure_speed(
    models: dict[str, nn.Module], batch: int, size: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Return {name: {"ms": milliseconds per image, "times eager": speed-up over eager mode}}."""
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
    """Measure the accuracy, sizes and speeds of the model of a run."""
    options = ["DEVICE=cpu", "AMP.ENABLED=False", "MODEL.COMPILE=False"]
    cfg, class_names = run_config(args.run, Options(options), checkpoint=args.checkpoint)
    inference = load_model(cfg, class_names)
    models = export_files(inference.model, cfg.INPUT.IMAGE_SIZE, folder)
    inference.task.test_loaders(DistInfo())
    accuracy = {name: inference.task.evaluate(model) for name, model in models.items()}
    return measure(models, cfg.INPUT.IMAGE_SIZE, args.rounds, folder) | {"accuracy": accuracy}


def measure_tiny(args: argparse.Namespace, folder: Path) -> dict:
    """Measure the sizes and speeds of vil_tiny."""
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
    parser.add_argument("--run", required=True, metavar="DIR", help="folder of a trained run")
    parser.add_argument("--checkpoint", default="best", choices=["best", "last"])
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="timed rounds (21)")
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
