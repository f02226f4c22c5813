"""Predict the classes of images, or the objects in them.

  vil predict photo.png                                        a digit, with the shipped weights
  vil predict --sample                                         the same for the 360 shipped images
  vil predict --run runs/nano photo.jpg                        the best checkpoint of a run
  vil predict --run runs/nano photos/ more.png --top 3
  vil predict --run runs/nano DEVICE cpu photos/ --format csv --output-file shown.csv
  vil predict --run runs/nano photos/ --output drawn/          with the classes written on copies
  vil predict --run runs/scenes photo.jpg --output drawn/      a detector, with boxes drawn
  vil predict --run runs/scenes map.png --tile 1024 --overlap 256 --output drawn/
  vil predict --run runs/scenes photos/ --format coco --output-file found.json
  vil predict MODEL.MODEL_PATH nano.safetensors photo.jpg      a file of vil convert
  vil predict --config-file imagenet/vil_small.yaml MODEL.MODEL_PATH best.pth photo.jpg
  curl -s URL | vil predict --run runs/nano --images -         one image
  find . -name '*.jpg' | vil predict --run runs/nano --images - --format json

Images may also follow --images, which takes every word up to the next flag. A folder means all
images below it. Standard input is one image, or a list of paths, one per line. Without --run or a
config, the weights of vil_nano that ship with the package are used, which only know the ten digits.
--output is a folder for copies of the images with the predictions drawn on them: NAME.png, or
NAME-2.png for a second image called NAME.

Formats for a classifier: json is an array of {file, classes: [{class, index, probability}]}, csv
has the columns file, rank, class, index, probability, error. Formats for a detector: text and json
have boxes as x1 y1 x2 y2 in pixels; coco is one file in COCO's annotation format, with masks and
scores.

A detector resizes the shorter side of an image to DETECTION.INPUT.TEST_SIZE. --tile N cuts the
image into tiles of N pixels that overlap by --overlap pixels (default: a quarter), and resizes each
tile instead. An object no larger than the overlap is detected once, in full. Tiles also save
memory, since masks are as large as the detector's input.

An image that cannot be read causes a warning, and its prediction has an `error`; the exit code is 3
if no image could be read. Class names come from --classes or from the weights or their run. Without
such names, the classes are numbers.
"""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, files_read, run_arguments, with_weights
from vil.cli.text_output import write_pieces
from vil.config.key_lookup import is_known
from vil.config.registries import registry
from vil.utils.errors import ConfigError, DataError
from vil.utils.output_paths import output_file

LOOKS_LIKE_KEY = re.compile(r"[A-Z][A-Z0-9_]*(\.[A-Z0-9_]+)+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser, output="folder for the images with predictions drawn in")
    run_arguments(parser)
    tasks = registry("task").values()
    formats = [name for task in tasks for name in task.facts.get("formats", ())]
    add = parser.add_argument
    text = "files, folders, or - for standard input"
    add("--images", nargs="+", action="extend", default=[], metavar="PATH", help=text)
    add("--sample", action="store_true", help="the digits that ship with the package")
    text = "classes to give for each image, or all (5)"
    add("--top", type=_number_or_all, default=5, metavar="K", help=text)
    add(
        "--format",
        choices=list(dict.fromkeys(formats)),
        help="format of the predictions; depends on the task",
    )
    add("--output-file", metavar="FILE", help="write there instead of to standard output")
    add("--classes", metavar="FILE", help="the names of the classes, one per line")
    for flag, key in task_flags().items():
        add(f"--{flag}", metavar="X", help=f"sets {key}")


def task_flags() -> dict[str, str]:
    """Return {flag: config key that the flag sets} for the extra prediction flags of all tasks,
    such as "tile" of detection."""
    tasks = registry("task").values()
    return {f: key for task in tasks for f, key in task.facts.get("flags", {}).items()}


def _number_or_all(text: str) -> int | None:
    """Parse a number of classes, at least 1. Returns None for the text "all"."""
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 up, or all, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from vil.workflows import inference, predict

    for word in args.images:
        if is_known(word.partition("=")[0]) and not os.path.exists(word):
            raise ConfigError(f"--images {word}: KEY VALUE pairs come before --images")
    args.opts, words = sort_words(args.opts or [], predict.IMAGE_SUFFIXES)
    words = [*words, *args.images]
    if bool(words) == args.sample:
        raise ConfigError(
            "give either images (files, folders, or - for standard input) or --sample"
        )
    folder, args.output_dir = args.output_dir, None
    use_shipped_weights(args)
    cfg, class_names = config_for_task(args)
    inference.refuse_random_weights(cfg)
    options = dict(sample=args.sample, channels=cfg.INPUT.CHANNELS)
    images, truth = predict.find_images(words, sys.stdin.buffer.read, **options)
    inputs = [*files_read(args, "output_file"), *(image.name for image in images)]
    file = output_file(args.output_file, "--output-file", (), inputs) if args.output_file else None
    drawing = predict.PredictionFolder(folder, images) if folder else None
    model = inference.load_model(cfg, class_names)
    print(model.report, file=sys.stderr)
    model.task.top = args.top
    predictions, tally = predict.predict_files(model, images, drawing), Tally()
    write = model.task.output_formats[args.format or next(iter(model.task.output_formats))]
    predictions = tally.count(predictions, model.classes, truth)
    write_pieces(write(predictions, list(model.classes)), file)
    if tally.failed == len(images):
        raise DataError(f"none of the {len(images)} images could be read")
    return 0


def sort_words(words: list[str], suffixes: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Split words into (config options, images). The options are KEY VALUE or KEY=VALUE.

    A known config key always begins an option. A word that is neither such a key nor a VALUE is an
    image if it is an existing path, has a suffix in `suffixes`, or does not look like a config key;
    otherwise it begins an option, too.
    """
    opts, images, rest = [], [], iter(words)
    for word in rest:
        key = word.partition("=")[0]
        looks = LOOKS_LIKE_KEY.fullmatch(key) and Path(word).suffix.lower() not in suffixes
        if is_known(key) or (looks and not os.path.exists(word)):
            opts += [word] if "=" in word else [word, *itertools.islice(rest, 1)]
        else:
            images.append(word)
    return opts, images


def use_shipped_weights(args: argparse.Namespace) -> None:
    """Change the parsed arguments to load the weights that ship with the package, if they give no
    run, config or model.

    Raises ConfigError for a command of one task, such as `vil detect predict`, because the shipped
    weights are a classifier's.
    """
    from vil.workflows.inference import shipped_weights

    opts = args.opts or []
    if args.run or args.config_file or any(word.startswith("MODEL.") for word in opts):
        return
    if args.required_task:
        noun = registry("task")[args.required_task].facts["noun"]
        raise ConfigError(
            f"no {noun} was given: use --run DIR, or --config-file FILE MODEL.MODEL_PATH FILE"
        )
    args.config_file, own = shipped_weights()
    args.opts = [*own, *opts]
    print("the shipped vil_nano, which knows the digits 0 to 9", file=sys.stderr)


def config_for_task(args: argparse.Namespace) -> tuple[CfgNode, list[str]]:
    """Return (config, class names) for prediction.

    The config's task may have its own defaults for this command, such as a score threshold, and
    its own flags, such as --tile. Both are applied to the config. Raises ConfigError for a flag or
    format that the task does not have.
    """
    cfg, class_names = with_weights(args)
    entry = registry("task")[cfg.TASK]
    noun, formats = entry.facts.get("noun", entry.name), entry.facts.get("formats", ())
    if args.format and args.format not in formats:
        raise ConfigError(f"--format {args.format}: choose from {', '.join(formats)} for a {noun}")
    own = entry.facts.get("flags", {})
    given = {f: getattr(args, f) for f in task_flags() if getattr(args, f) is not None}
    for flag in given:
        if flag not in own:
            raise ConfigError(f"--{flag}: this config is for a {noun}, which has no such flag")
    defaults = [f"{key}={value}" for key, value in entry.facts.get("defaults", {}).items()]
    if defaults or given:
        args.opts = [*defaults, *(args.opts or ()), *(f"{own[f]}={v}" for f, v in given.items())]
        cfg, class_names = with_weights(args)
    return cfg, class_names


class Tally:
    """Counter of unreadable images and, if the true classes are known, of correct predictions."""

    failed = correct = 0

    def count(self, predictions: Iterable[Any], names: list[str], truth: list[str]) -> Iterator:
        """Yield the predictions and count them. After the last one, print how many are correct.

        names: names of the model's classes. truth: true class of each image, or [] if unknown.
        """
        for prediction, wanted in itertools.zip_longest(predictions, truth):
            self.failed += bool(prediction.error)
            if wanted and prediction.classes:
                self.correct += names[prediction.classes[0][0]] == wanted
            yield prediction
        if truth:
            share = 100 * self.correct / len(truth)
            print(f"{self.correct} of {len(truth)} correct, {share:.2f} %", file=sys.stderr)
