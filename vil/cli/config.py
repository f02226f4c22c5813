"""Print the resolved config, with the source of each value.

  vil config --config-file imagenet/vil_tiny.yaml OPTIM.LR 1e-3    the full tree, as YAML
  vil config --config-file imagenet/vil_tiny.yaml --diff           only the keys that were changed
  vil config --config-file mine.yaml --diff=imagenet/vil_tiny.yaml the differences from this file
  vil config --docs docs/reference/config.md                       write the manual of all keys

The printed YAML, also with --diff, is a valid config: it can be written to a file and used as
--config-file.
"""

import argparse
import re
from typing import Any

from yacs.config import CfgNode

from vil.cli.arguments import (
    config_arguments,
    files_read,
    preset_argument,
    resolve_with_sources,
)
from vil.config import defaults, diff, dump, get_config
from vil.config.coercion import kind
from vil.utils.output_paths import output_file, replacing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    preset_argument(parser)
    text = "print only the keys that differ from the defaults, or from another config"
    parser.add_argument("--diff", nargs="?", const="", metavar="FILE", help=text)
    parser.add_argument("--docs", metavar="PATH", help="write the manual of all keys to PATH")


def run(args: argparse.Namespace) -> int:
    cfg, sources = resolve_with_sources(args)
    if args.docs:
        file = output_file(args.docs, "--docs", inputs=files_read(args, "docs"))
        with replacing(file, "--docs") as aside:
            aside.write_text(manual(), encoding="utf-8")
        return 0
    if args.diff is None:
        print(annotate(dump(cfg), sources), end="")
    else:
        print(differences(diff(cfg, get_config(args.diff)), sources), end="")
    return 0


def annotate(text: str, sources: dict[str, str]) -> str:
    """Add a comment to the YAML text of a config that names the source of each value that is not a
    default. sources: {config key: where its value was set, such as a file name}."""
    lines, path = [], []
    for line in text.splitlines():
        indent, name = re.match(r"( *)[\"']?(\w+)", line).groups()
        path[len(indent) // 2 :] = [name]
        where = sources.get(".".join(path))
        lines.append(f"{line}  # {where}\n" if where else f"{line}\n")
    return "".join(lines)


def differences(changes: dict[str, tuple[Any, Any]], sources: dict[str, str]) -> str:
    """Return YAML with a line for each key that differs between a config and another one.

    A comment on each line has the value in the other config and the source of the value. changes:
    {config key: (value, value in the other config)}. sources: {config key: source, such as a file
    name}.
    """
    lines = []
    for key, (value, was) in changes.items():
        line = dump(CfgNode({key: value})).rstrip()
        lines.append(f"{line}  # not {was!r}; from {sources.get(key, 'default')}\n")
    return "".join(lines)


HEAD = """# Every key of the config

<!-- Written by `vil config --docs docs/reference/config.md` from vil/config/defaults. -->

Set a key in a YAML file (`OPTIM:` and below it `LR: 1e-3`) or on the command line, as
`OPTIM.LR 1e-3` or `OPTIM.LR=1e-3`. `vil config` prints the config of a command line. Keys that
cannot be combined are refused with the reason.
"""


def manual() -> str:
    """Return the text of docs/reference/config.md, the manual of all config keys."""
    sections: dict[str, list[str]] = {}
    for name in defaults.KEYS:
        sections.setdefault(name.rpartition(".")[0].split(".")[0], []).append(name)
    for key in defaults.EXTENSIBLE:
        sections[key.split(".")[0]].append(f"{key}.*")
    top = sections.pop("")
    meanings = defaults.SECTIONS
    parts = [HEAD, *(_section(name, meanings[name], keys) for name, keys in sections.items())]
    parts.append(_section("Without a section", "The run.", top))
    return "\n".join(parts)


def _section(name: str, meaning: str, keys: list[str]) -> str:
    head = ["Key", "Values", "Default", "Meaning"]
    return f"## {name}\n\n{meaning}\n\n" + _table(head, [_row(key) for key in keys])


def _row(key: str) -> list[str]:
    node, _, name = key.rpartition(".")
    if name == "*":
        return [_code(key), "any", "", defaults.SECTIONS[node]]
    _, default, meaning, rule, *_ = declared = defaults.KEYS[key]
    values = _values(kind(default, declared.element), rule.sentence if rule else "")
    return [_code(key), values, _code(repr(default)), meaning]


def _values(kind_of_value: str, allowed: str) -> str:
    """Describe the values of a key: "int: at least 1". A text needs only the allowed ones."""
    if not allowed or kind_of_value == "str" or allowed.startswith("one of "):
        return allowed.removeprefix("one of ") or kind_of_value
    return f"{kind_of_value}: {allowed}"


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)
