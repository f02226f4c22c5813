"""Find objects in pictures, also in very large ones.

  vil detect predict --run runs/scenes photo.jpg --output drawn/
  vil detect predict --run runs/scenes photos/ more.png --score 0.3 --format json
  vil detect predict --run runs/scenes map.png --tile 1024 --overlap 256 --output drawn/
  vil detect predict --run runs/scenes photos/ --format coco --output-file found.json
  vil detect predict --config-file coco/mask_rcnn_vil_tiny_1x.yaml MODEL.MODEL_PATH best photo.jpg
  find . -name '*.jpg' | vil detect predict --run runs/scenes --images - --format json

Pictures may also be given after --images, which takes every word up to the next flag. A folder
stands for all pictures below it. Standard input is one picture, or a list of paths, one per line.

A picture is detected as a whole, its shorter side resized to DETECTION.INPUT.TEST_SIZE. With --tile
it is read once and cut into tiles of that many pixels, which share --overlap pixels; each is then
resized as a picture would be. An object no larger than the overlap is found once, and whole. Tiles
also save memory: a detector makes each mask as large as what it is given.

--output is a folder for the pictures with boxes, classes, scores and masks drawn: NAME.png, or
NAME-2.png where two have the same name. text and json give boxes as x1 y1 x2 y2 in pixels; coco is
one file in COCO's format, with masks, whose annotations have scores. A picture that cannot be read
is a warning and an `error` in the json; the exit code is 3 if none could be read. Classes have the
names of the run's classes.txt or of --classes, else their numbers.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, resolve
from vil.cli.detect_evaluate import at_least
from vil.cli.detect_train import of_detector
from vil.cli.evaluate import loaded_model, of_weights, refuse_random_weights, run_arguments
from vil.cli.output import written
from vil.cli.predict import class_names, refuse_late_keys, sort_words, write
from vil.config import ConfigError
from vil.utils.errors import DataError

SURE = 0.5  # a smaller score is rather no object: as a list of all possible ones is for evaluation
SCORE = "DETECTION.TEST.SCORE"
FORMATS = ("text", "json", "coco")  # of vil.tasks.detection.output_formats, which needs torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser, output="folder for the pictures with what was found drawn in")
    run_arguments(parser)
    add = parser.add_argument
    add(
        "--images",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="files, folders, or - for standard input",
    )
    add("--tile", type=at_least(1), metavar="N", help="side in pixels of the tiles; none: whole")
    add("--overlap", type=at_least(0), metavar="N", help="pixels that tiles share (a quarter)")
    add("--score", metavar="X", help=f"smallest score that counts ({SCORE}, here {SURE})")
    add("--format", choices=FORMATS, default="text", help="of what is printed (text)")
    add("--output-file", metavar="FILE", help="write there instead of to standard output")
    add("--classes", metavar="FILE", help="the names of the classes, one per line")


def run(args: argparse.Namespace) -> int:
    refuse_late_keys(args.images)
    opts, pictures = sort_words(args.opts or [])
    args.images = [*pictures, *args.images]
    if not args.images:
        raise ConfigError("which pictures? files, folders or - for standard input")
    if not (args.run or args.config_file):
        raise ConfigError("which detector? --run DIR, or --config-file FILE MODEL.MODEL_PATH FILE")
    overlap = overlap_of(args)
    folder, args.output_dir = args.output_dir, None
    args.opts = [f"{SCORE}={SURE}", *opts, *([f"{SCORE}={args.score}"] if args.score else ())]
    of_weights(args)
    cfg = of_detector(resolve(args))
    refuse_random_weights(cfg)
    return predict(cfg, args, overlap, folder)


def overlap_of(args: argparse.Namespace) -> int:
    """Of the tiles: as given, or a quarter."""
    if args.tile is None:
        if args.overlap is not None:
            raise ConfigError("--overlap is that of tiles: give --tile, too")
        return 0
    overlap = args.tile // 4 if args.overlap is None else args.overlap
    if overlap >= args.tile:
        raise ConfigError(f"--overlap {overlap} must be smaller than --tile {args.tile}")
    return overlap


def predict(cfg: CfgNode, args: argparse.Namespace, overlap: int, folder: str | None) -> int:
    """Find the pictures, load the weights, list and draw what each picture shows."""
    from vil import build
    from vil.data.datasets.image_list import ImageList, find_images
    from vil.engine.distributed import DistInfo
    from vil.tasks.detection.output_formats import FORMATS

    names = class_names(args, cfg.DATA.NUM_CLASSES)
    pictures = find_images(args.images, lambda: sys.stdin.buffer.read())
    if not pictures:
        raise DataError(f"no images in {', '.join(args.images)}")
    drawing = drawer(folder, names, pictures) if folder else None
    device = build.set_up(cfg)
    model, report = loaded_model(cfg)
    print(report, file=sys.stderr)
    model = build.place(model, cfg, device, training=False)
    build.select_attention_backends(model, cfg, device, DistInfo(), training=False)
    broken: list[str] = []
    finder = finder_of(cfg, model, device, args.tile, overlap)
    shown = findings(ImageList(pictures), finder, drawing, broken)
    whole = write(FORMATS[args.format](shown, names), args.output_file)
    if whole and len(broken) == len(pictures):
        raise DataError(f"none of the {len(pictures)} images could be read")
    return 0


def finder_of(cfg: CfgNode, model, device, tile: int | None, overlap: int) -> Callable:
    """From a picture to what is found in it."""
    from torchvision.transforms.v2.functional import pil_to_tensor

    from vil import build
    from vil.engine.task import autocast, evaluating
    from vil.tasks.detection.tiled_inference import detect, detect_tiled

    test = cfg.DETECTION.TEST

    def find(picture):
        image = pil_to_tensor(picture).to(device)
        with evaluating(model), autocast(device, build.amp_dtype(cfg)):
            if tile is None:
                return detect(model, image)
            limits = dict(nms=test.NMS, per_image=test.PER_IMAGE)
            return detect_tiled(model, image, tile=tile, overlap=overlap, **limits)

    return find


def findings(pictures, find: Callable, drawing: Callable | None, broken: list[str]) -> Iterator:
    """What each picture shows, drawn as it comes; those that cannot be read go to `broken`, too."""
    from vil.data.batch import BadSample
    from vil.data.robust_dataset import BadSampleLog
    from vil.tasks.detection.output_formats import Shown

    ledger = BadSampleLog(len(pictures), max_fraction=1.0)
    for index in range(len(pictures)):
        name = pictures.sample_name(index)
        try:
            picture = pictures.image(index)
        except OSError as error:
            reason = " ".join(str(error).split())
            broken.append(name)
            ledger.record([BadSample(index, name, reason)])
            yield Shown(name, error=reason)
            continue
        found = find(picture)
        if drawing:
            drawing(name, picture, found)
        yield Shown(name, (picture.height, picture.width), found)


def drawer(folder: str, names: list[str], pictures: list) -> Callable:
    """Draws what was found, into a file that is none of `pictures`; ConfigError where it cannot."""
    from vil.data.datasets.image_list import STDIN
    from vil.tasks.detection.visualize import draw

    place, used = Path(folder), set()
    originals = {Path(picture.name).resolve() for picture in pictures}
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror}") from error

    def write_picture(name: str, picture, found) -> None:
        stem = "stdin" if name == STDIN else Path(name).stem
        numbered = (f"{stem}-{number}" for number in itertools.count(2))
        files = (place / f"{each}.png" for each in itertools.chain([stem], numbered))
        free = next(f for f in files if f not in used and f.resolve() not in originals)
        used.add(free)
        with written(free, "--output"):
            draw(picture, found, names).save(free)

    return write_picture
