"""The learned bias of local attention: by relative position, and toward each global token.

Shapes: N heads, G global tokens, w chunk side, W = w*w tokens of a chunk, K chunk offsets.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.window import Window


class LocalBias(NamedTuple):
    """The bias added to the attention scores of local queries. Both fields are optional.

    table (N heads, entries): the bias toward local keys by relative position, query minus key. For
    a `Window` of size w, there are (4w-1)**2 entries.
    to_global (N heads, G): the bias toward each global key.
    """

    table: Tensor | None = None
    to_global: Tensor | None = None


NO_BIAS = LocalBias()


def tile_bias(bias: LocalBias, window: Window) -> Tensor | None:
    """Return the relative position bias (N heads, W, K*W) of a query chunk toward its local keys.

    The keys are those of the K attended chunks, in the order of `window.offsets`. The result is the
    same for all query chunks. Returns None if `bias` has no table.
    """
    if bias.table is None:
        return None
    index = window.bias_index(bias.table.device)
    return bias.table.index_select(1, index.flatten()).unflatten(1, index.shape)


def joined_bias(bias: LocalBias, window: Window, num_global: int) -> Tensor | None:
    """Return the bias (N heads, W, G + K*W) of a query chunk toward its global and local keys.

    The local keys are those of the K attended chunks, in the order of `window.offsets`. A field of
    `bias` that is None means a bias of 0. Returns None if both fields are None.
    """
    local, to_global = tile_bias(bias, window), bias.to_global
    if not num_global:
        return local
    if local is None:
        if to_global is None:
            return None
        keys = len(window.offsets) * window.tile
        local = to_global.new_zeros(to_global.shape[0], window.tile, keys)
    elif to_global is None:
        to_global = local.new_zeros(local.shape[0], num_global)
    return torch.cat([to_global[:, None].expand(-1, window.tile, -1), local], dim=-1)
