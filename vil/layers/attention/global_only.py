"""Global-memory attention: local tokens attend to the global tokens alone (the reference's
ONLY_GLOBAL).

Letters: B images, N heads, D channels of a head, L local tokens, G global tokens.
"""

from torch import Tensor

from vil.layers.attention.base import GlobalLocalAttention
from vil.layers.pos_embed import register_relative_bias


class GlobalOnlyAttention(GlobalLocalAttention):
    """Local tokens attend to the G global tokens, which attend to everything.

    With rel_pos only the rows of global tokens have a bias, as in the reference.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid: tuple[int, int] | None = None,
        num_global: int = 1,
        rel_pos: bool = False,
        **common,
    ) -> None:
        if num_global < 1:
            raise ValueError("global attention needs at least one global token")
        super().__init__(dim, num_heads, num_global=num_global, rel_pos=rel_pos, **common)
        if rel_pos:
            register_relative_bias(self, None, num_heads, num_global)

    def local_rows(
        self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], valid: Tensor | None
    ) -> Tensor:
        """q (B, N, L, D), k, v (B, N, G+L, D) -> (B, N, L, D)."""
        return self.dense(q, k[:, :, : self.num_global], v[:, :, : self.num_global])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rel_pos={self.rel_pos}"

    def local_macs(self, grid: tuple[int, int]) -> int:
        """Scores and values towards the global tokens."""
        return 2 * grid[0] * grid[1] * self.num_global * self.dim
