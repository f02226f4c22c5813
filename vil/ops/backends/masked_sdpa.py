"""Full attention with a dense mask, by torch's scaled_dot_product_attention.

This backend supports attention patterns, and windows in which every token attends to every token.
The mask has an entry for each pair of tokens, so the grid size is limited as in dense_masked.py.
Training with a bias is not supported, because torch's fused kernels do not compute the gradient of
the bias.

Shapes: B batch, N heads, H heads if their patterns differ, else 1, L tokens, G global tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.backends import dense_masked
from vil.ops.bias import LocalBias
from vil.ops.call import Call
from vil.ops.layout import Layout
from vil.ops.window import real_cells

FULL_PRECISION = (torch.float32, torch.float64)


def unsupported(case: Case) -> list[str]:
    """Return the reasons why this backend does not support the call that `case` describes.

    Returns an empty list if the backend supports the call.
    """
    has_bias = case.table_bias or case.global_bias
    checks = {
        "with dropout, torch would store all scores": case.dropout,
        "torch's fused kernels have no gradient for a bias in training": has_bias
        and case.needs_grad,
        "a bias would be rounded to half precision": has_bias and case.dtype not in FULL_PRECISION,
        "the batch or grid size is symbolic": case.symbolic,
        "it computes patterns, and windows that are as large as the grid": not case.symbolic
        and not (case.is_layout or case.window.covers_grid),
    }
    reasons = [text for text, applies in checks.items() if applies]
    return reasons if case.symbolic else reasons + dense_masked.unsupported(case)


def run(call: Call) -> Tensor:
    """Compute `vil.ops.local_attention` for a validated `Call`. Returns (B, N, L, D)."""
    window = call.window
    no_mask = call.valid_hw is None and not isinstance(window, Layout)
    if no_mask and all(part is None for part in call.bias):
        return F.scaled_dot_product_attention(call.q, call.k, call.v, scale=call.scale)
    visible, index = dense_masked.dense_window(window, call.q.device)
    visible = F.pad(visible[None], (call.num_global, 0), value=True)  # (1, H, L, G+L)
    if call.valid_hw is not None:
        real = real_cells(call.valid_hw.to(call.q.device), call.window.grid).flatten(2)
        visible = visible & F.pad(real, (call.num_global, 0), value=True)[:, :, None]
    is_empty = None
    if not call.num_global:  # torch's kernels return different results for a query without keys
        is_empty = ~visible.any(3, keepdim=True)
        visible = visible | is_empty
    bias = LocalBias(*(part if part is None else part.to(call.q.dtype) for part in call.bias))
    mask = _add_bias(visible, index, bias, call.num_global)
    out = F.scaled_dot_product_attention(call.q, call.k, call.v, mask, scale=call.scale)
    return out if is_empty is None else out.masked_fill(is_empty, 0.0)


def _add_bias(visible: Tensor, index: Tensor, bias: LocalBias, num_global: int) -> Tensor:
    """Return the argument attn_mask of scaled_dot_product_attention: the bias where `visible` is
    True, and -inf elsewhere. Without a bias, return `visible` itself.

    visible (images or 1, heads or 1, L, G+L): True where a local token attends to a global or local
    token. index (L, L): position in the bias table of the entry for each pair of local tokens.
    """
    table, to_global = bias
    if table is None and to_global is None:
        return visible
    like = to_global if table is None else table
    added = like.new_zeros(1, len(like), *visible.shape[2:])
    if table is not None:
        added[..., num_global:] = table.index_select(1, index.flatten()).unflatten(1, index.shape)
    if to_global is not None:
        added[..., :num_global] = to_global[:, None]
    return torch.where(visible, added, -torch.inf)
