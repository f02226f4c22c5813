"""The command line: `vil COMMAND ...`. One file per command; this one finds it and turns errors
into exit codes.

Each command's module has a docstring (its help), `add_arguments(parser)` and `run(args) -> code`.
"""

import argparse
import difflib
import importlib
import io
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

import vil
from vil.cli.text_output import discard_stdout
from vil.config.registries import registry
from vil.utils.errors import INTERRUPTED
from vil.utils.registry import Entry

COMMANDS = {
    "train": "train from a config, or resume a run",
    "evaluate": "evaluate weights on the test sets",
    "predict": "predict what images show",
    "convert": "convert a checkpoint to a self-describing safetensors file",
    "export": "export a model as ONNX, int8 ONNX or a program of torch.export",
    "tune": "find the fastest attention backend of each stage, by trying all",
    "benchmark attention": "time and memory of attention, every backend in one run",
    "benchmark model": "images per second and memory of whole models, in turns; and a profile",
    "config": "print the resolved config, and where each value was set",
    "info": "versions, devices, and which attention backend runs in each stage",
    "visualize attention": "what a token of an image attends to, in each head and stage",
    "visualize pattern": "the window of a token, for masks and modes",
    "report": "a run as one HTML page: metrics, curves, confusions, images, config",
    "analyze": "parameters and multiply-accumulates of each stage; copies that change layouts",
}
for task in registry("task").values():
    COMMANDS |= task.facts.get("commands", {})
# {"detect train": ("train", the task)}: a task's spelling of a command
SPELLINGS = {
    name: (name.split()[-1], task)
    for task in registry("task").values()
    for name in task.facts.get("spellings", ())
}

HELP = ("-h", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. See `vil.utils.errors` for the codes."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        print(vil.__version__)
        return 0
    if not words or words[0] in HELP:
        print(overview(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    name, words = command_of(words)
    if name not in COMMANDS:
        group = [command for command in COMMANDS if command.startswith(f"{name} ")]
        if group and words and words[0] in HELP:
            print(overview(group))
            return 0
        near = group or difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"vil: unknown command {name!r}; {hint}", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):  # names that the locale cannot spell are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    command, task = SPELLINGS.get(name, (name, None))
    module = importlib.import_module(f"vil.cli.{command.replace(' ', '_')}")
    parser = argparse.ArgumentParser(
        f"vil {name}",
        description=describe_spelling(name, task, module) if task else module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.set_defaults(required_task=task.name if task else None)
    try:
        return module.run(parser.parse_intermixed_args(words))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed standard output (`| head`)
        discard_stdout()
        return 0
    except Exception as error:
        if not hasattr(error, "exit_code"):
            raise
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        print(f"vil {name}{rank}: {error}", file=sys.stderr)
        return error.exit_code


def describe_spelling(name: str, task: Entry, module: ModuleType) -> str:
    """The help of a command as a task spells it: the task's examples, then that of the command."""
    examples = "\n".join(f"  {line}" for line in task.facts["spellings"][name])
    command, noun = SPELLINGS[name][0], task.facts["noun"]
    first, _, rest = module.__doc__.partition("\n")
    return f"{first}\n\n{examples}\n\nThe same as `vil {command}`, of a {noun}.\n{rest}"


def command_of(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The command's name, of one word or two, and what follows it."""
    first = {name.split()[0] for name in COMMANDS if " " in name}
    length = 2 if words[0] in first and len(words) > 1 and words[1] not in HELP else 1
    return " ".join(words[:length]), words[length:]


def overview(names: Iterable[str] = COMMANDS) -> str:
    """The list of commands, or of some of them."""
    lines = [f"  {name:19} {COMMANDS[name]}" for name in names]
    return "\n".join(["usage: vil COMMAND [--help] ...", "", *lines])
