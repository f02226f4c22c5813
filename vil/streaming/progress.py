"""How much of the work of a streamed forward pass is done, as a share of its time.

The time of a block is estimated in multiply-accumulates. With float32 on a CPU (Xeon with AVX-512),
a score of attention takes as long as 400 of them, and a channel of a token, which norms and
activations read and write, as long as 1,800.

Shapes: X Y grid of a stage.
"""

from collections.abc import Callable

from vil.layers.block import Block
from vil.layers.patch_embed import PatchEmbed

SCORE, CHANNEL = 400, 1800  # multiply-accumulates
Report = Callable[[float], None]  # takes the share of the work that is done


def block_work(block: Block, grid: tuple[int, int], macs: int, *, only_global: bool) -> float:
    """Return the work of a block.

    macs: its multiply-accumulates in strips. only_global: its local output is not needed.
    """
    attn, tokens = block.attn, grid[0] * grid[1]
    if only_global:
        return macs + tokens * (CHANNEL * attn.dim + SCORE * attn.num_heads * attn.num_global)
    products = max(0, attn.macs(grid) - 4 * tokens * attn.dim**2)  # of queries, keys and values
    return macs + CHANNEL * tokens * attn.dim + SCORE * attn.num_heads * products / (2 * attn.dim)


def embed_work(embed: PatchEmbed, grid: tuple[int, int]) -> float:
    """Return the work of a patch embedding."""
    return embed.macs(grid) + CHANNEL * grid[0] * grid[1] * embed.proj.out_channels


class WorkDone:
    """Counter of the work of several passes, which reports the share that is done.

    total: the work of all passes. report: is called with shares that never decrease.
    """

    def __init__(self, total: float, report: Report) -> None:
        self.total, self.report = total, report
        self.before = self.current = self.share = 0.0  # work of completed passes, of this one

    def add(self, work: float) -> None:
        """Add work to the current pass."""
        self.current += work

    def reach(self, fraction: float) -> None:
        """Report that a fraction of the current pass is done."""
        share = (self.before + self.current * fraction) / self.total
        if share > self.share:
            self.share = min(share, 1.0)
            self.report(self.share)

    def finish_pass(self) -> None:
        """Begin the next pass."""
        self.before, self.current = self.before + self.current, 0.0
