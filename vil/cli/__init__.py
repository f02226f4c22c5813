"""The command line: `vil COMMAND ...`.

Each command is a module of this package. The module defines its help text (the docstring),
`add_arguments(parser)`, and `run(args)`, which returns the exit code. This file finds the module of
a command and converts errors to exit codes.
"""

import argparse
import difflib
import glob
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import vil
from vil.cli.removed import describe_removed
from vil.config.key_lookup import nearest
from vil.config.registries import registry
from vil.utils.atomic_write import TEXT
from vil.utils.cache_dir import cache_dir
from vil.utils.console import (
    ClosedOutputError,
    OutputError,
    TerminalFormatter,
    discard_unwritten,
    echo_error,
    printable,
    standard_streams,
)
from vil.utils.errors import INTERRUPTED, ConfigError, DataError, one_line
from vil.utils.openmp import spin_briefly
from vil.utils.stop_signals import Terminated, stop_signals
from vil.workflows.log_forwarding import log_warnings_once

COMMANDS = {
    "train": "train from a config, or resume a run",
    "sweep": "train every combination of settings, and compare the results in one table",
    "evaluate": "evaluate weights on the test sets",
    "predict": "predict the classes of images, or the objects in them",
    "demo": "serve a page to try a model on: drop an image, see the prediction",
    "embed": "compute features of images, or measure how well the features separate classes",
    "data check": "check the data of a config: classes, sizes, broken images, leaks",
    "convert": "convert a checkpoint to a self-describing safetensors file",
    "export": "export a model as ONNX, int8 ONNX, a torch.export program or an AOTInductor package",
    "tune": "find the fastest attention backend of each stage by timing all of them",
    "benchmark attention": "measure time and memory of attention with each backend",
    "benchmark model": "measure images per second and memory of models, and profile them",
    "config": "print the resolved config, and where each value was set",
    "info": "print versions, devices, and which attention backend runs in each stage",
    "visualize attention": "draw what a token of an image attends to, in each head and stage",
    "visualize pattern": "draw the tokens that a query token attends to, for each mask and mode",
    "report": "write an HTML report of a run: metrics, curves, images, config; or compare runs",
    "analyze": "count parameters and MACs of each stage",
}
for task in registry("task").values():
    COMMANDS |= task.facts.get("commands", {})

HELP = ("-h", "--help")
HIDDEN = "\0"  # no command-line argument can contain a NUL


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. `vil.utils.errors` lists the exit codes.

    argv: the command-line arguments after `vil`, by default from sys.argv.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    spin_briefly()
    with standard_streams(), stop_signals():
        try:
            code = run_command(words)
            sys.stdout.flush()
        except ClosedOutputError as error:
            code = error.exit_code
        except OutputError as error:
            code = report_error("vil", error)
    discard_unwritten()
    return code


def run_command(words: list[str]) -> int:
    """Run a command and return the exit code. words: the command-line arguments after `vil`.

    Errors are printed and converted to exit codes, except for OutputError, which is raised if
    standard output cannot be written.
    """
    if words[:1] == ["--version"]:
        print(vil.__version__)
        return 0
    if not words or words[0] in HELP:
        print(overview(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    name, words = command_of(words)
    if removed := describe_removed(name, words):
        print(f"vil: {removed}", file=sys.stderr)
        return 2
    if name not in COMMANDS:
        group = [command for command in COMMANDS if command.startswith(f"{name} ")]
        if group and words and words[0] in HELP:
            print(overview(group))
            return 0
        near = group or difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {' or '.join(near)}?" if near else f"commands: {', '.join(COMMANDS)}"
        print(f"vil: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    handler = logging.StreamHandler()
    handler.setFormatter(TerminalFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    if os.environ.get("RANK", "0") == "0":  # a command waits while the native library is compiled
        logging.getLogger("vil.ops.native.library").setLevel(logging.INFO)
    module = importlib.import_module(f"vil.cli.{name.replace(' ', '_')}")
    parser = CommandParser(
        f"vil {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.add_argument("--traceback", action="store_true", help="print the traceback of an error")
    args = None
    try:
        args = parse(parser, words)
        check_runs(getattr(args, "run", None) or [])
        with log_warnings_once():
            return module.run(args)
    except Terminated as stop:
        echo_error(f"vil {name}: {stop}")
        return stop.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OutputError:
        raise
    except Exception as error:
        if os.environ.get("VIL_TRACEBACK") or getattr(args, "traceback", False):
            traceback.print_exc()
        return report_error(f"vil {name}", error, getattr(args, "output_dir", None))


def parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parse command-line arguments. Options and positional arguments may come in any order, and an
    argument after `--` is never an option."""
    end = words.index("--") if "--" in words else len(words)
    # parse_intermixed_args parses words after `--` as options too: hide their dashes by a prefix
    hidden = [f"{HIDDEN}{word}" for word in words[end + 1 :]]
    args = parser.parse_intermixed_args([*words[:end], *hidden])
    for name, value in vars(args).items():
        if isinstance(value, str):
            setattr(args, name, value.removeprefix(HIDDEN))
        elif isinstance(value, list):
            setattr(args, name, [x.removeprefix(HIDDEN) if type(x) is str else x for x in value])
    return args


def check_runs(runs: str | Sequence[str]) -> None:
    """Raise ConfigError if a run's folder does not exist.

    This is checked before torch is imported, because the import takes seconds. runs: one or several
    paths of run folders. Paths with glob patterns are not checked.
    """
    for run in [runs] if isinstance(runs, str) else runs:
        if not (os.path.isdir(run) or glob.has_magic(run)):
            raise ConfigError(f"there is no folder {run:.200}: expected the folder of a run")


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises ConfigError for a wrong command line, instead of exiting."""

    def error(self, message: str) -> NoReturn:
        _, _, words = message.partition("unrecognized arguments: ")
        if words.startswith("--") and any(action.dest == "opts" for action in self._actions):
            option, equals, value = words.split()[0].partition("=")
            if key := nearest(option.removeprefix("--").replace("-", "_")):
                message += f"; did you mean the config key {key}, as in {key} {value or 'VALUE'}?"
        raise ConfigError(f"{message} (see --help)")


def report_error(program: str, error: Exception, run: str | None = None) -> int:
    """Print an error as one line and return its exit code.

    program: beginning of the line, such as "vil train". run: the run's folder, if known. The
    traceback of an unexpected error is written to a file in this folder, or in the user's cache
    folder.
    """
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    if hasattr(error, "exit_code"):
        # Escape line breaks, which may come from file names. Keep those of a DataError, because
        # its message may show the expected folders.
        text = str(error) if isinstance(error, DataError) else printable(error)
        echo_error(f"{program}{rank}: {text}")
        return error.exit_code
    if isinstance(error, OSError) and error.filename is not None:  # a path that cannot be used
        echo_error(f"{program}{rank}: {str(error.filename):.200}: {error.strerror}")
        return ConfigError.exit_code
    if "torch" in sys.modules:
        from vil.utils.memory import describe_out_of_memory

        if advice := describe_out_of_memory(error):
            echo_error(f"{program}{rank}: {advice}")
            return ConfigError.exit_code
    where = ""
    with suppress(OSError):
        folder = Path(run, "crash") if run and Path(run, "config.yaml").exists() else cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        moment = datetime.now().strftime("%Y%m%d-%H%M%S")
        file = folder / f"traceback-{moment}-{os.getpid()}.txt"
        file.write_text(f"{sys.argv}\n{traceback.format_exc()}", **TEXT)
        where = f"; the traceback is in {file}"
    echo_error(f"{program}{rank}: unexpected {one_line(error)}{where}")
    return 1


def command_of(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Split a command line into the name of the command, which has one or two words, and the
    remaining words."""
    first = {name.split()[0] for name in COMMANDS if " " in name}
    length = 2 if words[0] in first and len(words) > 1 and words[1] not in HELP else 1
    return " ".join(words[:length]), words[length:]


def overview(names: Iterable[str] = COMMANDS) -> str:
    """Return a help text that lists commands and their descriptions. names: the commands to list,
    by default all."""
    lines = [f"  {name:19} {COMMANDS[name]}" for name in names]
    return "\n".join(["usage: vil COMMAND [--help] ...", "", *lines])
