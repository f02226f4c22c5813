"""From a YAML file and KEY VALUE pairs to one checked, frozen tree and the origin of each value.

Every source becomes a list of settings, values still as written; the type of a key's default then
decides how its text is read. So `1` is a fine float, `1e-3` is a number and `RE: no` is a word,
whatever YAML would make of them. Later settings win: environment, base files, file, command line.
Nothing is evaluated or executed; what is refused is refused in one line that names its place.
"""

import ast
import difflib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yacs.config import CfgNode

from vil.config import defaults, legacy

log = logging.getLogger(__name__)

SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 1 << 20  # of one file
MAX_LITERAL = 10_000  # characters of one value on the command line, or written as (1, 2)
MAX_NODES = 10_000  # of one file with its aliases written out
MAX_DEPTH = 20
COMMAND_LINE = "command line"

TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NOTHING = ("None", "null", "Null", "NULL", "~")
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ConfigError(ValueError):
    """A config that cannot be used; the message is one line."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split("\n")))


class Setting(NamedTuple):
    """One dotted key with its value as somebody wrote it: text, or a list of texts and lists."""

    key: str
    value: Any
    where: str


class Quoted(str):
    """Text that stood in quotes: where no type is declared it stays text."""


def get_config(file: str | Path | None = None, opts: Sequence[str] = ()) -> CfgNode:
    """The frozen config made of the defaults, a file and options (KEY VALUE or KEY=VALUE)."""
    return load_config(file, opts)[0]


def load_config(
    file: str | Path | None = None,
    opts: Sequence[str] = (),
    fallbacks: Mapping[str, str] | None = None,
) -> tuple[CfgNode, dict[str, str]]:
    """The frozen config and {key: where its value was given}, without the keys left at defaults.

    `fallbacks` are values from the environment; every other source wins over them.
    """
    settings = [Setting(key, value, "environment") for key, value in (fallbacks or {}).items()]
    if file:
        settings += _from_file(find(file))
    settings += legacy.modernise(list(_from_options(opts)), defaults.is_known)
    cfg, sources = defaults.tree(), {}
    for setting in settings:
        if setting.key in defaults.SECTIONS and setting.value == "":
            continue  # a section whose lines are all commented out
        _assign(cfg, setting)
        sources[setting.key] = setting.where
    _check(cfg, sources)
    _warn(cfg, sources)
    cfg.freeze()
    return cfg, sources


# Files


def packaged_root() -> Path:
    """The folder configs/: beside vil/ in a checkout, inside it (as vil.configs) once installed."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find(name: str | Path, folder: Path | None = None) -> Path:
    """The config file `name`: relative to `folder` (here), else below the packaged configs/."""
    given = Path(os.path.expanduser(name))
    if given.suffix not in SUFFIXES:
        raise ConfigError(f"{name}: a config ends in {', '.join(SUFFIXES)}; nothing else is read")
    root = packaged_root()
    below = Path(*given.parts[1:]) if given.parts[0] == "configs" else given
    for candidate in ((folder or Path()) / given, root / below):
        if os.path.isfile(candidate):  # False, not an error, for names no file can have
            return candidate.resolve()
    known = [path.relative_to(root).as_posix() for path in root.rglob("*.yaml")]
    near = difflib.get_close_matches(below.as_posix(), known, n=1)
    raise ConfigError(f"{name}: no such config file{_did_you_mean(*near)}")


def _did_you_mean(name: str | None = None) -> str:
    return f"; did you mean {name}?" if name else ""


def _from_file(
    path: Path, below: tuple[Path, ...] = (), roots: Sequence[Path] = ()
) -> list[Setting]:
    """The settings of a file after those of its bases. `below` are the files that led here."""
    if path in below:
        chain = " -> ".join(_shown(step) for step in (*below, path))
        raise ConfigError(f"{_shown(path)}: _BASE_ leads in a circle: {chain}")
    roots = roots or _roots(path)
    own, inherited = [], []
    for setting in read_yaml(_read_text(path), _shown(path)):
        if setting.key != "_BASE_":
            own.append(setting)
            continue
        names = setting.value if isinstance(setting.value, list) else [setting.value]
        for name in names:
            base = _find_base(str(name), path, setting.where, roots)
            inherited += _from_file(base, (*below, path), roots)
    return inherited + legacy.modernise(own, defaults.is_known)


def _roots(path: Path) -> list[Path]:
    """Where bases may lie: below configs/ (ours, or the nearest folder of that name), or beside."""
    named = [parent for parent in path.parents if parent.name == "configs"]
    return [packaged_root(), path.parent, *named[:1]]


def _find_base(name: str, path: Path, where: str, roots: Sequence[Path]) -> Path:
    try:
        base = find(name, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{where}: _BASE_ {error}") from None
    if not any(base.is_relative_to(root) for root in roots):
        allowed = " and ".join(map(str, roots))
        raise ConfigError(
            f"{where}: _BASE_ {name}: lies outside {allowed}; refused, so that a config"
            " from somebody else cannot make you read other files"
        )
    return base


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_shown(path)}: cannot be read: {error}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{_shown(path)}: larger than {MAX_BYTES} bytes, so it is no config")
    return text


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# YAML


def read_yaml(text: str, label: str) -> list[Setting]:
    """The settings of a YAML mapping, without tags, duplicate keys or exploding aliases."""
    try:
        _screen(text, label)
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        line = f":{error.problem_mark.line + 1}" if getattr(error, "problem_mark", None) else ""
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{label}{line}: not valid YAML: {problem}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{label}: a config is a mapping of keys, this is a single value")
    return list(_Walk(lambda line: f"{label}:{line}").mapping(root))


def _screen(text: str, label: str) -> None:
    """Refuse tags and deep nesting before anything recursive sees the text."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        where = f"{label}:{event.start_mark.line + 1}"
        if getattr(event, "tag", None):
            raise ConfigError(f"{where}: {event.tag}: tags are refused, write the plain value")
        opens, closes = yaml.CollectionStartEvent, yaml.CollectionEndEvent
        depth += isinstance(event, opens) - isinstance(event, closes)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{where}: nested deeper than {MAX_DEPTH}")


class _Walk:
    """One walk over composed YAML; counts nodes, because an alias can stand for very many."""

    def __init__(self, where: Callable[[int], str]) -> None:
        self.where = where
        self.lines: dict[str, int] = {}
        self.visited = 0

    def mapping(self, node: yaml.MappingNode, prefix: str = "") -> Iterator[Setting]:
        for name, value in node.value:
            line = self.enter(name, prefix.count("."))
            if not isinstance(name, yaml.ScalarNode):
                raise ConfigError(f"{self.where(line)}: a key is a word, not a list or a mapping")
            key = prefix + name.value
            if key in self.lines:
                first = self.lines[key]
                raise ConfigError(f"{self.where(line)}: {key}: given twice, first in line {first}")
            self.lines[key] = line
            if isinstance(value, yaml.MappingNode):
                yield from self.mapping(value, f"{key}.")
            else:
                yield Setting(key, self.plain(value), self.where(line))

    def plain(self, node: yaml.Node, depth: int = 0) -> Any:
        line = self.enter(node, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{self.where(line)}: a list holds plain values, not mappings")
        return Quoted(node.value) if node.style else node.value

    def enter(self, node: yaml.Node, depth: int) -> int:
        self.visited += 1
        line = node.start_mark.line + 1
        if self.visited > MAX_NODES or depth > MAX_DEPTH:
            raise ConfigError(f"{self.where(line)}: too large once its aliases are written out")
        return line


# The command line


def _from_options(opts: Sequence[str]) -> Iterator[Setting]:
    """KEY VALUE and KEY=VALUE in any mixture."""
    words = iter(opts)
    for word in words:
        key, equals, value = str(word).partition("=")
        if not equals:
            value = next(words, None)
            if value is None:
                raise ConfigError(f"{COMMAND_LINE}: {key}: no value follows")
        yield from _option(key, value if isinstance(value, str) else _as_written(value))


def _option(key: str, value: Any) -> Iterator[Setting]:
    """[a, b] and {a: 1} may be written as in YAML; what is neither stays text."""
    if isinstance(value, str) and value[:1] in ("[", "{") and len(value) <= MAX_LITERAL:
        try:
            _screen(value, f"{COMMAND_LINE}: {key}")
            node = yaml.compose(value, Loader=_Loader)
        except yaml.YAMLError:
            yield Setting(key, value, COMMAND_LINE)
            return
        walk = _Walk(lambda line: f"{COMMAND_LINE}: {key}")
        if isinstance(node, yaml.MappingNode):
            yield from (s._replace(where=COMMAND_LINE) for s in walk.mapping(node, f"{key}."))
            return
        value = walk.plain(node)
    yield Setting(key, value, COMMAND_LINE)


# One setting


def _assign(cfg: CfgNode, setting: Setting) -> None:
    key, value, where = setting
    if key in defaults.SECTIONS:
        raise ConfigError(f"{where}: {key}: expected a section of keys, got {value!r:.80}")
    if not defaults.is_known(key):
        raise ConfigError(f"{where}: {key}: unknown key{_did_you_mean(defaults.nearest(key))}")
    node = cfg
    *path, name = key.split(".")
    for step in path:
        node = node[step]
    try:
        node[name] = coerce(value, defaults.KEYS[key]) if key in defaults.KEYS else free(value)
    except ValueError:
        wanted = f"expected {kind(defaults.KEYS[key])}, got {value!r:.80}"
        raise ConfigError(f"{where}: {key}: {wanted}") from None


# Values


def coerce(value: Any, default: Any) -> Any:
    """A value as written, read as the type of `default`; ValueError if it is none."""
    if isinstance(default, tuple | list):
        element = default[0] if default else 0.0  # an empty default is a list of numbers
        items = value if isinstance(value, list) else _list(value, element)
        return type(default)(coerce(item, element) for item in items)
    if isinstance(value, list):
        raise ValueError("a list")
    return READERS[type(default)](value)


def free(value: Any) -> Any:
    """A value for which no type is declared: true, null, a number, a list, else text."""
    if isinstance(value, list):
        return [free(item) for item in value]
    if isinstance(value, Quoted):
        return str(value)
    if value in NOTHING:
        return None
    for read in (_truth, int, _number, lambda text: free(_items(text))):
        try:
            return read(value)
        except ValueError:
            continue
    return _text(value)


def kind(default: Any) -> str:
    """The type of a key in words, for messages and for the manual."""
    if isinstance(default, tuple | list):
        return f"{type(default).__name__} of {kind(default[0] if default else 0.0)}"
    return type(default).__name__


def _truth(text: str) -> bool:
    if text.lower() not in TRUTH:
        raise ValueError(text)
    return TRUTH[text.lower()]


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _text(text: str) -> str:
    """Text as it stands. A shell keeps the inner quotes of "'no'"; they are taken off here."""
    if isinstance(text, Quoted):
        return str(text)
    if text in NOTHING:
        raise ValueError(text)
    quoted = text[:1] in ("'", '"') and text[-1:] == text[:1] and len(text) > 1
    return text[1:-1] if quoted else text


def _list(text: str, element: Any) -> list[Any]:
    """A list as a command line has it; names need no brackets: `a,b` and `a` are lists too."""
    bare = isinstance(element, str) and text[:1] not in ("(", "[")
    return text.split(",") if bare else _items(text)


def _items(text: str) -> list[Any]:
    """The items of (1, 2) or [1, 2] written as text."""
    if text[:1] not in ("(", "[") or len(text) > MAX_LITERAL:
        raise ValueError(text)
    try:
        return _as_written(list(ast.literal_eval(text)))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(text) from error


def _as_written(value: Any) -> Any:
    """A Python value as the text somebody would have written for it."""
    if isinstance(value, tuple | list):
        return [_as_written(item) for item in value]
    return Quoted(value) if isinstance(value, str) else str(value)


READERS: dict[type, Callable[[str], Any]] = {bool: _truth, int: int, float: _number, str: _text}


# The whole tree


def _check(cfg: CfgNode, sources: Mapping[str, str]) -> None:
    values = defaults.leaves(cfg)
    for key, rule in defaults.CHECKS.items():
        if not rule.holds(values[key]):
            where = sources.get(key, "default")
            raise ConfigError(f"{where}: {key}: expected {rule.sentence}, got {values[key]!r:.80}")
    for keys, found, sentence in defaults.CONFLICTS:
        if found(*(values[key] for key in keys)):
            given = [f"{key} {values[key]!r} ({sources.get(key, 'default')})" for key in keys]
            raise ConfigError(f"{', '.join(given)}: {sentence}")


def _warn(cfg: CfgNode, sources: Mapping[str, str]) -> None:
    changed = diff(cfg, defaults.tree())
    dead = [f"{key} ({why})" for key, why in defaults.DEAD.items() if key in changed]
    if dead:
        log.warning("keys that never had an effect: %s", ", ".join(dead))
    legacy.warn_revived(cfg, sources)


def diff(cfg: CfgNode, other: CfgNode) -> dict[str, tuple[Any, Any]]:
    """{key: (value in cfg, value in other)} where they differ; None where a key is missing."""
    mine, theirs = defaults.leaves(cfg), defaults.leaves(other)
    pairs = {key: (mine.get(key), theirs.get(key)) for key in {**mine, **theirs}}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def dump(cfg: CfgNode) -> str:
    """YAML that loads back to the same tree, one line per key."""
    return yaml.dump(cfg, Dumper=_Dumper, sort_keys=False, width=math.inf, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    """Quoted where it would otherwise be read as something else, on one line always."""
    style = None if free(text) == text and text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


def _represent_node(dumper: _Dumper, node: CfgNode) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", node.items(), flow_style=not node)


def _represent_items(dumper: _Dumper, items: Sequence[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_items)
_Dumper.add_representer(tuple, _represent_items)
_Dumper.add_representer(CfgNode, _represent_node)
