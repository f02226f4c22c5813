"""The learned bias of local attention: by relative position, and towards each global token.

Letters: N heads, G global tokens, w chunk side, W = w*w, K number of chunk offsets.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vil.ops.window import Window


class LocalBias(NamedTuple):
    """What is added to the scores of local queries; either part may be missing.

    table (N, (4w-1)**2): by query position minus key position.
    to_global (N, G): towards each global key.
    """

    table: Tensor | None = None
    to_global: Tensor | None = None


NO_BIAS = LocalBias()


def tile_bias(bias: LocalBias, window: Window) -> Tensor | None:
    """(N, W, K*W): the table spread over the positions of a chunk; None without a table."""
    if bias.table is None:
        return None
    index = window.bias_index(bias.table.device)
    return bias.table.index_select(1, index.flatten()).unflatten(1, index.shape)


def joined_bias(bias: LocalBias, window: Window, num_global: int) -> Tensor | None:
    """(N, W, G + K*W): both parts, globals first, 0 for a missing one; None without either."""
    local = tile_bias(bias, window)
    if not num_global or (local is None and bias.to_global is None):
        return local
    some = local if local is not None else bias.to_global
    heads, keys = some.shape[0], len(window.offsets) * window.tile
    if local is None:
        local = some.new_zeros(heads, window.tile, keys)
    to_global = bias.to_global if bias.to_global is not None else some.new_zeros(heads, num_global)
    return torch.cat([to_global[:, None].expand(-1, window.tile, -1), local], dim=-1)
