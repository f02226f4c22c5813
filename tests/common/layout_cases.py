"""The layouts that backends are tested on: every pattern of the registry on three grids."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from vil.ops import Case, patterns
from vil.ops.layout import Layout
from vil.ops.patterns import Pairs, Pattern, parse_pattern
from vil.ops.patterns.base import Grid

HEADS = 2
GRIDS = [(1, 1), (5, 7), (9, 12)]
TEXTS = [
    "local:2",
    "local:3,1",
    "axial",
    "dilated:2",
    "swin:4,2",
    "window:3",
    "window:2,1",
    "gaussian:2,0.2",
    "random:0.1",
    "global_tokens:2",
    "local:2 | global_tokens:2",
    "(axial | local:2) - local:1",
]


def draw(share: float, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < share


def mask_per_head(grid: Grid) -> Pattern:
    """A mask per head, in which some tokens attend to nothing."""
    mask = draw(0.3, HEADS, math.prod(grid), math.prod(grid))
    mask[:, 3:5] = False
    mask[1, :20] = False
    return patterns.from_mask(mask)


def blocks_per_head(grid: Grid) -> Pattern:
    """A mask of chunks per head, in which the tokens of some chunks attend to nothing."""
    count = math.prod(-(-side // 2) for side in grid)
    blocks = draw(0.4, HEADS, count, count)
    blocks[0, 0] = False
    return patterns.from_blocks(blocks, 2)


@dataclass(frozen=True)
class LocalPerHead(Pattern):
    """A user's pattern: keys up to a distance that differs by head."""

    distances: tuple[int, ...] = (1, 3)
    invariant: ClassVar[bool] = True

    @property
    def heads(self) -> int:
        return len(self.distances)

    def visible(self, pairs: Pairs) -> torch.Tensor:
        apart = torch.maximum(pairs.rows.abs(), pairs.cols.abs())
        return torch.stack([apart <= distance for distance in self.distances])


MAKERS: dict[str, Callable[[Grid], Pattern]] = {
    **{text: partial(lambda text, grid: parse_pattern(text), text) for text in TEXTS},
    "mask per head": mask_per_head,
    "blocks per head": blocks_per_head,
    "mask per head & local": lambda grid: mask_per_head(grid) & patterns.local(3),
    "local per head": lambda grid: LocalPerHead(),
}
F32, BF16 = torch.float32, torch.bfloat16
CALLS = [  # chunk, G, table, to_global, padded images, max_reach, dtype
    (2, 0, True, False, False, None, F32),
    (3, 2, True, True, True, (1, 2), BF16),
    (4, 0, False, False, True, None, F32),
    (3, 2, False, True, False, None, BF16),
    (4, 2, True, True, True, None, F32),
    (2, 0, True, False, True, (2, 0), F32),
    (8, 1, True, True, False, (10, 13), BF16),
]


def layout_case(name: str, grid: Grid, call: tuple, head_dim: int = 16) -> Case:
    """name: a key of MAKERS, or the text of a pattern."""
    chunk, num_global, *bias_and_padding, max_reach, dtype = call
    pattern = MAKERS[name](grid) if name in MAKERS else parse_pattern(name)
    layout = Layout(grid, chunk, pattern, max_reach)
    return Case(layout, 2, HEADS, head_dim, num_global, dtype, "cpu", *bias_and_padding)


PAIRS = [(name, grid) for name in MAKERS for grid in GRIDS]
LAYOUTS = [layout_case(*pair, CALLS[at % len(CALLS)]) for at, pair in enumerate(PAIRS)]
ALL_LAYOUTS = [layout_case(*pair, call) for pair in PAIRS for call in CALLS]
