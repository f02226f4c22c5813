"""Parser of ARCH strings, which describe the stages of a model.

The format is that of the original Vision Longformer code (2021).
Example: 'l1,h3,d96,n1,s1,g1,p4,f7,a0_l2,h3,...'. Stages are separated by `_`. A stage is a
comma-separated list of letters, each followed by a number, in any order:
  l number of the stage, h heads, d width, n blocks, g global tokens, p patch side
  s 0 for full attention, 1 for the attention in the attention string (see below)
  f attention size: window (longformer), num_features (linformer, performer) or ratio (srformer)
  a 0 for relative position bias, 1 for absolute position embedding
Omitted letters have the defaults in LETTERS.

A second string, the attention string, names the attention of each block. Example:
'linformer/longformer,full'. Stages are separated by `/`. A stage has one name, or several names
separated by commas, which are repeated over its blocks. Later stages use the names of the last
stage in the string.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

LETTERS = {  # meaning, default, minimum, maximum
    "l": ("number of the stage", 1, 0, 1000),
    "h": ("heads", 3, 1, 65536),
    "d": ("width", 192, 1, 65536),
    "n": ("blocks", 1, 0, 10_000),
    "s": ("0 for full attention", 1, 0, 1),
    "g": ("global tokens", 1, 0, 65536),
    "p": ("patch side", 2, 1, 4096),
    "f": ("window or other attention size", 7, 1, 4096),
    "a": ("absolute position", 1, 0, 1),
}


@dataclass(frozen=True)
class StageSpec:
    """Settings of one stage of a model.

    dim: embedding width.
    attention: the name of each block's attention.
    patch: side of a patch. The unit is pixels for the first stage, and tokens of the previous stage
    for later stages.
    attn_size: window size of longformer, number of features of linformer and performer, or
    reduction ratio of srformer.
    absolute: use absolute position embeddings, not a relative position bias.
    """

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
                f"the width (letter d) must be a multiple of the number of heads (letter h), got "
                f"{self.dim} and {self.num_heads}"
            )
        if self.absolute and self.dim % 2:
            raise ValueError(
                f"an absolute position embedding (letter a) needs an even width (letter d), got "
                f"{self.dim}"
            )


def parse_arch(arch: str, attention: str = "longformer") -> list[StageSpec]:
    """Parse an ARCH string and an attention string, and return the settings of each stage.

    Both formats are described at the top of vil/models/arch.py. Raises ValueError for a malformed
    string. Unknown attention names are detected later, when a model is built.
    """
    parts = arch.strip().split("_")
    names = _parse_attention(attention, len(parts))
    return [_parse_stage(number, *pair) for number, pair in enumerate(zip(parts, names), start=1)]


def least_parameters(
    stages: Sequence[StageSpec],
    num_classes: int = 0,
    in_chans: int = 3,
    img_size: Sequence[int] = (0, 0),
) -> int:
    """Return a lower bound on the number of parameters of a model with the given stages.

    Counts only patch convolutions, query and output projections, global tokens, the head and, for
    images of (H, W) `img_size`, the position embeddings whose size depends on it.
    """
    total, (rows, columns) = 0, img_size
    for stage in stages:
        rows, columns = rows // stage.patch, columns // stage.patch
        if stage.absolute:
            total += (rows + columns) * (stage.dim // 2)
        elif rows and columns:  # tables of relative positions
            table = (2 * rows - 1) * (2 * columns - 1) * stage.num_heads
            total += stage.attention.count("full") * table
        total += in_chans * stage.dim * stage.patch**2 + stage.num_global * stage.dim
        total += len(stage.attention) * 2 * stage.dim**2
        in_chans = stage.dim
    return total + num_classes * in_chans


def format_arch(stages: Sequence[StageSpec]) -> str:
    """Convert stages to an ARCH string, the first argument of `parse_arch`.

    The ARCH string has no attention names. `format_attention` returns them.
    """
    return "_".join(
        f"l{number},h{s.num_heads},d{s.dim},n{len(s.attention)},"
        f"s{int({*s.attention} != {'full'})},g{s.num_global},"
        f"p{s.patch},f{s.attn_size},a{int(s.absolute)}"
        for number, s in enumerate(stages, start=1)
    )


def format_attention(stages: Sequence[StageSpec]) -> str:
    """Convert stages to an attention string, the second argument of `parse_arch`."""
    # a stage that has only full attention does not use its part, and gets that of a neighbor
    needed = [_shortest_cycle(s.attention) if {*s.attention} - {"full"} else None for s in stages]
    part, parts = next(filter(None, needed), "full"), []
    for names in needed:
        part = names or part
        parts.append(part)
    while len(parts) > 1 and parts[-1] == parts[-2]:
        parts.pop()
    return "/".join(parts)


def split_by_block(text: str, counts: Sequence[int]) -> list[list[str]]:
    """Split an argument of an attention into one value per block that uses this attention.

    text: the argument. Stages are separated by `/`. A stage has one value, or several values
    separated by `;`, which are repeated over the blocks. Later stages use the values of the last
    stage in the text. Text in quotes is not split.
    counts: for each stage, number of blocks that use the attention.

    Returns a list of values for each stage. Raises ValueError if a value is empty, if the text has
    more stages than `counts`, or if a stage has more values than blocks, unless it has 0 blocks.
    """
    stages = _split_unquoted(text, "/")
    if len(stages) > len(counts):
        raise ValueError(
            f"{text!r} has values for {len(stages)} stages, but the model has {len(counts)} stages"
        )
    stages += stages[-1:] * (len(counts) - len(stages))
    result = []
    for number, (part, count) in enumerate(zip(stages, counts), start=1):
        blocks = _split_unquoted(part, ";")
        if not all(blocks) or 0 < count < len(blocks):
            values = f"{len(blocks)} values" if all(blocks) else "an empty value"
            raise ValueError(
                f"{text!r} has {values} for stage {number} (blocks with this attention: {count}): "
                "give one value for all of these blocks, or at most one for each"
            )
        result.append(list(islice(cycle(blocks), count)))
    return result


def _split_unquoted(text: str, sign: str) -> list[str]:
    """Split a text at the character `sign`, except in quotes. The parts are stripped of spaces."""
    to_end = r"""(?=(?:[^'"]|'[^']*'|"[^"]*")*$)"""  # all later quotes are closed
    return [part.strip() for part in re.split(sign + to_end, text)]


def _shortest_cycle(names: tuple[str, ...]) -> str:
    """Return the shortest comma-separated list of names whose repetition yields `names`."""
    length = next(n for n in range(1, len(names) + 1) if names[n:] == names[:-n])
    return ",".join(names[:length])


def _parse_attention(attention: str, num_stages: int) -> list[list[str]]:
    """Parse an attention string into a list of names per stage.

    A list may have fewer names than the stage has blocks. The caller repeats it.
    """
    parts = attention.split("/")
    if len(parts) > num_stages:
        raise ValueError(
            f"attention {attention!r} has names for {len(parts)} stages, but ARCH has only "
            f"{num_stages} stages"
        )
    names = [[name.strip() for name in part.split(",")] for part in parts]
    for number, part in enumerate(parts, start=1):
        if not all(names[number - 1]):
            raise ValueError(
                f"attention {attention!r} has an empty name for stage {number} ({part!r})"
            )
    return names + names[-1:] * (num_stages - len(names))


def _parse_stage(number: int, part: str, names: Sequence[str]) -> StageSpec:
    where, items = f"ARCH stage {number} ({part!r})", {}
    for item in part.split(","):
        match = re.fullmatch(r"([a-z])(\d+)", item.strip())
        if not match:
            raise ValueError(f"{where}: {item!r} is not a letter followed by a number, as in 'h3'")
        letter, value = match[1], int(match[2])
        if letter not in LETTERS:
            known = ", ".join(f"{key} {meaning}" for key, (meaning, *_) in LETTERS.items())
            raise ValueError(f"{where}: unknown letter {letter!r} (letters: {known})")
        if letter in items:
            raise ValueError(f"{where}: the letter {letter!r} appears twice")
        meaning, _, minimum, maximum = LETTERS[letter]
        if not minimum <= value <= maximum:
            bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            raise ValueError(f"{where}: {letter} ({meaning}) must be {bound}, got {value}")
        items[letter] = value
    if items.get("l", number) != number:
        raise ValueError(
            f"{where}: l (number of the stage) is {items['l']}, but this is stage {number}"
        )
    n = {letter: default for letter, (_, default, *_) in LETTERS.items()} | items
    attention = tuple(islice(cycle(names if n["s"] else ["full"]), n["n"]))
    try:
        return StageSpec(n["d"], n["h"], attention, n["g"], n["p"], n["f"], bool(n["a"]))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
