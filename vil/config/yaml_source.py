"""Read settings from YAML files and their base files, from KEY VALUE pairs, and from Python dicts.

Values stay text, which `coercion` later converts to the type of the key. This module parses YAML
nodes itself, because yacs and safe_load give no line numbers and accept duplicate keys.
"""

import difflib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vil.config import legacy
from vil.config.coercion import MAX_LITERAL, Quoted, as_written
from vil.config.defaults import EXTENSIBLE
from vil.config.key_lookup import is_known
from vil.utils.errors import ConfigError
from vil.utils.lookup import did_you_mean

SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 1 << 20  # of one file
MAX_NODES = 10_000  # of one file with its aliases written out
MAX_DEPTH = 20
MAX_FILES = 100  # of one config, each base file counted as often as it is named
COMMAND_LINE = "command line"
EMPTY: dict = {}  # the value of an extensible section written as {}: resets it to the defaults
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Setting(NamedTuple):
    """A dotted key and its value as written: text, a list of texts (possibly nested), or EMPTY."""

    key: str
    value: Any
    where: str  # file:line, or "command line"

    @property
    def source(self) -> str:
        """Where the setting comes from: the name of a file, or "command line"."""
        return self.where.rpartition(":")[0] or self.where


# Files


def packaged_root() -> Path:
    """Return the folder of the configs that come with vil: vil/configs of an installed package, or
    configs/ beside vil/ in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find(name: str | Path, folder: Path | None = None) -> Path:
    """Return the absolute path of the config file `name`. Raises ConfigError if it does not exist.

    The path `name` is searched for in `folder` (default: the current directory), and then in the
    folder of the configs that come with vil.
    """
    given = Path(os.path.expanduser(name))
    if given.suffix not in SUFFIXES:
        raise ConfigError(f"{name}: the name of a config must end in {', '.join(SUFFIXES)}")
    root = packaged_root()
    below = Path(*given.parts[1:]) if given.parts[0] == "configs" else given
    for candidate in ((folder or Path()) / given, root / below):
        if os.path.isfile(candidate):  # False, not an error, for names no file can have
            return candidate.resolve()
    known = [path.relative_to(root).as_posix() for path in root.rglob("*.yaml")]
    near = difflib.get_close_matches(below.as_posix(), known, n=1)
    raise ConfigError(f"{name}: no such config file{did_you_mean(*near)}")


def from_file(
    path: Path,
    included_by: tuple[Path, ...] = (),
    roots: Sequence[Path] = (),
    read: list[Path] | None = None,
) -> list[Setting]:
    """Return the settings of the _BASE_ files of a config file, followed by its own settings.

    included_by: the chain of files whose _BASE_ entries led to this file. roots: folders that may
    contain base files, by default `base_roots`. read: the files that were read before this one.
    Raises ConfigError if they are more than MAX_FILES, because files that name each other twice
    double the number with each file.
    """
    read = [] if read is None else read
    read.append(path)
    if len(read) > MAX_FILES:
        raise ConfigError(
            f"{shown(read[0])}: it reads more than {MAX_FILES} files through _BASE_: name fewer"
        )
    if path in included_by:
        chain = " -> ".join(shown(step) for step in (*included_by, path))
        raise ConfigError(f"{shown(path)}: _BASE_ files include each other: {chain}")
    roots = roots or base_roots(path)
    own, inherited = [], []
    for setting in read_yaml(read_text(path), shown(path)):
        if setting.key != "_BASE_":
            own.append(setting)
            continue
        names = setting.value if isinstance(setting.value, list) else [setting.value]
        for name in names:
            base = find_base(str(name), path, setting.where, roots)
            inherited += from_file(base, (*included_by, path), roots, read)
    return inherited + legacy.modernise(own, is_known)


def base_roots(path: Path) -> list[Path]:
    """Return the folders that may contain the _BASE_ files of the config `path`: the folder of the
    configs that come with vil, the folder of `path`, and the nearest folder named configs that
    contains `path`."""
    named = [parent for parent in path.parents if parent.name == "configs"]
    return [packaged_root(), path.parent, *named[:1]]


def find_base(name: str, path: Path, where: str, roots: Sequence[Path]) -> Path:
    """Return the path of a base file. name: its name in the _BASE_ entry of the config `path`.

    where: file and line of the _BASE_ entry, for error messages. Raises ConfigError if the base
    file does not exist or is outside of the folders `roots`.
    """
    try:
        base = find(name, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{where}: _BASE_ {error}") from None
    if not any(base.is_relative_to(root) for root in roots):
        allowed = " and ".join(map(str, roots))
        raise ConfigError(
            f"{where}: _BASE_ {name} is outside of {allowed}: move it to one of these folders (a "
            "config from another person could otherwise read any of your files)"
        )
    return base


def read_text(path: Path) -> str:
    """Read a config file. Raises ConfigError if it is too large, unreadable or not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown(path)}: cannot be read: {error}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{shown(path)}: has more than {MAX_BYTES} bytes, the limit of a config")
    return text


def shown(path: Path) -> str:
    """Return a path as text for messages. It is relative if it is below the current directory."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# YAML


def read_yaml(
    text: str, label: str, keeps_empty: Callable[[str], bool] = EXTENSIBLE.__contains__
) -> list[Setting]:
    """Return the settings in a YAML text. Raises ConfigError if the text is not a valid config.

    label: name of the file, for error messages.
    keeps_empty: function of a dotted key whose value is an empty mapping. If it returns True, the
    key becomes a setting with the value EMPTY. Otherwise the key is ignored. The default returns
    True only for sections that accept new keys.
    """
    try:
        _check_events(text, label)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        line = f":{error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{label}{line}: not valid YAML: {problem}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{label}: expected a mapping of keys to values, got another value")
    return list(_Walk(lambda line: f"{label}:{line}", keeps_empty).section(root))


def _check_events(text: str, label: str) -> None:
    """Raise ConfigError if a YAML text has tags or is nested too deeply to be parsed recursively.

    label: the name of the file, for messages.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        where = f"{label}:{event.start_mark.line + 1}"
        if getattr(event, "tag", None):
            raise ConfigError(
                f"{where}: {event.tag}: tags are not allowed: write the value without the tag"
            )
        opens, closes = yaml.CollectionStartEvent, yaml.CollectionEndEvent
        depth += isinstance(event, opens) - isinstance(event, closes)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{where}: the YAML is nested more than {MAX_DEPTH} levels deep")


class _Walk:
    """A converter from YAML nodes to settings. It limits the number of nodes, because a small file
    with aliases can expand to millions of nodes.

    where: function that converts a line number to a location for error messages. keeps_empty: see
    `read_yaml`.
    """

    def __init__(
        self,
        where: Callable[[int], str],
        keeps_empty: Callable[[str], bool] = EXTENSIBLE.__contains__,
    ) -> None:
        self.where, self.keeps_empty = where, keeps_empty
        self.lines: dict[str, int] = {}
        self.visited = 0

    def section(self, node: yaml.MappingNode, prefix: str = "") -> Iterator[Setting]:
        for name, value in node.value:
            line = self.enter(name, prefix.count("."))
            if not isinstance(name, yaml.ScalarNode):
                raise ConfigError(
                    f"{self.where(line)}: a key must be a word, not a list or a mapping"
                )
            key = prefix + name.value
            if key in self.lines:
                first = self.lines[key]
                raise ConfigError(
                    f"{self.where(line)}: {key}: given twice, the first time in line {first}"
                )
            self.lines[key] = line
            yield from self.key(key, value, self.where(line))

    def key(self, key: str, node: yaml.Node, where: str) -> Iterator[Setting]:
        if not isinstance(node, yaml.MappingNode):
            yield Setting(key, self.plain(node), where)
        elif not node.value and self.keeps_empty(key):
            yield Setting(key, EMPTY, where)
        else:
            yield from self.section(node, f"{key}.")

    def plain(self, node: yaml.Node, depth: int = 0) -> Any:
        line = self.enter(node, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{self.where(line)}: expected plain values in a list, got a mapping")
        return Quoted(node.value) if node.style else node.value

    def enter(self, node: yaml.Node, depth: int) -> int:
        self.visited += 1
        line = node.start_mark.line + 1
        if self.visited > MAX_NODES or depth > MAX_DEPTH:
            raise ConfigError(
                f"{self.where(line)}: the YAML is too large after its aliases are expanded"
            )
        return line


# The command line and Python


def from_options(opts: Sequence[str | Setting]) -> Iterator[Setting]:
    """Yield the settings in a list of options, KEY VALUE or KEY=VALUE. An item that is already a
    Setting is yielded unchanged."""
    words = iter(opts)
    for word in words:
        if isinstance(word, Setting):
            yield word
            continue
        key, equals, value = str(word).partition("=")
        file = f"--config-file {shlex.quote(key)}" if key.endswith(SUFFIXES) else None
        if not is_known(key) and ("/" in key or os.path.exists(str(word))):
            near = did_you_mean(file)
            raise ConfigError(f"{COMMAND_LINE}: unexpected argument {word}{near} (see --help)")
        if not equals:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"{COMMAND_LINE}: {key}: no value follows{did_you_mean(file)}")
        yield from from_mapping({key: value})


def from_mapping(values: Mapping[str, Any], where: str = COMMAND_LINE) -> Iterator[Setting]:
    """Yield the settings of a Python mapping {KEY: value}.

    A string value is read like a value on the command line. A string inside a list or a nested
    mapping is read like a quoted string in YAML. where: source of the settings, for error messages.
    """
    for key, value in values.items():
        if isinstance(value, str):
            yield from (setting._replace(where=where) for setting in _option(key, value))
        else:
            yield from _from_value(key, value, where)


def format_options(values: Mapping[str, Any]) -> str:
    """Format {key: value} as KEY VALUE options that can be pasted into a shell."""
    return shlex.join(str(word) for pair in values.items() for word in pair)


def _from_value(key: str, value: Any, where: str) -> Iterator[Setting]:
    value = value.tolist() if hasattr(value, "tolist") else value  # an array or a tensor
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _from_value(f"{key}.{name}", inner, where)
    elif isinstance(value, Mapping):
        yield from [Setting(key, EMPTY, where)] if key in EXTENSIBLE else ()
    else:
        try:
            yield Setting(key, as_written(value), where)
        except ValueError as error:
            raise ConfigError(f"{where}: {key}: {error}") from None


def _option(key: str, value: str) -> Iterator[Setting]:
    """Yield the settings of one option. A value such as [a, b] or {a: 1} is parsed as YAML. Any
    other value remains text."""
    if value[:1] in ("[", "{") and len(value) <= MAX_LITERAL:
        try:
            _check_events(value, f"{COMMAND_LINE}: {key}")
            node = yaml.compose(value, Loader=_Loader)
        except yaml.YAMLError:
            yield Setting(key, value, COMMAND_LINE)
            return
        walk = _Walk(lambda line: f"{COMMAND_LINE}: {key}")
        for setting in walk.key(key, node, COMMAND_LINE):
            yield setting._replace(where=COMMAND_LINE)
    else:
        yield Setting(key, value, COMMAND_LINE)
