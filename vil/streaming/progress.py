"""Track the progress of a streamed forward pass, as a fraction of its estimated time.

The unit of time is one multiply-accumulate. In float32 on a CPU (Xeon with AVX-512), the softmax of
one attention score takes 400 units. The norms and activations of one channel of one token take
1,800 units.

Shapes: X, Y rows and columns of a stage's grid.
"""

from collections.abc import Callable

from vil.layers.block import Block
from vil.layers.patch_embed import PatchEmbed
from vil.streaming.rows import StripRows

SCORE, CHANNEL = 400, 1800  # multiply-accumulates
Report = Callable[[float], None]  # takes the share of the work that is done


def block_work(block: Block, grid: tuple[int, int], macs: int, *, only_global: bool) -> float:
    """Return the estimated work of a block, in units of multiply-accumulates.

    grid: (X, Y). macs: multiply-accumulates of the block's matmuls, from `strip_macs`. only_global:
    whether only the global tokens of the block's output are computed.
    """
    attn, tokens = block.attn, grid[0] * grid[1]
    if only_global:
        return macs + tokens * (CHANNEL * attn.dim + SCORE * attn.num_heads * attn.num_global)
    products = max(0, attn.macs(grid) - 4 * tokens * attn.dim**2)  # of queries, keys and values
    return macs + CHANNEL * tokens * attn.dim + SCORE * attn.num_heads * products / (2 * attn.dim)


def embed_work(embed: PatchEmbed, grid: tuple[int, int]) -> float:
    """Return the estimated work of a patch embedding, in units of multiply-accumulates."""
    return embed.macs(grid) + CHANNEL * grid[0] * grid[1] * embed.proj.out_channels


class WorkDone:
    """A counter of the work of several passes, which reports the fraction that is done.

    total: the work of all passes. report: function that is called with the fraction, which never
    decreases.
    """

    def __init__(self, total: float, report: Report) -> None:
        self.total, self.report = total, report
        self.before = 0.0  # work of the completed passes
        self.planned = self.done = 0.0  # work of the current pass
        self.share = 0.0

    def watch(self, rows: StripRows, work: float) -> None:
        """Add `work`, the total work of `rows`, to the current pass. Whenever `rows` has computed a
        strip, the corresponding fraction of `work` is counted as done."""
        self.planned += work
        of_row = work / rows.rows  # a function that holds `rows` would keep its buffers alive
        rows.on_strip = lambda count: self._advance(of_row * count)

    def _advance(self, work: float) -> None:
        before = self.share
        self.resume(self.done + work)
        if self.share > before:
            self.report(self.share)

    def resume(self, done: float) -> None:
        """Set how much work of the current pass is done, without calling `report`."""
        self.done = min(done, self.planned)
        self.share = max(self.share, min((self.before + self.done) / self.total, 1.0))

    def finish_pass(self) -> None:
        """Count all work of the current pass as done, and begin the next pass."""
        self._advance(self.planned)
        self.before, self.planned, self.done = self.before + self.planned, 0.0, 0.0
