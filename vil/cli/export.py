"""Export a model as ONNX, a torch.export program or a package of AOTInductor.

  vil export --run runs/nano --out nano.onnx                   the best checkpoint of a run
  vil export --run runs/nano --out nano.onnx --int8 --check    also int8; evaluate both
  vil export --run runs/nano --out nano.onnx --int8 --calibration photos      static int8
  vil export --run runs/nano --checkpoint last --out nano.pt2 --dynamic batch
  vil export --run runs/nano --out nano.pt2 --to aoti --dynamic batch         compiled for this CPU
  vil export --config-file imagenet/vil_small.yaml MODEL.MODEL_PATH best.pth --out small.onnx

A detector is exported as ONNX only, for one image of the fixed size --size, already resized, with
values from 0 to 1. The outputs are boxes, labels, scores and, if it has them, masks.

The model of another task takes images (B, c, H, W), normalized as in training, and returns logits
(B, classes) or, for regression, numbers (B, numbers) in their original units. Batch size and image
size are dynamic unless --dynamic restricts them. A segmentation model on an MsViT returns logits of
each pixel (B, classes, H, W), and takes either one image of any size (the default) or batches of a
fixed size. The exported model computes in float32 on the CPU, regardless of the precision of
training. The export fails if the outputs of the file differ from those of the original model.

--int8 writes a second file, with int8 linear layers, which change the outputs. Therefore add
--check, which evaluates the original model and both files on the test sets. By default, the int8
layers compute the ranges of their inputs in each call. --calibration computes fixed ranges from a
folder of at least 16 images, which may be in subfolders named after classes of the model.

The metadata of the file has the model, the class names, and the mean, standard deviation and size
of the images; see docs/guides/export.md.
"""

import argparse
from pathlib import Path

from vil.cli.arguments import (
    classes_argument,
    config_arguments,
    files_read,
    height_width,
    run_arguments,
    with_weights,
)
from vil.utils.errors import ConfigError
from vil.utils.output_paths import int8_file, output_file

# {format: ending of the file's name}; the first format of an ending is its default
FORMATS = {"onnx": ".onnx", "torch": ".pt2", "aoti": ".pt2"}
OPEN = ("batch", "size")
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    run_arguments(parser)
    classes_argument(parser)
    add = parser.add_argument
    add("--out", required=True, metavar="FILE", help="file to write, which ends in .onnx or .pt2")
    text = "onnx (default for .onnx), torch (default for .pt2) or aoti (AOTInductor, also .pt2)"
    add("--format", "--to", choices=FORMATS, help=text)
    text = "image size (INPUT.IMAGE_SIZE); if the size is dynamic, only used to check the file"
    add("--size", type=height_width, metavar="N or HxW", help=text)
    text = "dynamic axes: batch,size (default), batch, size or none; a fixed batch is 1 image"
    add("--dynamic", type=_open, metavar="LIST", help=text)
    add("--int8", action="store_true", help="also write FILE.int8.onnx, with int8 linear layers")
    add("--calibration", metavar="DIR", help="folder of images for static --int8")
    add("--opset", type=int, metavar="N", help="ONNX opset (torch's default)")
    add("--check", action="store_true", help="evaluate the model and the files on the test sets")


def _open(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(","))) if text != "none" else ()
    if not set(names) <= set(OPEN):
        raise argparse.ArgumentTypeError(
            f"expected 'batch', 'size', 'batch,size' or 'none', got {text!r}"
        )
    return names


def run(args: argparse.Namespace) -> int:
    from vil.workflows import export

    choose_format(args)
    # The exported model computes in float32 on the CPU. With a fixed batch of one image, the test
    # sets are evaluated image by image.
    args.opts = [*(args.opts or ()), "DEVICE=cpu", "AMP.ENABLED=False", "MODEL.COMPILE=False"]
    open_axes = OPEN if args.dynamic is None else args.dynamic
    args.opts += [] if "batch" in open_axes else ["DATALOADER.BSZ=1"]
    cfg, class_names = with_weights(args)
    options = dict(format=args.format, size=args.size, dynamic=args.dynamic, opset=args.opset)
    own = dict(int8=args.int8, calibration=args.calibration, check=args.check)
    result = export.export_config(cfg, args.out, class_names, **own, **options)
    print_files(result)
    if args.check:
        from vil.utils.metric_format import format_pairs

        part = "test" if cfg.DATA.VAL else "val"
        for test, name, metrics in export.compare_on_test_sets(result, args.format):
            shown = {key: value for key, value in metrics.items() if not isinstance(value, dict)}
            print(f"{part} set {test} {name:18} {format_pairs(shown)}")
    return 0


def print_files(result) -> None:
    """Print the result of an export: which weights were exported, how much the outputs of the file
    differ from those of the model for each input shape, and the size of each file. result: an
    `ExportResult`."""
    print(result.report)
    for difference in result.differences:
        images = " x ".join(map(str, difference.shape))
        print(
            f"  outputs differ from the model's by at most {difference.largest:.1e} "
            f"for image shape {images}"
        )
    if result.num_int8:
        print(f"{result.num_int8} linear layers in int8")
    out, *_ = result.files
    for file in result.files:
        share = file.stat().st_size / out.stat().st_size
        beside = f" ({share:.2f} of {out.name})" if file != out else ""
        print(f"{file}: {file.stat().st_size / MIB:.2f} MiB{beside}")


def choose_format(args: argparse.Namespace) -> None:
    """Set `args.format` according to the ending of --out, if --format is not given.

    Raises ConfigError if the file --out cannot be written, if its ending is unknown or does not
    match --format, or if another flag does not fit the format.
    """
    beside = [int8_file(args.out)] if args.int8 else []
    output_file(args.out, inputs=files_read(args, "out"), beside=beside)
    ending = Path(args.out).suffix
    implied = [name for name, usual in FORMATS.items() if usual == ending]
    if not (args.format or implied):
        raise ConfigError(
            f"--out {args.out}: expected a name that ends in .onnx or .pt2, or the flag --format"
        )
    if implied and args.format not in (None, *implied):
        raise ConfigError(f"--out {args.out}: {ending} does not match --format {args.format}")
    args.format = args.format or implied[0]
    if args.calibration is not None and not args.int8:
        raise ConfigError("--calibration has no effect without --int8: add --int8")
    for flag, given in (("--int8", args.int8), ("--opset", args.opset is not None)):
        if given and args.format != "onnx":
            raise ConfigError(f"{flag} needs --format onnx, got {args.format}")
