"""Registries: components by name. A component is one file and one entry in a registry.

An entry holds where the component is ("module:attribute", so that reading a registry does not
import torch), the config keys that it reads, and facts about it. All lists of choices come from
registries.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vil.utils.lookup import lookup


class Key(NamedTuple):
    """A config key, by its full name or, after a `Section`, its name in the section."""

    name: str
    default: Any  # its type is the key's type
    meaning: str  # one line, for `vil config --docs`
    check: Any = None  # a function of the value, or a rule of vil.config.rules
    allowed: str = ""  # what a function allows, in words: "at least 0"
    ignored: bool = False  # accepted because old files have it; `meaning` is why it has no effect


class Section(NamedTuple):
    """The section of the keys that follow it in a list."""

    name: str  # "OPTIM.ADAM"
    meaning: str
    extensible: bool = False  # a file or the command line may add keys


def load_object(home: Any) -> Any:
    """The object that "module:attribute" names; anything but a string is returned as it is."""
    if not isinstance(home, str):
        return home
    module, _, attribute = home.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Entry:
    """A component and its declarations.

    `keys` maps the component's keyword arguments to the config keys that set them: the name of a
    key of the tree, or a `Key` that is added to it. `facts` are read with `entry.facts.get(...)`.
    """

    name: str
    home: Any  # "module:attribute", or the object
    about: str = ""
    keys: Mapping[str, str | Key] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """The component itself. Imports its module at the first call."""
        return load_object(self.home)

    @property
    def key_names(self) -> dict[str, str]:
        """{argument: config key}."""
        return {a: k.name if isinstance(k, Key) else k for a, k in self.keys.items()}


class Registry(Mapping[str, Entry]):
    """Components of one kind by name, in the order of registration.

    check(component, entry) raises ValueError for a component that breaks the kind's contract; it is
    called for what is registered at run time. It may be given as "module:function".
    """

    def __init__(
        self,
        kind: str,
        check: Callable[[Any, Entry], None] | str | None = None,
        entry_type: type[Entry] = Entry,
    ):
        self.kind = kind
        self.check = check
        self.entry_type = entry_type
        self.entries: dict[str, Entry] = {}

    def add(
        self,
        name: str,
        home: Any,
        about: str = "",
        *,
        keys: Mapping[str, str | Key] | None = None,
        **facts: Any,
    ) -> None:
        """Add an entry. Raises ValueError for a name that is taken."""
        if name in self.entries:
            taken = ", ".join(filter(None, self.entries))
            raise ValueError(f"the {self.kind} {name!r} already exists (names: {taken})")
        self.entries[name] = self.entry_type(name, home, about, dict(keys or {}), facts)

    def register(self, name: str, home: Any, about: str = "", **declared: Any) -> None:
        """Add a component at run time, after checking its contract."""
        self.add(name, home, about, **declared)
        if self.check is None or isinstance(home, str):
            return
        try:
            load_object(self.check)(home, self.entries[name])
        except ValueError:
            self.remove(name)
            raise

    def remove(self, name: str) -> None:
        """Undo `register`, for tests."""
        del self.entries[name]

    def load(self, name: str) -> Any:
        """The component `name`. Raises ValueError with the choices for an unknown name."""
        return self.entry(name).load()

    def entry(self, name: str) -> Entry:
        """The entry `name`. Raises ValueError with the choices for an unknown name."""
        return lookup(self.entries, name, self.kind)

    def __getitem__(self, name: str) -> Entry:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
