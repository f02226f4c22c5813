"""Global memory attention: local tokens attend to the global tokens only.

ONLY_GLOBAL of the 2021 reference.

Shapes: B batch, N heads, D head dim, L local tokens, G global tokens, T = G+L, Q queried tokens.
"""

import torch.nn.functional as F
from torch import Tensor

from vil.layers.attention.base import TABLE, GlobalLocalAttention
from vil.layers.padding import Grid, Valid
from vil.layers.pos_embed import register_relative_bias


class GlobalOnlyAttention(GlobalLocalAttention):
    """Local tokens attend to the G global tokens, which attend to all tokens.

    As in the 2021 reference, rel_pos adds a bias to the global queries only.
    """

    unused_2021 = (TABLE,)

    def __init__(self, dim: int, num_heads: int, **common) -> None:
        super().__init__(dim, num_heads, **common)
        if self.num_global < 1:
            raise ValueError("global attention needs at least one global token")
        if self.rel_pos:
            register_relative_bias(self, None)

    def attend_local(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, valid_hw: Valid) -> Tensor:
        """q (B, N, L, D), k, v (B, N, G+L, D) -> (B, N, L, D)."""
        return self.sdpa(q, k[:, :, : self.num_global], v[:, :, : self.num_global])

    def local_weights(
        self, q: Tensor, k: Tensor, grid: Grid, queries: Tensor, valid_hw: Valid
    ) -> Tensor:
        """q (B, N, Q, D), k (B, N, T, D) -> (B, N, Q, T), 0 for local keys."""
        weights = self.scores(q, k[:, :, : self.num_global]).softmax(-1)
        return F.pad(weights, (0, grid[0] * grid[1]))

    def local_macs(self, grid: Grid) -> int:
        """Scores and values of the global tokens."""
        return 2 * grid[0] * grid[1] * self.num_global * self.dim
