"""Registries of components by name, such as datasets, optimizers and attention types.

An entry has the component (a class or function) or its location "module:attribute". A location is
imported at first use, so that reading a registry does not import torch.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from vil.utils.lookup import lookup


class Key(NamedTuple):
    """A config key. `name` is the full name, such as "OPTIM.LR". Exception: in a list of
    declarations, a key that follows a `Section` has its name within that section, such as "LR"."""

    name: str
    default: Any  # its type is the key's type
    meaning: str  # one line, for `vil config --docs`
    check: Any = None  # a function of the value, or a rule of vil.config.rules
    allowed: str = ""  # the values that a `check` function allows: "at least 0"
    words: tuple[str, ...] = ()  # texts that are allowed besides values of the key's type
    element: Any = 0.0  # its type is that of the elements of a list whose default is empty


class Section(NamedTuple):
    """A config section, such as OPTIM. In a list of declarations, it comes before its keys."""

    name: str  # "OPTIM.ADAM"
    meaning: str
    extensible: bool = False  # a file or the command line may add keys


def load_object(home: Any) -> Any:
    """Import the object at a location "module:attribute". home: the location, or the object itself,
    which is returned unchanged."""
    if not isinstance(home, str):
        return home
    module, _, attribute = home.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Entry:
    """An entry of a registry: a component, its config keys, and other properties.

    keys: {keyword argument of the component: name of an existing config key, or a `Key` to add to
    the config}. facts: {name: value} of the other properties, see `Registry.add`.
    """

    name: str
    home: Any  # "module:attribute", or the object
    about: str = ""
    keys: Mapping[str, str | Key] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Any:
        """Return the component. The first call imports its module."""
        return load_object(self.home)

    @property
    def key_names(self) -> dict[str, str]:
        """Names of the config keys, as {argument of the component: config key}."""
        return {a: k.name if isinstance(k, Key) else k for a, k in self.keys.items()}

    def read_settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the component that config keys set, as {argument: value}.

        values: {config key: value} of all keys.
        """
        return {argument: values[key] for argument, key in self.key_names.items()}


E = TypeVar("E", bound=Entry)


class Registry(Mapping[str, E]):
    """A mapping from name to entry for components of one kind, in the order of registration.

    kind: noun for the components in messages, such as "dataset".
    check: function, or its location "module:function", that `register` calls as check(component,
    entry). It raises ValueError for an invalid component.
    entry_type: class of the entries.
    libraries: {prefix: location "module:function"}. The function returns {name: entry} for the
    components of a library, whose names start with the prefix, such as "timm/". Iteration omits
    these entries, so that it imports no library.
    """

    def __init__(
        self,
        kind: str,
        check: Callable[[Any, E], None] | str | None = None,
        entry_type: type[E] = Entry,
        libraries: Mapping[str, str] | None = None,
    ):
        self.kind = kind
        self.check = check
        self.entry_type = entry_type
        self.entries: dict[str, E] = {}
        self.libraries = dict(libraries or {})

    def add(
        self,
        name: str,
        home: Any,
        about: str = "",
        *,
        keys: Mapping[str, str | Key] | None = None,
        **facts: Any,
    ) -> None:
        """Add an entry for a component. Raises ValueError if the name is taken.

        home: the component or its location "module:attribute". about: description in one line.
        keys: see `Entry`. facts: other properties, for the code that uses this registry.
        """
        if name in self.entries:
            taken = ", ".join(filter(None, self.entries))
            raise ValueError(f"the {self.kind} {name!r} already exists (names: {taken})")
        self.entries[name] = self.entry_type(name, home, about, dict(keys or {}), facts)

    def register(self, name: str, home: Any, about: str = "", **declared: Any) -> None:
        """Add a component at run time. Raises ValueError if the name is taken.

        home: the component or its location "module:attribute". A component is passed to the
        registry's `check`, which raises ValueError if it is invalid. A location is not checked.
        about, declared: further arguments of `add`.
        """
        self.add(name, home, about, **declared)
        if self.check is None or isinstance(home, str):
            return
        try:
            load_object(self.check)(home, self.entries[name])
        except ValueError:
            self.remove(name)
            raise

    def remove(self, name: str) -> None:
        """Remove an entry, for tests."""
        del self.entries[name]

    def load(self, name: str) -> Any:
        """Return the component that is registered as `name`. Raises ValueError, which lists the
        choices, for an unknown name."""
        return self.entry(name).load()

    def entry(self, name: str) -> E:
        """Return the entry that is registered as `name`. Raises ValueError, which lists the
        choices, for an unknown name."""
        if name in self.entries or not self.libraries:
            return lookup(self.entries, name, self.kind)
        return lookup(self.all_entries(), name, self.kind)

    def all_entries(self) -> dict[str, E]:
        """Return {name: entry} of all components, including those of the libraries."""
        entries = dict(self.entries)
        for home in self.libraries.values():
            entries |= load_object(home)()
        return entries

    def __getitem__(self, name: str) -> E:
        home = next((self.libraries[p] for p in self.libraries if str(name).startswith(p)), None)
        if name in self.entries or home is None:
            return self.entries[name]
        return load_object(home)()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
