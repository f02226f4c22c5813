"""The architecture grammar of the 2021 reference: 'l1,h3,d96,n1,s1,g1,p4,f7,a0_l2,h3,...'.

A part per stage, joined by `_`; in it a letter and a number per item, in any order. l is the number
of the stage, h heads, d width, n blocks, s 0 for full attention in this stage (else the configured
one), g global tokens, p patch side, f the attention's feature (longformer: window w), a 0 for
relative bias (else absolute position). Left-out letters take the defaults below.

Beside it stands the attention of the blocks that are not full: one name, or names separated by
commas, which the blocks of a stage take in turn; parts separated by `/` are those of stage 1, 2,
..., the last one also that of all further stages: 'linformer/longformer,full'.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

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
    attn_size: int = 7
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

    Raises ValueError that names the stage, and the letter, for anything malformed. Whether the
    attentions exist is for the model to say.
    """
    parts = arch.strip().split("_")
    names = _attention_names(attention, len(parts))
    return [_stage(number, *pair) for number, pair in enumerate(zip(parts, names), start=1)]


def format_arch(stages: Sequence[StageSpec]) -> str:
    """The ARCH string of stages; which attention they have says `format_attention`."""
    return "_".join(
        f"l{number},h{s.num_heads},d{s.dim},n{len(s.attention)},"
        f"s{int(not _all_full(s))},g{s.num_global},"
        f"p{s.patch},f{s.attn_size},a{int(s.absolute)}"
        for number, s in enumerate(stages, start=1)
    )


def format_attention(stages: Sequence[StageSpec]) -> str:
    """The attention string, so that `parse_arch(format_arch(s), format_attention(s)) == s`."""
    # stages without a block that is not full need none, and repeat their neighbour's
    named = [_shortest_cycle(s.attention) if {*s.attention} - {"full"} else None for s in stages]
    part, parts = next(filter(None, named), "full"), []
    for name in named:
        part = name or part
        parts.append(part)
    while len(parts) > 1 and parts[-1] == parts[-2]:
        parts.pop()
    return "/".join(parts)


def _all_full(stage: StageSpec) -> bool:
    return set(stage.attention) == {"full"}


def _shortest_cycle(names: tuple[str, ...]) -> str:
    """The fewest names that, taken in turn, give these."""
    length = next(n for n in range(1, len(names) + 1) if names[n:] == names[:-n])
    return ",".join(names[:length])


def _attention_names(attention: str, num_stages: int) -> list[list[str]]:
    """The names that each stage's blocks take in turn."""
    parts = attention.split("/")
    if len(parts) > num_stages:
        raise ValueError(
            f"attention {attention!r}: part {num_stages + 1} ({parts[num_stages]!r}) has no stage, "
            f"ARCH has {num_stages}"
        )
    names = [[name.strip() for name in part.split(",")] for part in parts]
    for number, part in enumerate(parts, start=1):
        if not all(names[number - 1]):
            raise ValueError(f"attention {attention!r}: an empty name in part {number} ({part!r})")
    return names + names[-1:] * (num_stages - len(names))


def _stage(number: int, part: str, names: Sequence[str]) -> StageSpec:
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
    attention = tuple(islice(cycle(names if items["s"] else ["full"]), items["n"]))
    try:
        return StageSpec(
            dim=items["d"],
            num_heads=items["h"],
            attention=attention,
            num_global=items["g"],
            patch=items["p"],
            attn_size=items["f"],
            absolute=bool(items["a"]),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
