"""Train a model from a config, or resume a run.

vil train --config-file digits/vil_nano.yaml --output_dir runs/nano
vil train --config-file digits/vil_nano.yaml --output_dir runs/nano --resume
vil train --config-file mine.yaml --data /data/flowers OPTIM.LR 5e-4 OPTIM.EPOCHS 100
vil train --config-file scenes/mask_rcnn_vil_nano.yaml --output_dir runs/scenes      a detector
torchrun --nproc_per_node=8 tools/train.py --config-file imagenet/vil_small_rpb.yaml --data DIR
vil train --config-file mine.yaml --preset finetune MODEL.MODEL_PATH runs/nano    fine-tune
vil train --config-file mine.yaml --dry-run     check data and config, and run one step

--dry-run fails if the data are missing or invalid. It prints how many images and classes there are,
opens 32 images of each set (`vil data check` opens all), saves a plot of the first training images
as the model gets them, and runs one step on synthetic images. It creates no run.

MODEL.MODEL_PATH is the source of the initial weights: a weight file, or the folder of a run or
checkpoint. If you train a detector, the weights of a classifier or of a detector of the original
2021 code are loaded into the backbone only.
"""

import argparse
import math
import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vil.cli.arguments import (
    config_arguments,
    options_of,
    preset_argument,
    resolve_with_sources,
)
from vil.config import defaults, describe_preset, diff, dump
from vil.config.dump_yaml import dump_value
from vil.utils.console import WIDTH, fit_to_terminal, printable
from vil.utils.errors import INTERRUPTED, ConfigError
from vil.utils.plural import plural
from vil.workflows.configure import saved_config

if TYPE_CHECKING:
    from vil.workflows.dry_run import DatasetSummary, DataSummary, DryRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    preset_argument(parser)
    text = "resume from the newest checkpoint in OUTPUT_DIR, by default with the config there"
    parser.add_argument("--resume", action="store_true", help=text)
    text = "describe the data, run one step on synthetic images, print its memory and the config"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "with --dry-run: print all config keys as YAML, not only changed keys"
    parser.add_argument("--all", action="store_true", help=text)
    text = "with --dry-run: PNG file for the example images (default: OUTPUT_DIR.dry-run.png)"
    parser.add_argument("--example", metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    if args.resume and not args.config_file:
        args.config_file = saved_config(options_of(args))
    cfg, sources = resolve_with_sources(args)
    if args.preset and os.environ.get("RANK", "0") == "0":
        print("\n".join(describe_preset(args.preset, cfg, sources)))
    if args.dry_run:
        from vil.workflows.dry_run import dry_run

        is_main = os.environ.get("RANK", "0") == "0"
        done = dry_run(cfg, example=args.example, show=print_data if is_main else None)
        if is_main:
            settings = [dump(cfg)] if args.all else changed_keys(diff(cfg, defaults.tree()))
            print_dry_run(done, settings, full_log=args.all)
        return 0
    for flag in ("all", "example"):
        if getattr(args, flag):
            raise ConfigError(f"--{flag} needs --dry-run")
    if cfg.EVALUATE:  # a key of the 2021 code
        from vil.cli.evaluate import print_evaluation
        from vil.workflows.evaluate import evaluate_config

        print_evaluation(evaluate_config(cfg))
        return 0
    from vil.workflows.train import train_config

    result = train_config(cfg, resume=args.resume)
    return INTERRUPTED if result.status == "interrupted" else 0


def print_dry_run(done: "DryRun", settings: list[str], *, full_log: bool = False) -> None:
    """Print the result of a dry run, after the description of its data. settings: lines that show
    the config. full_log: print all lines that a run would log, not only warnings."""
    for line in done.log if full_log else (f"WARNING {text}" for text in done.warnings):
        print(fit_to_terminal(line))
    print(*settings, sep="\n")
    loss = f"the first loss is {done.loss:.4g}"
    if math.isnan(done.loss):
        loss = "the first step is skipped, because its loss or gradient is not finite"
    print(f"the model has {done.num_parameters:,} parameters; {loss}")
    images = plural(done.num_images, "synthetic image")
    print(f"dry run: one step of {images} needed at most {done.memory_mb:.0f} MiB")


def print_data(data: "DataSummary") -> None:
    """Describe each dataset of a config in a few lines: number of images, classes, image sizes, and
    images that cannot be read."""
    lines = []
    for found in data.datasets:
        images = plural(found.num_images, "image")
        lines.append(f"{found.split} {found.name}: {images}{_classes(found)}")
        if found.remark:
            lines.append(f"  {found.remark}")
        counts = sorted(found.class_counts.items(), key=lambda item: item[1])
        if counts:
            (small, fewest), (large, most) = counts[0], counts[-1]
            ratio = f", a ratio of {most / fewest:.3g}" if fewest else ""
            lines.append(
                f"  {data.counted} per class: {fewest} ({printable(small)}) to {most} "
                f"({printable(large)}){ratio}"
            )
        tried = len(found.sizes) + found.unreadable
        if found.sizes:
            low, mid, high = (f"{width} x {height}" for width, height in found.size_range)
            images = plural(len(found.sizes), "image")
            if tried < found.num_images:
                images = (
                    f"{len(found.sizes)} of {found.num_images} images (vil data check reads all)"
                )
            lines.append(f"  width x height of {images}: median {mid}, {low} to {high}")
        if found.unreadable:
            lines.append(
                f"  {found.unreadable} of {tried} images cannot be read, such as {found.example}: "
                "vil data check lists all"
            )
    steps = plural(data.steps_per_epoch, "step")
    lines.append(f"  ({data.note})" if data.note else f"an epoch has {steps}")
    if data.example:
        lines.append(f"the first training images, as the model gets them: {data.example}")
    print(fit_to_terminal("\n".join(lines)), flush=True)


def _classes(found: "DatasetSummary") -> str:
    empty = sum(count == 0 for count in found.class_counts.values())
    without = f", {empty} of them empty" if empty else ""
    classes = plural(found.num_classes, "class", "classes")
    return f" of {classes}{without}" if found.class_counts else ""


def changed_keys(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return a heading, and lines of KEY=VALUE words for the config keys that differ from the
    defaults. Only a line with a single word may be longer than 100 columns. changed: {config key:
    (value, default)}."""
    values = {key: value for key, (value, _) in changed.items()}
    texts = {key: "" if value == "" else dump_value(value) for key, value in values.items()}
    words = [shlex.quote(f"{key}={text}") for key, text in texts.items()]
    lines = ["keys that differ from the defaults (--all prints all keys):"]
    for word in words:
        if len(lines) > 1 and len(lines[-1]) + len(word) < WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}")
    return lines
