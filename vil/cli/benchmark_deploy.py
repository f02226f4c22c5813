"""Compare ways to run a model for inference on the CPU: speed, memory, size and predictions.

  vil benchmark deploy --run runs/nano                     the best checkpoint, on its test images
  vil benchmark deploy --run runs/nano --paths fast,onnx+int8+static --calibration photos
  vil benchmark deploy --config-file imagenet/vil_tiny.yaml --beside timm/deit_tiny_patch16_224

--paths lists ways to run the model:
  eager                as vil evaluate does
  bf16                 under autocast
  fast                 optimized for inference, see --fast of vil evaluate
  compile              with torch.compile
  fast+bf16, ...       combinations of these
  aoti                 a package of AOTInductor
  onnx                 in onnxruntime
  onnx+int8            in onnxruntime, with dynamic quantization
  onnx+int8+static     in onnxruntime, with static quantization
--beside lists other models to measure, with random weights. For each batch size, the models and
ways are timed alternately.

The predicted classes of each way are compared with those of eager on test images. If fewer than
--agreement percent are equal, this way is not timed. For a model with random weights, only speed,
memory and size are measured. Memory is how much the resident memory of the process grows when it
loads the model and runs a batch.

For static int8 quantization, the ranges of activations are calibrated on the images in the folder
--calibration, or on training images. On first use, the default attention backend and the C++
backend `native` are timed, as are the linear layers and MLPs, and the fastest is used. Writes
deploy.json, deploy.csv and a plot of accuracy against speed, deploy.png, to --out.
"""

import argparse
from pathlib import Path

from vil.cli.arguments import (
    at_least,
    config_arguments,
    listed,
    run_arguments,
    with_weights,
)
from vil.utils.errors import ConfigError
from vil.utils.text_table import align

DEFAULT = "imagenet/vil_tiny.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    run_arguments(parser)
    add = parser.add_argument
    names = dict(type=listed(), metavar="A,B")
    text = "ways to run the model (default: all); eager is always measured"
    add("--paths", help=text, **names)
    add("--beside", default="none", help="other models: timm/NAME, or none (none)", **names)
    text = "batch sizes (1,16)"
    add("--batches", type=listed(at_least(1)), default="1,16", metavar="A,B", help=text)
    number = dict(type=at_least(1), metavar="N")
    text = "measurements of each model and path, after a warm-up (9)"
    add("--rounds", default=9, help=text, **number)
    add("--images", default=512, help="test images to compare on (512)", **number)
    text = "percentage of predictions that must agree with those of eager (97)"
    add("--agreement", type=float, default=97.0, metavar="P", help=text)
    add("--calibration", metavar="DIR", help="folder of images to calibrate static int8")
    add("--no-tune", action="store_true", help=argparse.SUPPRESS)  # kept: nothing is tuned now
    add("--classes", metavar="FILE", help="file with class names (default: the run's classes.txt)")
    add(
        "--out",
        metavar="DIR",
        help="output folder (default: benchmarks/results/deploy-<machine>-<time>)",
    )


def run(args: argparse.Namespace) -> int:
    from vil.workflows.benchmark_deploy import PATHS, DeployBenchmark, DeploySettings

    if not 0 <= args.agreement <= 100:
        raise ConfigError(f"--agreement: expected a number from 0 to 100, got {args.agreement:g}")
    settings = DeploySettings(
        paths=args.paths or list(PATHS),
        batches=args.batches,
        rounds=args.rounds,
        images=args.images,
        least_agreement=args.agreement,
        calibration=args.calibration,
    )
    cfg, name, class_names = find_model(args)
    beside = [] if args.beside == ["none"] else args.beside
    benchmark = DeployBenchmark(
        cfg, name, settings, class_names=class_names, beside=beside, out=args.out, say=say
    )
    print(benchmark.title, flush=True)
    print(table(benchmark.run(), settings.batches))
    return 0


def find_model(args: argparse.Namespace):
    """Return (config, name of the model in the results, class names) for the command line. The
    model gets random weights unless the command line or the config file names weights."""
    cfg, class_names = with_weights(args, DEFAULT)
    if args.run:
        return cfg, Path(args.run).resolve().name, class_names
    file = args.config_file or cfg.MODEL.MODEL_PATH or DEFAULT
    name = Path(file).stem if cfg.MODEL.ARCH == "msvit" else cfg.MODEL.ARCH
    return cfg, name, class_names


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def table(rows: list, batches: list[int]) -> str:
    """Format the results of `DeployBenchmark.run` as a table, with one line per model and way to
    run it. The column `x` is the speedup over running the model in eager mode.

    batches: the measured batch sizes.
    """
    head = ["model", "path"]
    for batch in batches:
        head += [f"img/s at {batch}", "x"]
    lines = [[*head, "MiB file", "MiB memory", "agree %", "top-1"]]
    eager = {row.model: row.speed for row in rows if row.path == "eager"}
    for row in rows:
        cells = [row.model, row.path]
        for batch in batches:
            speed, plain = row.speed.get(batch), eager[row.model].get(batch)
            cells += [shown(speed, 1), shown(speed / plain if speed and plain else None, 2)]
        columns = ((row.size_mib, 1), (row.memory_mib, 0), (row.agreement, 1), (row.top1, 2))
        lines.append([*cells, *(shown(value, digits) for value, digits in columns)])
    text = align(lines, num_left=2).splitlines()
    reasons = ["", *(f"  {row.reason}" if row.reason else "" for row in rows)]
    return "\n".join(line + reason for line, reason in zip(text, reasons))


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
