"""Gather the neighbors of each chunk, then call torch's fused attention once for all chunks.

This backend can be exported with symbolic grid sizes. It stores up to K copies of k and v, one for
each offset, and has no second derivative.

Shapes: B batch, N heads, R x C chunks of W tokens, K offsets, G global tokens, D channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.backends.chunk_layout import (
    at_offsets,
    can_be_empty,
    from_chunks,
    roll_neighbors,
    to_chunks,
)
from vil.ops.bias import joined_bias
from vil.ops.call import Call
from vil.ops.window import Window


def run(call: Call) -> Tensor:
    """Compute `vil.ops.local_attention` for a validated `Call`. Returns (B, N, L, D)."""
    q, k, v, _, num_global, bias, valid_hw, scale, dropout_p, *_ = call
    window: Window = call.window  # pyrefly: ignore[bad-assignment]  # the registry refuses layouts
    window = window.without_absent()
    heads = q.shape[1]
    queries = to_chunks(q, window).flatten(1, 3)  # (B, N*R*C, W, D)
    keys, values = _gather(k, window, num_global), _gather(v, window, num_global)
    visible = F.pad(window.visible(valid_hw, q.device), (num_global, 0), value=True)
    visible = visible.flatten(1, 2)[:, None]  # (B or 1, 1, R*C, W or 1, G + K*W)
    bias = joined_bias(bias, window, num_global)
    added = q.new_zeros(()) if bias is None else bias.to(q.dtype)[:, None]
    mask = torch.where(visible, added, torch.finfo(q.dtype).min)
    mask = mask.expand(-1, heads, -1, -1, -1).flatten(1, 2)
    out = F.scaled_dot_product_attention(queries, keys, values, mask, dropout_p, scale=scale)
    if can_be_empty(num_global, valid_hw):
        has_keys = visible.any(-1, keepdim=True).expand(-1, heads, -1, -1, -1).flatten(1, 2)
        out = out.masked_fill(~has_keys, 0.0)
    return from_chunks(out.unflatten(1, (heads, *window.chunks)), window)


def _gather(x: Tensor, window: Window, num_global: int) -> Tensor:
    """Return the keys or values that each of R x C query chunks needs, (B, N*R*C, G + K*W, D).

    x (B, N, G+L, D): the keys or values. The result has the G global tokens first, then the W
    tokens of each of K chunks.
    """
    rows, cols = window.chunks
    first, local = x[:, :, :num_global], x[:, :, num_global:]
    parts = [first[:, :, None, None].expand(-1, -1, rows, cols, -1, -1)] if num_global else []
    if window.symbolic:
        parts.append(at_offsets(local, window))
    else:
        parts.extend(roll_neighbors(to_chunks(local, window), window.offsets))
    return torch.cat(parts, dim=4).flatten(1, 3)
