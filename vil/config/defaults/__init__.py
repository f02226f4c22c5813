"""Config keys, in one file per topic. These files are the manual of the config.

The type of a key's default value is the type of the key. All keys of the original 2021 code exist,
except for those that `vil.config.legacy` drops or replaces, so its YAML files and command lines
work. Components such as tasks declare additional keys in their registry entries.
`vil config --docs docs/reference/config.md` writes a page with all keys.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from yacs.config import CfgNode

from vil.config.defaults import augmentation, data, evaluation, image, model, optimization, run
from vil.config.registries import HOMES, registry
from vil.config.rules import Conflict, Rule
from vil.utils.errors import ConfigError
from vil.utils.registry import Key, Section

KEYS: dict[str, Key] = {}  # by full name; `check` is None or a rule
SECTIONS: dict[str, str] = {}  # {section: meaning}
EXTENSIBLE: list[str] = []  # sections in which a file or the command line may add keys
CONFLICTS: list[Conflict] = []
_tree = CfgNode()
_of_components: list[str | Sequence] = []  # keys that components added, and what they declared


def declare(items: Iterable[Section | Key | Conflict], owner: str = "vil") -> None:
    """Add sections, keys and conflicts (forbidden combinations of values) to the config.

    A key belongs to the last section before it. owner: the component that declares the items.
    Raises ConfigError for a key that exists already, or whose name is not a valid identifier.
    """
    section = ""
    for item in items:
        if isinstance(item, Conflict):
            CONFLICTS.append(item)
        elif isinstance(item, Key):
            _declare_key(item, f"{section}.{item.name}" if section else item.name, owner)
        else:
            section = item.name
            if section:
                SECTIONS[section] = item.meaning
                _make_node(section.split("."))
            if item.extensible:
                EXTENSIBLE.append(section)


def _declare_key(key: Key, name: str, owner: str) -> None:
    *path, last = steps = name.split(".")
    if name in KEYS or name in SECTIONS or not all(map(str.isidentifier, steps)):
        raise ConfigError(
            f"{owner}: cannot add the key {name}: choose a name that is a valid Python identifier "
            "and not in use yet"
        )
    check = key.check
    if check and not hasattr(check, "holds"):
        check = Rule(check, key.allowed or "another value")
    _make_node(path)[last] = key.default
    KEYS[name] = key._replace(name=name, check=check)


def _make_node(path: Sequence[str]) -> CfgNode:
    node = _tree
    for depth, name in enumerate(path, start=1):
        SECTIONS.setdefault(".".join(path[:depth]), "Keys of components registered at run time.")
        node = node.setdefault(name, CfgNode())
    return node


def declare_component_keys() -> None:
    """Declare those keys of registered components that are not declared yet."""
    for kind in HOMES:
        for entry in registry(kind).values():
            declared = entry.facts.get("declares", ())
            if declared not in _of_components:
                _of_components.append(declared)
                declare(declared, f"{kind} {entry.name}")
            for key in entry.keys.values():
                if isinstance(key, Key) and key.name not in _of_components:
                    declare([key], f"{kind} {entry.name}")
                    _of_components.append(key.name)


def leaves(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values in a nested config as {dotted key: value}, in their order in the config.

    prefix: text to put before each key.
    """
    values = {}
    for name, value in node.items():
        inner = isinstance(value, CfgNode)
        values |= leaves(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return values


def tree(values: Mapping[str, Any] | None = None) -> CfgNode:
    """Return a copy of the default config, with the given values, {dotted key: value}."""
    cfg = _tree.clone()
    for key, value in (values or {}).items():
        *path, last = key.split(".")
        node = cfg
        for name in path:
            node = node.setdefault(name, CfgNode())
        node[last] = value
    return cfg


for subtree in (image, augmentation, data, optimization, evaluation, model):
    declare(subtree.DECLARED)
declare_component_keys()
declare(run.DECLARED)
