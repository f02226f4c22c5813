"""Compute the global tokens of a block, which attend to all tokens of the image.

The image arrives strip by strip, so the global tokens are complete only after the last strip. The
next block needs them, and therefore runs in another pass over the image.

Shapes: N heads, D head dim, C = N*D channels, G global tokens, T local tokens of a strip, n rows, Y
columns.
"""

from torch import Tensor

from vil.layers.attention.base import GlobalLocalAttention
from vil.layers.block import Block
from vil.streaming.softmax import OnlineSoftmax
from vil.streaming.tokens import parts


class GlobalRows:
    """The attention of a block's global tokens to an image that is read in strips of rows.

    x_global (1, G, C): the global tokens of the block's input.
    """

    def __init__(self, block: Block, x_global: Tensor) -> None:
        self.block, self.x_global = block, x_global
        attn: GlobalLocalAttention = block.attn
        query, kv = (attn.query_global, attn.kv_global) if attn.separate else (attn.query, attn.kv)
        first = block.norm1(x_global)
        self.softmax = OnlineSoftmax(attn.split_heads(query(first))[0], attn.scale)
        among = to_local = None
        if attn.rel_pos:
            among = attn.g2g_relative_position_bias
            to_local = attn.g2l_relative_position_bias[0][:, :, None]
        self.bias = to_local
        k, v = attn.split_parts(kv(first), 2)
        self.softmax.add(k[0], v[0], among)

    def add(self, tokens: Tensor, size: int, kv: Tensor | None = None) -> None:
        """Let the global tokens attend to the local tokens (T, C) of a strip of rows.

        Each token of the image must be added exactly once. size: maximum number of tokens to
        process at once. kv (T, 2C): keys and values of the tokens, if they are already computed.
        They are ignored if global queries have separate projections.
        """
        attn = self.block.attn
        if attn.separate:
            project, kv = attn.kv_global, None
        else:
            project = attn.kv
        for part in parts(len(tokens), size):
            own = project(self.block.norm1(tokens[part])) if kv is None else kv[part]
            k, v = attn.split_parts(own[None], 2)
            self.softmax.add(k[0], v[0], self.bias)

    def finish(self) -> Tensor:
        """Return the global tokens (1, G, C) of the block's output."""
        attn, block = self.block.attn, self.block
        proj = attn.proj_global if attn.separate else attn.proj
        x = self.x_global + proj(attn.merge_heads(self.softmax.result()[None]))
        return x + block.mlp(block.norm2(x))
