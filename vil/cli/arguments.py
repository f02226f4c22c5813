"""The flags every command with a config shares, and the config they make.

The command lines of the 2021 original work as they are; the other spellings are those people know
from Swin, timm and detectron2.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any

from yacs.config import CfgNode

from vil.config.registries import registry
from vil.utils.errors import ConfigError
from vil.workflows import configure

# Flags that set a key: {destination: key}. A flag wins over the file and over KEY VALUE.
FLAGS = {"data": "DATA.PATH", "output_dir": "OUTPUT_DIR", "seed": "SEED"}


def config_arguments(
    parser: argparse.ArgumentParser, output: str = "folder of the run (OUTPUT_DIR)"
) -> None:
    """Add --config-file, --data, --output_dir, --seed and the trailing KEY VALUE pairs.

    output: what a command that makes no run has --output for.
    """
    add = parser.add_argument
    text = "YAML file; also the path of a packaged one, such as imagenet/vil_tiny.yaml"
    add("--config-file", "--config_file", "--cfg", metavar="FILE", help=text)
    names = ("--data", "--data-path", "--data_path", "--data-dir", "--data_dir")
    add(*names, metavar="DIR", help="root folder of the data (DATA.PATH)")
    add("--output_dir", "--output-dir", "--output", metavar="DIR", help=output)
    add("--seed", metavar="N", help="seed of every random draw (SEED)")
    import_argument(parser)
    # Old launchers pass the rank as a flag; it is read from the environment instead.
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    add("--opts", nargs="*", action="extend", dest="opts", help=argparse.SUPPRESS)
    text = "set any key, as KEY VALUE or KEY=VALUE; docs/reference/config.md lists them"
    add("opts", nargs="*", action="extend", metavar="KEY VALUE", help=text)


def import_argument(parser: argparse.ArgumentParser) -> None:
    """Add --import."""
    text = "run a Python file first, which may register components (docs/guides/plugins.md)"
    names = dict(dest="imports", metavar="FILE", help=text)
    parser.add_argument("--import", action="append", default=[], **names)


def run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --run and --checkpoint, which `with_weights` reads."""
    add = parser.add_argument
    # torchrun takes --run for an abbreviation of its own --run-path
    text = "the folder of a run: its config and one of its checkpoints"
    add("--run", "--run-dir", metavar="DIR", help=text)
    add("--checkpoint", default="best", choices=["best", "last"], help="which one of --run")


def resolve(args: argparse.Namespace) -> CfgNode:
    """The frozen config that the arguments ask for."""
    return resolve_with_sources(args)[0]


def resolve_with_sources(args: argparse.Namespace) -> tuple[CfgNode, dict[str, str]]:
    """The config and {key: where its value was given}."""
    found = configure.resolve(args.config_file, options_of(args))
    check_task(args, found[0])
    return found


def with_weights(args: argparse.Namespace) -> configure.ConfigWithClasses:
    """The config of --run, of --config-file, or of a file of weights that describes itself, and the
    names of the classes: of --classes, else those that the weights were trained on."""
    if args.run and args.config_file:
        raise ConfigError(f"--run {args.run}: leave --config-file out, the run has its own")
    if args.run:
        found = configure.run_config(args.run, options_of(args), checkpoint=args.checkpoint)
    else:
        found = configure.weights_config(args.config_file, options_of(args))
    check_task(args, found.cfg)
    if getattr(args, "classes", None):
        names = configure.read_class_file(args.classes, found.cfg.DATA.NUM_CLASSES)
        found = found._replace(class_names=names)
    return found


def check_task(args: argparse.Namespace, cfg: CfgNode) -> None:
    """Raise ConfigError unless the config is for the task that the command was spelled for."""
    required = getattr(args, "required_task", None)
    if required in (None, cfg.TASK):
        return
    wanted, found = registry("task")[required], registry("task")[cfg.TASK]
    noun = found.facts.get("noun", found.name)
    raise ConfigError(f"this config is a {noun}'s: {wanted.facts['hint']}")


def options_of(args: argparse.Namespace) -> configure.Options:
    """KEY VALUE, the flags that set a key, and --import."""
    flags = {key: getattr(args, name) for name, key in FLAGS.items()}
    return configure.Options(args.opts or (), flags, args.imports)


# Parsers of one argument. As an argparse `type`, or by `convert`, which reports in one line.


def at_least(smallest: int) -> Callable[[str], int]:
    """Return a parser of integers of at least `smallest`."""

    def number(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < smallest:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {smallest} up, got {text!r}"
            )
        return int(text)

    return number


def listed(item: Callable[[str], Any] = str) -> Callable[[str], list]:
    """Return a parser of items joined by commas, each once: 'a,b' -> ['a', 'b']."""

    def items(text: str) -> list:
        words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
        if not words:
            raise ValueError(f"expected names or numbers joined by commas, got {text!r}")
        return [item(word) for word in words]

    return items


def height_width(text: str) -> tuple[int, int]:
    """Parse '14' -> (14, 14), '14x20' -> (14, 20)."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"expected 14 or 14x20, from 1 up, got {text!r}")
    return int(sides[0]), int(sides[-1])


def convert(args: argparse.Namespace, parsers: Mapping[str, Callable[[str], Any]]) -> dict:
    """Parse arguments that are still text; return {name: value}, None for those not given."""
    values = vars(args)
    for name, parse in parsers.items():
        try:
            values[name] = None if values[name] is None else parse(values[name])
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None
    return {name: values[name] for name in parsers}
