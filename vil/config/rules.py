"""Rules for the allowed values of config keys. Each rule describes these values in a sentence, for
error messages and the manual."""

import difflib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from vil.config.registries import registry


class Rule(NamedTuple):
    """The allowed values of a config key.

    holds: function that returns whether a value is allowed. sentence: description for messages,
    such as "at least 0". choices: the allowed values, if they can be listed.
    """

    holds: Callable[[Any], bool]
    sentence: str
    choices: tuple[str, ...] = ()

    def proposal(self, value: Any) -> str | None:
        """Return the allowed name that is most similar to the first invalid name in a value.

        The value can have several names, in a tuple or joined by "," or "/". Returns None if all
        names are valid or none of the `choices` is similar.
        """
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words = [word for word in names_in(text) if word not in self.choices]
        near = difflib.get_close_matches(words[0].lower(), self.choices, 1) if words else []
        return next(iter(near), None)


class RegistryRule:
    """A rule that allows the names in a registry. It has the attributes of a `Rule`.

    Names that are registered at run time are allowed. Names of library components, such as
    "timm/lion", are allowed too, but they are not in `choices`.
    """

    def __init__(self, kind: str, extra: tuple[str, ...] = (), *, several: bool = False):
        """Create a rule for the registry of a kind of component.

        extra: additional names. several: allow several names, joined by "," or "/".
        """
        self.kind, self.extra, self.several = kind, extra, several

    def holds(self, value: str) -> bool:
        names = names_in(value) if self.several else [value]
        return all(name in self.extra or name in registry(self.kind) for name in names)

    @property
    def choices(self) -> tuple[str, ...]:
        return (*registry(self.kind), *self.extra)

    @property
    def sentence(self) -> str:
        joined = ", or several joined by , and /" if self.several else ""
        known = registry(self.kind)
        libraries = "".join(f", {prefix}NAME" for prefix in known.libraries)
        registered = "" if known else f", or a {self.kind} that a file of --import registers"
        return one_of(*self.choices).sentence + libraries + joined + registered

    def proposal(self, value: str) -> str | None:
        """Return the allowed name that is most similar to an invalid `value`, see `Rule.proposal`.

        Importing a library is slow. The names of library components are searched only if the value
        begins with the prefix of a library, such as "timm/".
        """
        known, name = registry(self.kind), str(value).lower()
        if not name.startswith(tuple(known.libraries)):
            return one_of(*self.choices).proposal(value)
        names = {
            entry.rpartition("/")[2]: entry
            for entry in reversed(known.all_entries())
            if "/" in entry
        }
        near = difflib.get_close_matches(name.rpartition("/")[2], names, 1)
        return names[near[0]] if near else None


def names_in(attention: str) -> list[str]:
    """Return the attention names in a value of ATTN_TYPE, such as "full,longformer/full"."""
    return re.split("[,/]", attention)


def one_of(*choices: Any) -> Rule:
    shown = ", ".join(str(choice) if choice != "" else "''" for choice in choices)
    return Rule(lambda value: value in choices, f"one of {shown}", tuple(map(str, choices)))


def each_of(*choices: str) -> Rule:
    return Rule(lambda values: {*values} <= {*choices}, f"any of {', '.join(choices)}", choices)


def at_least(low: float) -> Rule:
    return Rule(lambda value: value >= low, f"at least {low}")


def between(low: float, high: float) -> Rule:
    return Rule(lambda value: low <= value <= high, f"between {low} and {high}")


def matches(pattern: str, sentence: str) -> Rule:
    return Rule(lambda value: re.fullmatch(pattern, value) is not None, sentence)


def is_range(value: tuple[float, ...]) -> bool:
    return len(value) == 2 and 0 < value[0] <= value[1]


def is_interval(value: tuple[float, ...]) -> bool:
    return len(value) == 2 and value[0] < value[1]


def are_weights(value: tuple[str, ...]) -> bool:
    """Return whether the strings are valid class weights: finite, at least 0, and not all 0."""
    try:
        numbers = [float(text) for text in value]
    except ValueError:
        return False
    return all(0 <= number < float("inf") for number in numbers) and any(numbers)


positive = Rule(lambda value: value > 0, "above 0")
positive_numbers = Rule(lambda value: value and min(value) > 0, "numbers above 0")
probability = between(0, 1)
fraction = Rule(lambda value: 0 < value <= 1, "above 0 and at most 1")
below_one = Rule(lambda value: 0 <= value < 1, "at least 0 and below 1")
not_empty = Rule(lambda value: len(value) > 0 and "" not in list(value), "not empty")


class Conflict(NamedTuple):
    """A combination of values of several keys that is forbidden, although each value alone is
    allowed. sentence: the reason and the remedy, for the error message."""

    keys: tuple[str, ...]
    is_broken_by: Callable[..., bool]  # called with the keys' values in order
    sentence: str
