"""Predict the classes of images or of their pixels, or the objects in images.

  vil predict photo.png                                        a digit, with the shipped weights
  vil predict --sample                                         the same for the 360 shipped images
  vil predict --run runs/nano photo.jpg                        the best checkpoint of a run
  vil predict --run runs/nano photos/ more.png --top 3
  vil predict --run runs/nano DEVICE cpu photos/ --format csv --output-file shown.csv
  vil predict --run runs/nano photos/ --output drawn/          with the classes written on copies
  vil predict --run runs/scenes photo.jpg --output drawn/      a detector, with boxes drawn
  vil predict --run runs/scenes map.png --tile 1024 --overlap 256 --output drawn/
  vil predict --run runs/scenes photos/ --format coco --output-file found.json
  vil predict MODEL.MODEL_PATH nano.safetensors photo.jpg      weights from vil convert
  vil predict --config-file imagenet/vil_small.yaml MODEL.MODEL_PATH best.pth photo.jpg
  vil predict --run runs/nano photos/ --tta hflip              averaged with the mirror images
  vil predict --run 'runs/fold*' photos/                       averaged over several runs
  vil predict --run runs/nano photos/ --threshold 0.8          only classes with 80 % or more
  vil predict --run runs/nano photos/ --format probabilities --output-file all.csv
  vil predict --run 'runs/fold*' --out-of-fold --format csv --output-file oof.csv
  vil predict --run runs/slides slide.tif --stream --memory 2GiB --scratch /data/scratch
  vil predict --run runs/slides slide.tif --stream --dry-run   only print memory and MACs needed
  vil predict --run runs/slides slide.tif --stream --save stages.3=map.zarr
  vil predict --run runs/earth map.tif --stream --save classes=classes.tif   segmentation
  curl -s URL | vil predict --run runs/nano --images -         one image
  find . -name '*.jpg' | vil predict --run runs/nano --images - --format json

Images may also follow --images, which takes all arguments up to the next flag. A folder stands for
all images in it and its subfolders. Standard input is one image, or a list of paths, one per line.
Without --run or a config, the weights of vil_nano that ship with the package are used, which
recognize only the ten digits. --output is a folder for copies of the images with the predictions
drawn on them: NAME.png, or NAME-2.png and so on for a second image called NAME. Copies of an
earlier command are replaced. No other image is overwritten. A segmentation model writes what
SEGMENTATION.TEST.OUTPUTS lists: overlay for NAME.png, classes for NAME-classes.png, whose pixels
are class numbers, and probabilities for NAME-probabilities.npy, float16 (classes, height, width).

Formats for a classifier: json is an array of {file, classes: [{class, index, probability}]}. csv
has the columns file, rank, class, index, probability and error; with --sample or --out-of-fold, the
column target has the true class. probabilities is a CSV with one line per image. Its columns are
file, one column for each class, target (if known) and error. Formats for a detector: text and json
have boxes as x1 y1 x2 y2 in pixels, with a score of at least 0.5 unless --score or the config's
DETECTION.TEST.SCORE is another than the default. coco is COCO's results format, with the ids of the
annotation file of DATA.TEST or DATA.VAL, if it lists all images. Otherwise, it is one file in
COCO's annotation format, with masks and scores. coco and --out-of-fold have all detections that
DETECTION.TEST.SCORE keeps. Formats for a segmentation model: text and json have the
classes of each image and their shares of its pixels, the largest first.

--tta (test-time augmentation) averages the probabilities of several views of each image. hflip uses
the image and its mirror image; crops uses the image and its four corners (squares of 7/8 of the
shorter side); crops+hflip uses these five and their mirror images; a number N uses the first N of
these ten. The probabilities of several runs are averaged, too. The runs must have the same classes,
and each run uses its own image transform. --threshold P lists only classes with a probability of at
least P. The list can be empty. --out-of-fold is for the runs of a cross-validation and takes no
images: each run predicts its test set, the fold that it was not trained on. These test sets
together must contain each image of the training data exactly once.

A detector resizes the shorter side of an image to DETECTION.INPUT.TEST_SIZE. --tile N cuts the
image into tiles of N pixels that overlap by --overlap pixels (default: a quarter), and resizes each
tile instead. An object no larger than the overlap is detected once, in full. Tiles also save
memory, since masks are as large as the detector's input.

--stream predicts one image of any size in bounded memory. The result is that of the full image,
without resizing, cropping or tiles. The model needs an attention type that supports streaming
(docs/guides/streaming.md), and a segmentation model the head mlp. With --scratch, an interrupted
command resumes if it is run again.

An image that cannot be read causes a warning, and its prediction has an `error`; the exit code is 3
if no image could be read. Class names come from --classes, the weights or their run. If there are
none, class indices are used as names.
"""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vil.cli.arguments import (
    classes_argument,
    config_arguments,
    fast_argument,
    files_read,
    image_arguments,
    run_arguments,
    with_weights,
)
from vil.cli.stream_arguments import (
    ProgressLines,
    check_against_plain,
    check_flags,
    settings_of,
    stream_arguments,
)
from vil.config import override
from vil.config.defaults import KEYS, leaves
from vil.config.key_lookup import is_known
from vil.config.registries import registry
from vil.utils.atomic_write import ESCAPED_TEXT
from vil.utils.errors import ConfigError, DataError
from vil.utils.output_paths import output_file, replacing
from vil.utils.plural import plural
from vil.workflows.configure import ConfigWithClasses

LOOKS_LIKE_KEY = re.compile(r"[A-Z][A-Z0-9_]*(\.[A-Z0-9_]+)+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser, output="folder for images with predictions drawn on them")
    run_arguments(parser, several=True)
    fast_argument(parser)
    image_arguments(parser)
    classes_argument(parser)
    tasks = registry("task").values()
    formats = [name for task in tasks for name in task.facts.get("formats", ())]
    add = parser.add_argument
    text = "predict each image of a cross-validation with the run that was not trained on it"
    add("--out-of-fold", action="store_true", help=text)
    text = "number of classes to list for each image, or all (5)"
    add("--top", type=_number_or_all, metavar="K", help=text)
    text = "list only classes with at least this probability"
    add("--threshold", type=_probability, metavar="P", help=text)
    text = "average over views of each image: hflip, crops, crops+hflip, or a number up to 10"
    add("--tta", metavar="VIEWS", help=text)
    add(
        "--format",
        choices=list(dict.fromkeys(formats)),
        help="format of the predictions; depends on the task",
    )
    add("--output-file", metavar="FILE", help="file for the predictions (default: standard output)")
    for flag, keys in task_flags().items():
        add(f"--{flag}", metavar="X", help=f"value of the config key {' or '.join(keys)}")
    stream_arguments(parser)


def task_flags() -> dict[str, list[str]]:
    """Return {flag: config keys that the flag sets, one per task} for the prediction flags that
    only some tasks have, such as "tile" of detection."""
    flags: dict[str, list[str]] = {}
    for task in registry("task").values():
        for flag, key in task.facts.get("flags", {}).items():
            flags.setdefault(flag, []).append(key)
    return flags


def _number_or_all(text: str) -> int:
    """Parse a number of classes of at least 1, or "all", which is converted to sys.maxsize."""
    if text == "all":
        return sys.maxsize
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f'expected an integer of at least 1, or "all", got {text!r}'
        )
    return int(text)


def _probability(text: str) -> float:
    """Parse a probability from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a probability from 0 to 1, got {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    from vil.workflows import ensemble, inference, predict

    args.opts, words = image_words(args, predict.IMAGE_SUFFIXES)
    check_flags(args, words)
    if args.stream:
        return run_streamed(args, *words)
    if args.out_of_fold:
        return run_out_of_fold(args, words)
    if bool(words) == args.sample:
        raise ConfigError(
            "give either images (files, folders, or - for standard input) or --sample"
        )
    folder, args.output_dir = args.output_dir, None
    use_shipped_weights(args)
    found = [config_for_task(each) for each in one_run_each(args)]
    cfg = found[0].cfg
    settings = predict.task_settings(cfg.TASK, args.format, args.top, args.threshold)
    for each, _ in found:
        weights = each.MODEL.MODEL_PATH or each.MODEL.PRETRAINED
        inference.refuse_random_weights(weights, each.FINETUNE.HEAD)
    ensemble.check_views(cfg.TASK, args.tta, len(found))
    options = dict(sample=args.sample, channels=cfg.INPUT.CHANNELS)
    images, targets = predict.find_images(words, sys.stdin.buffer.read, **options)
    file = checked_output(args, [image.name for image in images])
    drawing = predict.PredictionFolder(folder) if folder else None
    model = ensemble.make_ensemble([inference.load_model(*each) for each in found], args.tta)
    print(model.report, file=sys.stderr)
    model.task.limit_classes(**settings)
    predictions = predict.predict_files(model, images, drawing, targets)
    write_predictions(args, model.task.output_formats, predictions, model.classes, file)
    return 0


def run_streamed(args: argparse.Namespace, image: str) -> int:
    """Predict one image in bounded memory. With --dry-run, only print the memory and the MACs that
    the prediction would need. Returns the exit code. image: path of the image file."""
    from vil.workflows import inference, predict
    from vil.workflows.stream_image import ImageStream

    settings = settings_of(args, image)
    use_shipped_weights(args)
    args.run = next(iter(args.run), None)
    found = config_for_task(args)
    tasks = predict.task_settings(found.cfg.TASK, args.format, args.top, args.threshold)
    file = checked_output(args, [image])
    cfg = override(found.cfg, ["EVAL.FAST=False"])
    model = inference.load_model(cfg, found.class_names)
    print(model.report, file=sys.stderr)
    model.task.limit_classes(**tasks)
    stream = ImageStream(model, image, settings)
    if args.dry_run:
        print(stream.description)
        return 0
    if args.check:
        check_against_plain(stream)
    if stream.is_resumed:
        print(f"resuming from {settings.scratch}", file=sys.stderr)
    predictions = iter([stream.predict(ProgressLines())])
    write_predictions(args, model.task.output_formats, predictions, list(model.classes), file)
    return 0


def run_out_of_fold(args: argparse.Namespace, words: list[str]) -> int:
    """Predict each image of a cross-validation with the run that was not trained on it: each run
    predicts its own test set. Returns the exit code.

    words: images on the command line. Raises ConfigError if there are any.
    """
    from vil.workflows import out_of_fold, predict

    for given, flag in (
        (words, "images"),
        (args.sample, "--sample"),
        (args.output_dir, "--output"),
    ):
        if given:
            raise ConfigError(f"--out-of-fold predicts the runs' test images: leave out {flag}")
    if not args.run:
        raise ConfigError("--out-of-fold needs a run for each fold: --run 'runs/fold*'")
    members = one_run_each(args)
    found = {each.run: config_for_task(each) for each in members}
    cfg = next(iter(found.values())).cfg
    settings = predict.task_settings(cfg.TASK, args.format, args.top, args.threshold)
    file = checked_output(args, ())
    folds = out_of_fold.open_folds(found, args.tta)
    predictions = out_of_fold.iter_out_of_fold(folds, args.tta, settings=settings)
    classes = list(folds[0].class_names)
    write_predictions(args, folds[0].task.output_formats, predictions, classes, file)
    return 0


def image_words(args: argparse.Namespace, suffixes: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Split the positional arguments into (config options, images), and add the images of --images.

    suffixes: suffixes of image files. Raises ConfigError if a config option follows --images. Also
    raises ConfigError if --run is given and one of the images is the folder of a run.
    """
    for word in args.images:
        if is_known(word.partition("=")[0]) and not os.path.exists(word):
            raise ConfigError(f"--images {word}: write KEY VALUE pairs before --images")
    opts, words = sort_words(args.opts or [], suffixes)
    for word in words if args.run else ():
        if Path(word, "config.yaml").is_file() and Path(word, "checkpoints").is_dir():
            raise ConfigError(
                f"{word} is the folder of a run, not of images: write --run before each run, or "
                "once before a quoted pattern, as in --run 'runs/fold*'"
            )
    return opts, [*words, *args.images]


def one_run_each(args: argparse.Namespace) -> list[argparse.Namespace]:
    """Return a list of copies of the arguments: one for each run of --run, with the path of that
    run in the attribute `run`. Without --run, the list has one copy, with `run` None."""
    from vil.workflows.ensemble import find_runs

    return [
        argparse.Namespace(**{**vars(args), "run": run, "opts": list(args.opts)})
        for run in find_runs(args.run) or [None]
    ]


def checked_output(args: argparse.Namespace, images: Iterable[str]) -> Path | None:
    """Return the path of --output-file, or None if the flag is not given. Raises ConfigError if the
    command reads this file, for example as an image. images: paths of the image files."""
    if not args.output_file:
        return None
    inputs = [*files_read(args, "output_file"), *images]
    return output_file(args.output_file, "--output-file", (), inputs)


def write_predictions(
    args: argparse.Namespace,
    formats: Mapping[str, Any],
    predictions: Iterable[Any],
    classes: list[str],
    file: Path | None,
) -> None:
    """Write predictions in the format that the arguments select.

    formats: {format: function that converts predictions to text}, from `Task.output_formats`.
    classes: class names. file: None for standard output. Raises DataError if no image could be
    read.
    """
    tally = Tally()
    write = formats[args.format or next(iter(formats))]
    write_pieces(write(tally.count(predictions, classes), classes), file)
    if tally.failed == tally.total:
        raise DataError(f"none of the {plural(tally.total, 'image')} could be read")


def write_pieces(pieces: Iterable[str], file: Path | None) -> None:
    """Write pieces of text one after another to a file or, if `file` is None, to standard output.

    Raises ConfigError if the file cannot be written, and OutputError if standard output cannot be
    written.
    """
    if file:
        with replacing(file, "--output-file") as aside, aside.open("w", **ESCAPED_TEXT) as stream:
            stream.writelines(pieces)
        return
    for piece in pieces:
        print(piece, end="", flush=True)


def sort_words(words: list[str], suffixes: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Split positional arguments into (config options, images). Options are KEY VALUE or KEY=VALUE.

    A known config key begins an option. So does a word that looks like a config key, unless it is
    an existing path or has one of the `suffixes` of image files.
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
    """Change the parsed arguments to load the weights that ship with the package, unless they
    select a run, config or model."""
    from vil.workflows.inference import shipped_weights

    opts = args.opts or []
    if args.run or args.config_file or any(word.startswith("MODEL.") for word in opts):
        return
    args.config_file, own = shipped_weights()
    args.opts = [*own, *opts]
    print("using the shipped vil_nano, which recognizes the digits 0 to 9", file=sys.stderr)


def config_for_task(args: argparse.Namespace) -> ConfigWithClasses:
    """Return the config and class names for prediction.

    The config includes the task's defaults for this command and the task's extra flags, such as
    --tile. Raises ConfigError for a flag or format that the task does not have.
    """
    found = with_weights(args)
    cfg = found.cfg
    entry = registry("task")[cfg.TASK]
    noun, formats = entry.facts.get("noun", entry.name), entry.facts.get("formats", ())
    if args.format and args.format not in formats:
        raise ConfigError(f"--format {args.format}: choose from {', '.join(formats)} for a {noun}")
    own = entry.facts.get("flags", {})
    given = {f: getattr(args, f) for f in task_flags() if getattr(args, f) is not None}
    for flag in given:
        if flag not in own:
            raise ConfigError(
                f"the model of this config is a {noun}, which does not support --{flag}"
            )
    # for people; results to evaluate have all detections
    is_shown = args.format != "coco" and not args.out_of_fold
    values = leaves(cfg)
    defaults = [
        f"{key}={value}"
        for key, value in entry.facts.get("defaults", {}).items()
        if is_shown and values[key] == KEYS[key].default
    ]
    if defaults or given:
        args.opts = [*defaults, *(args.opts or ()), *(f"{own[f]}={v}" for f, v in given.items())]
        found = with_weights(args)
    return found


class Tally:
    """Counter of predicted images, unreadable images and, if the true classes or labels are known,
    correct predictions."""

    total = failed = correct = compared = 0

    def count(self, predictions: Iterable[Any], names: list[str]) -> Iterator[Any]:
        """Yield the predictions and count them. After the last one, print how many are correct.
        names: names of the model's classes."""
        for prediction in predictions:
            self.total += 1
            self.failed += bool(prediction.error)
            if getattr(prediction, "target", None) is not None:
                is_correct = prediction.is_correct(names)
                self.compared += is_correct is not None
                self.correct += bool(is_correct)
            yield prediction
        if self.compared:
            share = 100 * self.correct / self.compared
            print(f"{self.correct} of {self.compared} correct, {share:.2f} %", file=sys.stderr)
