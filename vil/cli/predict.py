"""Say what pictures show.

  vil predict photo.png                                        which digit: our own small weights
  vil predict --sample                                         the same for the 360 shipped pictures
  vil predict --run runs/nano photo.jpg                        the best checkpoint of a run
  vil predict --run runs/nano photos/ more.png --top 3
  vil predict --run runs/nano DEVICE cpu photos/ --format csv --output-file shown.csv
  vil predict MODEL.MODEL_PATH nano.safetensors photo.jpg      a file of vil convert
  vil predict --config-file imagenet/vil_small.yaml MODEL.MODEL_PATH best.pth photo.jpg
  curl -s URL | vil predict --run runs/nano --images -         one picture
  find . -name '*.jpg' | vil predict --run runs/nano --images - --format json

Pictures may also be given after --images, which takes every word up to the next flag. A folder
stands for all pictures below it. Standard input is one picture, or a list of paths, one per line.
Without --run or a config the weights are those of vil_nano that ship with the package; they know
the ten digits and nothing else.

json is an array of {file, classes: [{class, index, probability}]}, csv has the columns file, rank,
class, index, probability, error. A picture that cannot be read is a warning and has an `error`
instead of classes; the exit code is 3 if none could be read. Classes have the names of the run's
classes.txt or of --classes, else their numbers.
"""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from yacs.config import CfgNode

from vil.cli.arguments import config_arguments, of_classifier, resolve
from vil.cli.evaluate import loaded_model, of_weights, refuse_random_weights, run_arguments
from vil.config import ConfigError
from vil.config.defaults import is_known
from vil.tasks.classification.output_formats import FORMATS, Prediction
from vil.utils.errors import DataError

LOOKS_LIKE_KEY = re.compile(r"[A-Z][A-Z0-9_]*(\.[A-Z0-9_]+)+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
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
    add("--sample", action="store_true", help="the digits that ship with the package")
    add(
        "--top",
        type=_count,
        default=5,
        metavar="K",
        help="classes to give for each picture, or all (5)",
    )
    add("--format", choices=FORMATS, default="table", help="of what is printed (table)")
    add("--output-file", metavar="FILE", help="write there instead of to standard output")
    add("--classes", metavar="FILE", help="the names of the classes, one per line")


def _count(text: str) -> int | None:
    """A number of classes; None for all."""
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 up, or all, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    refuse_late_keys(args.images)
    args.opts, pictures = sort_words(args.opts or [])
    args.images = [*pictures, *args.images]
    if bool(args.images) == args.sample:
        raise ConfigError("which pictures? files, folders or - for standard input; or --sample")
    of_shipped_weights(args)
    of_weights(args)
    cfg = of_classifier(resolve(args), "vil detect predict finds objects")
    refuse_random_weights(cfg)
    return predict(cfg, args, class_names(args, cfg.DATA.NUM_CLASSES))


def refuse_late_keys(images: list[str]) -> None:
    """ConfigError for settings that --images took for pictures."""
    for word in images:
        if is_known(word.partition("=")[0]) and not os.path.exists(word):
            raise ConfigError(f"--images {word}: KEY VALUE pairs stand before --images")


def sort_words(words: list[str]) -> tuple[list[str], list[str]]:
    """KEY VALUE and KEY=VALUE, and the words that are pictures: files, or no key by their look."""
    from vil.data.datasets.folder import EXTENSIONS

    opts, pictures, rest = [], [], iter(words)
    for word in rest:
        key = word.partition("=")[0]
        looks = LOOKS_LIKE_KEY.fullmatch(key) and Path(word).suffix.lower() not in EXTENSIONS
        if is_known(key) or (looks and not os.path.exists(word)):
            opts += [word] if "=" in word else [word, *itertools.islice(rest, 1)]
        else:
            pictures.append(word)
    return opts, pictures


def of_shipped_weights(args: argparse.Namespace) -> None:
    """Without a run, a config or a model in `opts`: put the shipped weights and their config where
    `resolve` finds them."""
    from vil.pretrained.catalog import DIGITS

    opts = args.opts or []
    if args.run or args.config_file or any(word.startswith("MODEL.") for word in opts):
        return
    args.config_file = DIGITS.meta["recipe"].removeprefix("configs/")
    args.opts = [f"MODEL.MODEL_PATH={DIGITS.url}", *opts]
    print("the shipped vil_nano, which knows the digits 0 to 9", file=sys.stderr)


def class_names(args: argparse.Namespace, count: int) -> list[str]:
    """The lines of --classes or of the run's classes.txt, `count` of them; else the numbers."""
    file = args.classes
    if file is None and args.run and Path(args.run, "classes.txt").is_file():
        file = Path(args.run, "classes.txt")
    if file is None:
        known = getattr(args, "known_classes", None)  # of a file that says what it is
        return known or [str(number) for number in range(count)]
    try:
        with open(file, encoding="utf-8", errors="surrogateescape") as lines:
            names = [line.rstrip("\n") for line in lines]
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    if len(names) != count:
        raise ConfigError(f"{file} has {len(names)} lines, but DATA.NUM_CLASSES is {count}")
    return names


def predict(cfg: CfgNode, args: argparse.Namespace, names: list[str]) -> int:
    """Find the pictures, load the weights, print what each picture shows."""
    from vil import build, build_data
    from vil.data.datasets.demo_digits import read_demo_digits
    from vil.data.datasets.image_list import ImageListLoader, find_images
    from vil.data.workers import worker_errors
    from vil.engine.distributed import DistInfo

    if args.sample:
        pictures, classes = read_demo_digits()
    else:
        pictures, classes = find_images(args.images, lambda: sys.stdin.buffer.read()), []
    if not pictures:
        raise DataError(f"no images in {', '.join(args.images)}")
    device = build.set_up(cfg)
    model, report = loaded_model(cfg)
    print(report, file=sys.stderr)
    model = build.place(model, cfg, device, training=False)
    build.select_attention_backends(model, cfg, device, DistInfo(), training=False)
    loader = ImageListLoader(
        pictures,
        build_data.build_eval_transform(cfg),
        batch_size=cfg.DATALOADER.BSZ,
        workers=cfg.DATALOADER.WORKERS,
        pin_memory=device.type == "cuda",
    )
    with worker_errors(), closing(predictions(cfg, model, device, loader, args.top)) as shown:
        if classes:
            shown = counted(shown, names, classes)
        whole = write(FORMATS[args.format](shown, names), args.output_file)
    if whole and len(loader.bad_samples.seen) == len(pictures):
        raise DataError(f"none of the {len(pictures)} images could be read")
    return 0


def counted(shown: Iterable[Prediction], names: list[str], classes: list[str]):
    """The predictions; and, once all are out, how many are right."""
    right = 0
    for prediction, wanted in zip(shown, classes):
        right += bool(prediction.classes) and names[prediction.classes[0][0]] == wanted
        yield prediction
    print(f"{right} of {len(classes)} right, {100 * right / len(classes):.2f} %", file=sys.stderr)


def predictions(cfg, model, device, loader, top: int | None) -> Iterator[Prediction]:
    """One for each picture, in the order of the loader."""
    with closing(iter(loader)) as batches:
        for batch in batches:
            found = {
                report.index: Prediction(report.name, [], report.reason)
                for report in batch.bad_samples
            }
            if len(batch):
                # stable: of equally probable classes the first comes first, on every device
                ranked = probabilities(cfg, model, device, batch).sort(descending=True, stable=True)
                columns = (ranked.indices[:, :top].tolist(), ranked.values[:, :top].tolist())
                for index, *row in zip(batch.indices.tolist(), *columns):
                    found[index] = Prediction(loader.names[index], list(zip(*row)))
            yield from (found[index] for index in sorted(found))


def probabilities(cfg, model, device, batch):
    """(B, K) float32 on the host, for B images and K classes."""
    from vil import build
    from vil.engine.task import autocast, evaluating

    layout = build.MEMORY_FORMATS[cfg.AMP.MEMORY_FORMAT]
    with evaluating(model), autocast(device, build.amp_dtype(cfg)):
        logits = model(batch.to(device, layout).images)
    return logits.float().softmax(dim=-1).cpu()


def write(pieces: Iterable[str], file: str | None) -> bool:
    """To the file, or to standard output; False when the reader of that had enough (`| head`).
    ConfigError where it cannot be written (a full disk)."""
    try:
        with output(file) as stream:
            for piece in pieces:
                put(piece, stream, file)
    except BrokenPipeError:
        forget_output()
        return False
    return True


def put(piece: str, stream: TextIO, file: str | None) -> None:
    """One piece, through all buffers, so that only writing can fail here."""
    try:
        stream.write(piece)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if file is None:
            forget_output()
        name = "standard output" if file is None else f"--output-file {file}"
        raise ConfigError(f"{name}: {error.strerror or error}") from error


def forget_output() -> None:
    """Python may flush stdout once more as it ends (its documentation, "Note on SIGPIPE")."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def output(file: str | None) -> Iterator[TextIO]:
    """The stream to write to. Names of files that are not UTF-8 must not stop the writing; main has
    seen to it for standard output."""
    if file is None:
        yield sys.stdout
        return
    escape = "backslashreplace"
    try:
        stream = open(file, "w", encoding="utf-8", errors=escape, newline="")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"--output-file {file}: {error.strerror}") from error
    try:
        yield stream
    finally:
        with suppress(OSError):  # what could not be written has been told
            stream.close()
