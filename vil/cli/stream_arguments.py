"""Flags and progress output of `vil predict --stream`."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from vil.cli.arguments import files_read
from vil.utils.errors import ConfigError, ExportError
from vil.utils.output_paths import output_file

ONLY = ("memory", "scratch", "save", "dry_run", "check")  # flags that need --stream
UNUSED = (
    "output_dir",
    "sample",
    "out_of_fold",
    "tta",
    "fast",
)  # flags that cannot be combined with --stream
MEMORY = "1GiB"
REPORT_SECONDS = 5.0  # between two lines of progress, if stderr is not a terminal
CHECK_TOLERANCE = 1e-3  # as a fraction of the largest absolute logit
CHECK_TOLERANCE_AMP = 5e-2  # with autocast


def stream_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a streamed prediction."""
    add = parser.add_argument
    add("--stream", action="store_true", help="predict one image of any size in bounded memory")
    add("--memory", metavar="SIZE", help=f"--stream: limit on tensor memory ({MEMORY})")
    text = "--stream: folder for intermediate results, from which an interrupted command resumes"
    add("--scratch", metavar="DIR", help=text)
    text = (
        "--stream: save a stage's output, such as stages.2=map.npy, .zarr or .tif, or the classes "
        "of a segmentation model, such as classes=map.tif or .png; repeatable"
    )
    add("--save", action="append", default=[], metavar="OUTPUT=FILE", help=text)
    add("--dry-run", action="store_true", help="--stream: only print memory and MACs needed")
    text = "--stream: first check on a crop that streaming does not change the model's output"
    add("--check", action="store_true", help=text)


def check_flags(args: argparse.Namespace, images: list[str]) -> None:
    """Check the flags that depend on --stream. images: paths of the images to predict.

    Raises ConfigError for a flag that needs --stream without it, and for a flag that cannot be
    combined with it. With --stream, also raises ConfigError for several runs, and unless there is
    exactly one image file.
    """
    if not args.stream:
        for name in ONLY:
            if getattr(args, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs --stream")
        return
    for name in UNUSED:
        if getattr(args, name):
            flag = "output" if name == "output_dir" else name.replace("_", "-")
            raise ConfigError(f"--stream cannot be combined with --{flag}: leave out --{flag}")
    if len(args.run) > 1:
        raise ConfigError(f"--stream takes one --run, got {len(args.run)}")
    if args.dry_run and args.check:
        raise ConfigError("--check cannot be combined with --dry-run: leave out --check")
    if images == ["-"]:
        raise ConfigError("--stream takes an image file, not standard input (-)")
    if len(images) != 1:
        raise ConfigError(f"--stream takes one image file, got {len(images)} of them")


def settings_of(args: argparse.Namespace, image: str) -> Any:
    """Check that the files of --save may be written, and return the `StreamSettings` that the
    arguments describe. image: path of the image to predict."""
    from vil.workflows.stream_image import StreamSettings, describe_save

    save = describe_save(args.save)
    inputs = [*files_read(args, "save"), Path(image)]
    for file in save.values():
        if file.suffix.lower() != ".zarr":
            output_file(file, "--save", (), inputs)
        elif any(file.resolve() == Path(each).resolve() for each in inputs):
            raise ConfigError(f"--save {file}: the command reads this file; choose another name")
        if args.output_file and file.resolve() == Path(args.output_file).resolve():
            raise ConfigError(f"--save {file}: --output-file writes this file; choose another name")
    scratch = Path(args.scratch) if args.scratch else None
    return StreamSettings(args.memory or MEMORY, scratch, save)


class ProgressLines:
    """Callback that prints progress to stderr: one changing line on a terminal, otherwise a line
    every REPORT_SECONDS."""

    def __init__(self) -> None:
        self.is_terminal, self.printed = sys.stderr.isatty(), time.monotonic()

    def __call__(self, share: float, seconds: float) -> None:
        interval = 1.0 if self.is_terminal else REPORT_SECONDS
        if time.monotonic() - self.printed < interval:
            return
        self.printed = time.monotonic()
        text = f"streamed {100 * share:.1f} %, about {seconds:.0f} s left"
        print(f"{text:40}", end="\r" if self.is_terminal else "\n", file=sys.stderr, flush=True)


def check_against_plain(stream: Any) -> None:
    """Print how much the streamed output for a crop differs from that of a plain forward pass.
    Raises ExportError if the difference is larger than rounding errors. stream: an `ImageStream`.
    """
    amp = stream.source.task.amp_dtype is not None
    difference, limit = stream.check_crop(), CHECK_TOLERANCE_AMP if amp else CHECK_TOLERANCE
    text = (
        "the logits of a streamed crop differ from those of a normal forward pass by "
        f"{difference:.1e} of the largest absolute logit"
    )
    print(text, file=sys.stderr)
    if not difference <= limit:
        raise ExportError(f"{text}, but the largest allowed difference is {limit:.0e}")
