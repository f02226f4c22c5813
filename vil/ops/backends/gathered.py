"""Each chunk with its neighbours gathered beside it, then one fused attention over all chunks.

Plain tensor operations, so it can be exported with symbolic grid sizes. It keeps K copies of k and
v. Offsets that lie outside the grid for every chunk are not computed. No second derivative: torch's
fused attention has none.

Letters: B images, N heads, R x C chunks of W tokens, K offsets, G global tokens, D channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.backends.chunks import can_be_empty, from_chunks, neighbour, to_chunks
from vil.ops.bias import LocalBias, joined_bias
from vil.ops.window import Window


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    num_global: int,
    bias: LocalBias,
    valid: Tensor | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """See `vil.ops.local_attention`."""
    window = window.without_absent()
    rows, cols = window.chunks
    queries = _by_chunk(to_chunks(q, window))  # (B*R*C, N, W, D)
    keys, values = _gather(k, window, num_global), _gather(v, window, num_global)
    visible = F.pad(window.visible(valid, q.device), (num_global, 0), value=True)
    visible = visible.flatten(1, 2).expand(q.shape[0], -1, -1, -1).flatten(0, 1)[:, None]
    mask = _score_mask(visible, joined_bias(bias, window, num_global), q.dtype)
    out = F.scaled_dot_product_attention(queries, keys, values, mask, dropout_p, scale=scale)
    if can_be_empty(num_global, valid):
        out = out.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    out = out.unflatten(0, (q.shape[0], rows, cols)).permute(0, 3, 1, 2, 4, 5)
    return from_chunks(out, window)


def _by_chunk(x: Tensor) -> Tensor:
    """(B, N, R, C, T, D) -> (B*R*C, N, T, D)."""
    return x.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


def _gather(x: Tensor, window: Window, num_global: int) -> Tensor:
    """(B, N, G+L, D) -> (B*R*C, N, G + K*W, D): the globals and the neighbours of each chunk."""
    rows, cols = window.chunks
    first, local = x[:, :, :num_global], to_chunks(x[:, :, num_global:], window)
    parts = [first[:, :, None, None].expand(-1, -1, rows, cols, -1, -1)] if num_global else []
    parts += [neighbour(local, offset) for offset in window.offsets]
    return _by_chunk(torch.cat(parts, dim=4))


def _score_mask(visible: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: the bias where a key exists, the smallest finite number where
    not.
    """
    shape = (
        visible.shape[:1] + (1,) + visible.shape[2:]
        if bias is None
        else visible.shape[:1] + bias.shape
    )
    base = visible.new_zeros((), dtype=dtype) if bias is None else bias.to(dtype)
    return torch.where(visible, base, torch.finfo(dtype).min).expand(shape)
