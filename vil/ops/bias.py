"""The learned bias of local attention: by relative position, and toward each global token.

Shapes: N heads, G global tokens, w chunk side, W = w*w tokens of a chunk, K chunk offsets.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.window import Window


class LocalBias(NamedTuple):
    """The bias added to the attention scores of local queries. Both fields are optional.

    table (N heads, entries): the bias toward local keys, with an entry for each relative position
    (query position minus key position). For a `Window` of size w, there are (4w-1)**2 entries.
    to_global (N heads, G): the bias toward each of the G global keys.
    """

    table: Tensor | None = None
    to_global: Tensor | None = None


NO_BIAS = LocalBias()


def tile_bias(bias: LocalBias, window: Window) -> Tensor | None:
    """Look up the relative position bias of each query of a chunk toward its local keys.

    The result is (N heads, W, K*W), for the W queries of a chunk and the W keys in each of K
    chunks: one chunk for each offset of `window`. It is the same for all query chunks. Returns None
    if `bias` has no table.
    """
    if bias.table is None:
        return None
    index = window.bias_index(bias.table.device)
    return bias.table.index_select(1, index.flatten()).unflatten(1, index.shape)


def joined_bias(bias: LocalBias, window: Window, num_global: int) -> Tensor | None:
    """Look up the bias of each query of a chunk toward its global and local keys.

    The result is (N heads, W, G + K*W), for the W queries of a chunk. In the last dimension, the G
    global keys come first, then the W keys in each of K chunks: one chunk for each offset of
    `window`. A field of `bias` that is None counts as 0. Returns None if both fields are None.
    """
    local = tile_bias(bias, window)
    if not num_global or (local is None and bias.to_global is None):
        return local
    like = local if local is not None else bias.to_global
    heads, keys = like.shape[0], len(window.offsets) * window.tile
    if local is None:
        local = like.new_zeros(heads, window.tile, keys)
    to_global = bias.to_global if bias.to_global is not None else like.new_zeros(heads, num_global)
    return torch.cat([to_global[:, None].expand(-1, window.tile, -1), local], dim=-1)
