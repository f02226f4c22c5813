"""Define the flags that several commands share, and make the config from the parsed arguments.

The command lines of the original 2021 code still work. Flags can also be spelled as in Swin, timm
and detectron2.
"""

import argparse
import itertools
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from yacs.config import CfgNode

from vil.utils.errors import ConfigError
from vil.workflows import configure

log = logging.getLogger(__name__)

# {name of a parsed argument: config key that its flag sets}. These flags override the config file
# and KEY VALUE pairs.
FLAGS = {"data": "DATA.PATH", "output_dir": "OUTPUT_DIR", "seed": "SEED", "fast": "EVAL.FAST"}


def config_arguments(
    parser: argparse.ArgumentParser, output: str = "folder of the run (OUTPUT_DIR)"
) -> None:
    """Add the arguments that describe a config: --config-file, --data, --output_dir, --seed,
    --import, and trailing KEY VALUE pairs.

    output: help text of --output_dir, for commands that do not create a run.
    """
    add = parser.add_argument
    text = "YAML config file, or the path of a packaged config, such as imagenet/vil_tiny.yaml"
    add("--config-file", "--config_file", "--cfg", metavar="FILE", help=text)
    names = ("--data", "--data-path", "--data_path", "--data-dir", "--data_dir")
    add(*names, metavar="DIR", help="root folder of the data (DATA.PATH)")
    add("--output_dir", "--output-dir", "--output", metavar="DIR", help=output)
    add("--seed", metavar="N", help="random seed (SEED)")
    import_argument(parser)
    # Old launchers pass the local rank as a flag. It is ignored: the environment has the rank.
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    add("--opts", nargs="*", action="extend", dest="opts", help=argparse.SUPPRESS)
    text = "set config keys as KEY VALUE or KEY=VALUE; docs/reference/config.md lists all keys"
    add("opts", nargs="*", action="extend", metavar="KEY VALUE", help=text)


def import_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag --import, for Python files that register components."""
    text = "run a Python file first, for example to register components (docs/guides/plugins.md)"
    names = dict(dest="imports", metavar="FILE", help=text)
    parser.add_argument("--import", action="append", default=[], **names)


def preset_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag --preset, which names a set of config values. The config file and KEY VALUE
    pairs take precedence over these values."""
    text = (
        "set and print the keys of a preset: finetune, small_data or scratch; "
        "keys in the config file and KEY VALUE pairs take precedence"
    )
    parser.add_argument("--preset", metavar="NAME", help=text)


def fast_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag --fast, for commands that run a model without training it."""
    text = "optimize the model for inference: pack weights, store nothing for gradients (EVAL.FAST)"
    parser.add_argument("--fast", action="store_const", const="True", help=text)


def run_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the flags --run and --checkpoint, for commands that load the weights of a run. several:
    whether --run may be repeated, so that its value is a list."""
    add = parser.add_argument
    # torchrun refuses --run, which it reads as an abbreviation of its own flag --run-path
    text = "folder of a run, whose config and checkpoint are loaded; torchrun needs --run-dir"
    own = {}
    if several:
        own = dict(action="append", default=[])
        text += "; may be repeated, or be a quoted pattern such as 'runs/fold*'"
    add("--run", "--run-dir", metavar="DIR", help=text, **own)
    checkpoint_argument(parser, "checkpoint of --run to load (best)")


def checkpoint_argument(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the flag --checkpoint, which selects a checkpoint of a run. text: its help text."""
    parser.add_argument("--checkpoint", default="best", choices=["best", "last"], help=text)


def classes_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag --classes, for commands that show or store class names."""
    text = "file with the class names, one per line (default: those of the run or the weights)"
    parser.add_argument("--classes", metavar="FILE", help=text)


def image_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags --images and --sample, for commands that take any number of images."""
    add = parser.add_argument
    text = "files, folders, or - for standard input"
    add("--images", nargs="+", action="extend", default=[], metavar="PATH", help=text)
    add("--sample", action="store_true", help="use the digit images that ship with the package")


def resolve(args: argparse.Namespace) -> CfgNode:
    """Make the frozen config that a command's parsed arguments describe."""
    return resolve_with_sources(args)[0]


def resolve_with_sources(args: argparse.Namespace) -> tuple[CfgNode, dict[str, str]]:
    """Make the frozen config that a command's parsed arguments describe. Returns (config, sources),
    where sources is {config key: where its value was set, such as a file name}."""
    return configure.resolve(args.config_file, options_of(args))


def with_weights(
    args: argparse.Namespace, default: str | None = None
) -> configure.ConfigWithClasses:
    """Return the config and the class names for a command that uses trained weights.

    The config comes from --run, --config-file, or the weights. If none of them has a config, the
    config file `default` is used. The class names come from --classes or, by default, from the run
    or the weights.
    """
    if args.run and args.config_file:
        raise ConfigError(f"--run {args.run}: the run's config is used, so leave --config-file out")
    if args.run:
        found = configure.run_config(args.run, options_of(args), checkpoint=args.checkpoint)
    else:
        found = configure.weights_config(args.config_file, options_of(args), default)
    if getattr(args, "classes", None):
        count = found.cfg.DATA.NUM_CLASSES
        names = configure.read_class_file(args.classes, count, found.class_names)
        if sorted(names) == sorted(found.class_names) and names != list(found.class_names):
            log.warning(
                "--classes %s lists the model's classes in another order: the model's order is "
                "used",
                args.classes,
            )
        else:
            found = found._replace(class_names=names)
    return found


def options_of(args: argparse.Namespace) -> configure.Options:
    """Collect the arguments that change the config: KEY VALUE words, flags that set a config key
    (FLAGS), --import and --preset."""
    flags = {key: getattr(args, name, None) for name, key in FLAGS.items()}
    preset = getattr(args, "preset", None)
    return configure.Options(args.opts or (), flags, args.imports, preset)


def files_read(args: argparse.Namespace, *outputs: str) -> list[Path]:
    """List the existing files that a command's arguments name, so that its output does not
    overwrite them.

    If an argument is a folder with .safetensors files, all files in this folder are listed.
    outputs: names of arguments to ignore, because they set output paths.
    """
    values = [value for name, value in vars(args).items() if name not in outputs]
    words = itertools.chain.from_iterable(x if isinstance(x, list) else [x] for x in values)
    texts = [word for word in words if isinstance(word, str)]
    files = []
    for path in map(Path, filter(None, [*texts, *(word.partition("=")[2] for word in texts)])):
        with suppress(OSError, ValueError):  # a word that cannot be a path
            is_run = (path / "config.yaml").is_file()
            is_weights = path.is_dir() and not is_run and any(path.glob("*.safetensors"))
            files += path.glob("*") if is_weights else [path] if path.is_file() else []
    return files


# Parsers of one argument, for argparse's `type`


def at_least(smallest: int) -> Callable[[str], int]:
    """Return a function that parses an integer of at least `smallest`."""

    def number(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < smallest:
            raise argparse.ArgumentTypeError(
                f"expected an integer of at least {smallest}, got {text!r}"
            )
        return int(text)

    return number


def listed(item: Callable[[str], Any] = str) -> Callable[[str], list]:
    """Return a function that parses comma-separated text, such as 'a,b', and returns a list without
    duplicates. item: function that parses one item."""

    def items(text: str) -> list:
        words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
        if not words:
            raise argparse.ArgumentTypeError(
                f"expected names or numbers separated by commas, got {text!r}"
            )
        return [item(word) for word in words]

    return items


def height_width(text: str) -> tuple[int, int]:
    """Parse a size as (height, width): '14' as (14, 14), '14x20' as (14, 20)."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(
            f"expected a size such as 14 or 14x20, each number at least 1, got {text!r}"
        )
    return int(sides[0]), int(sides[-1])
