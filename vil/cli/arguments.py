"""The flags every command with a config shares, and the config they make.

The command lines of the 2021 original work as they are; the other spellings are those people know
from Swin, timm and detectron2.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from yacs.config import CfgNode

from vil.config import ConfigError, load_config

# Flags that set a key: {destination: key}. A flag wins over the file and over KEY VALUE.
FLAGS = {"data": "DATA.PATH", "output_dir": "OUTPUT_DIR", "seed": "SEED"}
# What the original read where the flag was absent; here every other source wins over them.
ENVIRONMENT = {"DATA.PATH": "PT_DATA_DIR", "OUTPUT_DIR": "PT_OUTPUT_DIR"}


def config_arguments(
    parser: argparse.ArgumentParser, output: str = "folder of the run (OUTPUT_DIR)"
) -> None:
    """Add --config-file, --data, --output_dir, --seed and the trailing KEY VALUE pairs.

    output: what a command that makes no run has --output for.
    """
    add = parser.add_argument
    add(
        "--config-file",
        "--config_file",
        "--cfg",
        metavar="FILE",
        help="YAML file; also the path of a packaged one, such as imagenet/vil_tiny.yaml",
    )
    add(
        "--data",
        "--data-path",
        "--data_path",
        "--data-dir",
        "--data_dir",
        metavar="DIR",
        help="root folder of the data (DATA.PATH)",
    )
    add(
        "--output_dir",
        "--output-dir",
        "--output",
        metavar="DIR",
        help=output,
    )
    add("--seed", metavar="N", help="seed of every random draw (SEED)")
    import_argument(parser)
    # Old launchers pass the rank as a flag; it is read from the environment instead.
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    add("--opts", nargs="*", action="extend", dest="opts", help=argparse.SUPPRESS)
    add(
        "opts",
        nargs="*",
        action="extend",
        metavar="KEY VALUE",
        help="set any key, as KEY VALUE or KEY=VALUE; docs/config.md lists them",
    )


def import_argument(parser: argparse.ArgumentParser) -> None:
    """Add --import, for `import_file`."""
    parser.add_argument(
        "--import",
        dest="imports",
        metavar="FILE",
        action="append",
        default=[],
        help="run a Python file first, which may add backends (vil.ops.register_backend)",
    )


def resolve(args: argparse.Namespace) -> CfgNode:
    """The frozen config that the arguments ask for."""
    return resolve_with_sources(args)[0]


def resolve_with_sources(args: argparse.Namespace) -> tuple[CfgNode, dict[str, str]]:
    """The config and {key: where its value was given}."""
    for file in args.imports:
        import_file(file)
    given = {key: getattr(args, name) for name, key in FLAGS.items()}
    flags = {key: value for key, value in given.items() if value is not None}
    fallbacks = {key: os.environ[name] for key, name in ENVIRONMENT.items() if os.environ.get(name)}
    return load_config(args.config_file, args.opts or (), fallbacks, flags)


def of_classifier(cfg: CfgNode, otherwise: str) -> CfgNode:
    """The config, if it is a classifier's; else a ConfigError that says what there is otherwise."""
    if cfg.DETECTION.MODEL:
        raise ConfigError(f"this config is a detector's: {otherwise}")
    return cfg


def import_file(file: str) -> None:
    """Run a Python file, once.

    ConfigError if it is not there, is not Python, or raises one of the errors a table raises.
    """
    name = f"vil_import {Path(file).resolve()}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or not Path(file).is_file():
        raise ConfigError(f"--import {file}: no such Python file")
    if name in sys.modules:
        return
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ValueError, ImportError, SyntaxError) as error:
        del sys.modules[name]
        raise ConfigError(f"--import {file}: {error}") from error
