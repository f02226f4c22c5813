"""All configuration keys, one file per subtree: the manual of the config.

A key has a name, a default, whose type is the key's type, a meaning, and the rule for its values.
The tree contains that of the 2021 original, so that its YAML files and command lines work.
Components, such as a task, declare further keys in their registry. `vil config --docs
docs/reference/config.md` prints all keys as a page.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from yacs.config import CfgNode

from vil.config.defaults import augmentation, data, image, model, optimization, run
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
    """Declare sections, keys and conflicts. The name of a key is relative to the section before it.

    Raises ConfigError for a key that exists, or whose name cannot be an attribute.
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
        raise ConfigError(f"{owner}: the key {name} cannot be added, or is there already")
    check = key.check
    if check and not hasattr(check, "holds"):
        check = Rule(check, key.allowed or "another value")
    _make_node(path)[last] = key.default
    KEYS[name] = key._replace(name=name, check=check)


def _make_node(path: Sequence[str]) -> CfgNode:
    for depth in range(1, len(path) + 1):
        SECTIONS.setdefault(".".join(path[:depth]), "Keys of components registered at run time.")
    return functools.reduce(lambda node, step: node.setdefault(step, CfgNode()), path, _tree)


def declare_component_keys() -> None:
    """Declare what registered components declare, each once."""
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
    """{dotted key: value} of a tree, in its order."""
    values = {}
    for name, value in node.items():
        inner = isinstance(value, CfgNode)
        values |= leaves(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return values


def value_at(cfg: CfgNode, key: str) -> Any:
    """The value of a dotted key, or the node of a section."""
    return functools.reduce(CfgNode.__getitem__, key.split("."), cfg) if key else cfg


def tree(section: str = "") -> CfgNode:
    """A new copy of the tree of defaults, or of one section."""
    return value_at(_tree, section).clone()


for subtree in (image, augmentation, data, optimization, model):
    declare(subtree.DECLARED)
declare_component_keys()
declare(run.DECLARED)
