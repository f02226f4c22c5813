"""The architecture grammar of the 2021 reference: 'l1,h3,d96,n1,s1,g1,p4,f7,a0_l2,h3,...'.

A part per stage, joined by `_`; in it a letter and a number per item, in any order. l is the number
of the stage, h heads, d width, n blocks, s 0 for full attention in this stage (else the configured
one), g global tokens, p patch side, f the attention's feature (longformer: window w), a 0 for
relative bias (else absolute position). Left-out letters take the defaults below.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULTS = {"l": 1, "h": 3, "d": 192, "n": 1, "s": 1, "g": 1, "p": 2, "f": 7, "a": 1}
MEANING = {
    "l": "number of the stage",
    "h": "heads",
    "d": "width",
    "n": "blocks",
    "s": "0 for full attention",
    "g": "global tokens",
    "p": "patch side",
    "f": "window or other feature",
    "a": "absolute position",
}
MINIMUM = {"h": 1, "d": 1, "p": 1, "f": 1}


@dataclass(frozen=True)
class StageSpec:
    """One stage of a model. attention: a name per block, so its length is the depth."""

    dim: int
    num_heads: int
    attention: tuple[str, ...]
    num_global: int = 1
    patch: int = 2
    feature: int = 7
    absolute: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(
                f"{self.num_heads} heads (letter h) do not divide the width {self.dim} (letter d)"
            )
        if self.absolute and self.dim % 2:
            raise ValueError(f"an absolute position needs an even width (letter d), got {self.dim}")


def parse_arch(arch: str, attention: str = "longformer") -> list[StageSpec]:
    """The stages of an ARCH string; `attention` is used where the letter s is not 0.

    Raises ValueError that names the stage, and the letter, for anything malformed.
    """
    return [
        _stage(number, part, attention)
        for number, part in enumerate(arch.strip().split("_"), start=1)
    ]


def format_arch(stages: Sequence[StageSpec]) -> str:
    """The ARCH string of stages whose blocks have one attention each."""
    return "_".join(
        f"l{number},h{s.num_heads},d{s.dim},n{len(s.attention)},"
        f"s{int('full' not in s.attention)},g{s.num_global},"
        f"p{s.patch},f{s.feature},a{int(s.absolute)}"
        for number, s in enumerate(stages, start=1)
    )


def _stage(number: int, part: str, attention: str) -> StageSpec:
    where, items = f"ARCH stage {number} ({part!r})", dict(DEFAULTS, l=number)
    seen: set[str] = set()
    for item in part.split(","):
        match = re.fullmatch(r"([a-z])(\d+)", item.strip())
        if not match:
            raise ValueError(f"{where}: {item!r} is not a letter followed by a number")
        letter, value = match[1], int(match[2])
        if letter not in DEFAULTS:
            known = ", ".join(f"{key} {what}" for key, what in MEANING.items())
            raise ValueError(f"{where}: unknown letter {letter!r} (letters: {known})")
        if letter in seen:
            raise ValueError(f"{where}: the letter {letter!r} stands twice")
        if value < MINIMUM.get(letter, 0):
            raise ValueError(
                f"{where}: {letter} ({MEANING[letter]}) must be at least {MINIMUM[letter]}, "
                f"got {value}"
            )
        seen.add(letter)
        items[letter] = value
    if items["l"] != number:
        raise ValueError(f"{where}: the letter l says {items['l']}, but it is stage {number}")
    name = attention if items["s"] else "full"
    try:
        return StageSpec(
            dim=items["d"],
            num_heads=items["h"],
            attention=(name,) * items["n"],
            num_global=items["g"],
            patch=items["p"],
            feature=items["f"],
            absolute=bool(items["a"]),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
