"""Global memory attention: local tokens attend to the global tokens only.

The original Vision Longformer code of 2021 calls it ONLY_GLOBAL.

Shapes: B batch, N heads, D head dim, L local tokens, G global tokens, T = G+L, Q queries.
"""

import torch.nn.functional as F
from torch import Tensor

from vil.layers.attention.base import TABLE, GlobalLocalAttention
from vil.layers.padding import Grid, Valid
from vil.layers.pos_embed import register_relative_bias


class GlobalOnlyAttention(GlobalLocalAttention):
    """Attention of local tokens to the global tokens only, and of global tokens to all tokens.

    rel_pos: learn a bias for global queries, but none for local queries, as in the original Vision
    Longformer code. Raises ValueError if num_global is 0.
    """

    unused_2021 = (TABLE,)

    def __init__(self, dim: int, num_heads: int, **common) -> None:
        super().__init__(dim, num_heads, **common)
        if self.num_global < 1:
            raise ValueError(
                "global attention needs at least one global token: set num_global (letter g of "
                "ARCH) to 1 or more"
            )
        if self.rel_pos:
            register_relative_bias(self, None)

    def attend_local(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid) -> Tensor:
        """Return the output (B, N, L, D) of local queries, which attend to global tokens only.

        q (B, N, L, D): local queries. k, v (B, N, G+L, D): keys and values of all tokens.
        """
        return self.sdpa(q, k[:, :, : self.num_global], v[:, :, : self.num_global])

    def local_weights(
        self, q: Tensor, k: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid
    ) -> Tensor:
        """Return the attention weights (B, N, Q, T) of local queries q (B, N, Q, D).

        The keys are all T tokens. Local keys have weight 0.
        """
        weights = self.scores(q, k[:, :, : self.num_global]).softmax(-1)
        return F.pad(weights, (0, grid[0] * grid[1]))

    def local_macs(self, grid: Grid) -> int:
        """Count the multiply-accumulates of the attention of local queries to global tokens."""
        return 2 * grid[0] * grid[1] * self.num_global * self.dim
