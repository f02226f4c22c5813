"""Write a model as a file that other programs run: ONNX, or a program of torch.export.

  vil export --run runs/nano --out nano.onnx                   the best checkpoint of a run
  vil export --run runs/nano --out nano.onnx --int8 --check    and nano.int8.onnx; both evaluated
  vil export --run runs/nano --checkpoint last --out nano.pt2 --dynamic batch
  vil export --config-file imagenet/vil_small.yaml MODEL.MODEL_PATH best.pth --out small.onnx

Images (B, 3, H, W), normalised as in training, give logits (B, classes). Batch and size stay open
unless --dynamic says otherwise. Computed on the CPU in float32, whatever the config trains with.
Each file is opened again and compared with the model before it gets its name; an int8 file, whose
figures differ, is judged by --check. It also says what was trained, the names of the classes, mean,
standard deviation and size of its images (docs/export.md).
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, of_classifier, resolve
from vil.cli.evaluate import loaded_model, of_weights, refuse_random_weights, run_arguments
from vil.cli.predict import class_names
from vil.config import ConfigError

if TYPE_CHECKING:
    from torch import nn

FORMATS = {"onnx": ".onnx", "torch": ".pt2"}
OPEN = ("batch", "size")
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    run_arguments(parser)
    add = parser.add_argument
    add("--out", required=True, metavar="FILE", help="the file to write: .onnx, or .pt2 of torch")
    add("--format", choices=FORMATS, help="default: what the name of --out ends with")
    add(
        "--size",
        type=_size,
        metavar="N or HxW",
        help="of images; INPUT.IMAGE_SIZE by default. With an open size only what it is tried on",
    )
    add(
        "--dynamic",
        type=_open,
        default=OPEN,
        metavar="LIST",
        help="what stays open: batch,size (default), batch, size, none; else one image, of --size",
    )
    add("--int8", action="store_true", help="ONNX with linears in int8 too, as FILE.int8.onnx")
    add("--opset", type=int, metavar="N", help="of ONNX; torch's choice by default")
    add("--check", action="store_true", help="evaluate model and files on the config's test sets")
    add("--classes", metavar="FILE", help="names of the classes; by default the run's classes.txt")


def _size(text: str) -> tuple[int, int]:
    """Height and width of `224` or `224x320`."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected pixels, as 224 or 224x320, got {text!r}")
    return int(parts[0]), int(parts[-1])


def _open(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(","))) if text != "none" else ()
    if not set(names) <= set(OPEN):
        raise argparse.ArgumentTypeError(f"expected batch, size, batch,size or none, got {text!r}")
    return names


def run(args: argparse.Namespace) -> int:
    settle_format(args)
    of_weights(args)
    # what is written is float32 for CPUs; a file of one image is evaluated image by image
    args.opts = [*(args.opts or ()), "DEVICE=cpu", "AMP.ENABLED=False", "MODEL.COMPILE=False"]
    args.opts += [] if "batch" in args.dynamic else ["DATALOADER.BSZ=1"]
    cfg = of_classifier(resolve(args), "only classifiers are exported")
    refuse_random_weights(cfg)
    args.size = args.size or (cfg.INPUT.IMAGE_SIZE,) * 2
    if args.check and "size" not in args.dynamic and args.size != (cfg.INPUT.IMAGE_SIZE,) * 2:
        size = "x".join(map(str, args.size))
        raise ConfigError(
            f"--check: the test images are {cfg.INPUT.IMAGE_SIZE} pixels (INPUT.IMAGE_SIZE), which "
            f"a file fixed to {size} does not take"
        )
    return export(cfg, args, metadata(cfg, args))


def settle_format(args: argparse.Namespace) -> None:
    """--format from --out where it is not given; ConfigError where flags do not go together."""
    if Path(args.out).is_dir():
        raise ConfigError(f"--out {args.out}: is a folder")
    endings = {ending: name for name, ending in FORMATS.items()}
    ending = Path(args.out).suffix
    told = endings.get(ending)
    if not (args.format or told):
        raise ConfigError(f"--out {args.out}: ends with neither .onnx nor .pt2, so give --format")
    if told and args.format not in (None, told):
        raise ConfigError(f"--out {args.out} with --format {args.format}: {ending} is {told}")
    args.format = args.format or told
    for flag, given in (("--int8", args.int8), ("--opset", args.opset is not None)):
        if given and args.format != "onnx":
            raise ConfigError(f"{flag} is for --format onnx, not {args.format}")


def metadata(cfg: CfgNode, args: argparse.Namespace) -> dict[str, str]:
    """What a program that runs the file must know, as text; lists are JSON."""
    from vil.build_data import INTERPOLATIONS

    known = (
        args.classes
        or getattr(args, "known_classes", None)
        or (args.run and Path(args.run, "classes.txt").is_file())
    )
    names = class_names(args, cfg.DATA.NUM_CLASSES) if known else None
    notes = {
        "model": cfg.MODEL.ARCH,
        "mean": json.dumps(list(cfg.INPUT.MEAN)),
        "std": json.dumps(list(cfg.INPUT.STD)),
        "crop_pct": str(cfg.INPUT.CROP_PCT),
        "interpolation": INTERPOLATIONS[cfg.INPUT.INTERPOLATION],
    }
    return notes | ({"classes": json.dumps(names)} if names else {})


def export(cfg: CfgNode, args: argparse.Namespace, notes: Mapping[str, str]) -> int:
    """Load the weights, write the files, say how far they are from the model."""
    from vil.export import load_exported, quantize_linears

    model, report = loaded_model(cfg)
    print(report)
    out, files = Path(args.out), [Path(args.out)]
    for found in written(model, args, notes):
        images = " x ".join(map(str, found.shape))
        print(f"  images {images:18} largest difference from the model {found.largest:.1e}")
    if args.int8:
        files.append(out.with_name(f"{out.stem}.int8{out.suffix or '.onnx'}"))
        count = usable(quantize_linears, out, files[-1])
        print(f"{count} linear layers in int8")
    for file in files:
        share = file.stat().st_size / out.stat().st_size
        beside = f" ({share:.2f} of {out.name})" if file != out else ""
        print(f"{file}: {file.stat().st_size / MIB:.2f} MiB{beside}")
    if args.check:
        check(cfg, model, {file.name: load_exported(file, args.format) for file in files})
    return 0


def written(model: "nn.Module", args: argparse.Namespace, notes: Mapping[str, str]) -> list:
    """The differences of the file --out."""
    from vil.export import export_model

    return usable(
        export_model,
        model,
        args.out,
        size=args.size,
        format=args.format,
        dynamic=args.dynamic,
        opset=args.opset,
        metadata=notes,
    )


def usable(function: Callable, *arguments, **named):
    """What a function of the library refuses is a fault of the command line."""
    try:
        return function(*arguments, **named)
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"--out {arguments[1]}: {error.strerror or error}") from error


def check(cfg: CfgNode, model: "nn.Module", files: Mapping[str, "nn.Module"]) -> None:
    """Print loss and accuracy of the model and its files on every test set."""
    import torch

    from vil import build, build_data
    from vil.data.workers import worker_errors
    from vil.engine.distributed import DistInfo
    from vil.engine.logger import pairs

    device, ranks = torch.device("cpu"), DistInfo()
    with worker_errors():
        tests = build_data.build_test_loaders(cfg, ranks, device)
        task = build.build_task(cfg, ranks, device, tests, build_data.build_links(cfg, tests))
        models = {"model": build.place(model, cfg, device, training=False), **files}
        for name, each in models.items():
            for test, figures in task.evaluate(each).items():
                shown = {key: value for key, value in figures.items() if key != "per_class"}
                print(f"val set {test} {name:18} {pairs(shown)}")
