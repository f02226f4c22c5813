"""Full attention with a dense mask for the window or the layout, for small grids.

torch's scaled_dot_product_attention computes a call if it is exact for it, gradients included:
without dropout, for a layout or for a window in which every token attends to every token, and
without the gradient of a bias. Plain operations, which store all L x L scores, compute the others.
Both need a mask with an entry for each pair of tokens, so the grid size is limited.

Shapes: B batch, N heads, H patterns (N, or 1 if all heads have the same), L tokens, G global
tokens, D channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.backends.chunk_layout import masked_softmax
from vil.ops.bias import LocalBias
from vil.ops.call import Call
from vil.ops.layout import Layout
from vil.ops.patterns.base import Pairs
from vil.ops.window import Mask, Window, real_cells
from vil.utils.transforms import is_exporting, is_transformed

MAX_MASKED_LENGTH = 8192  # tokens; above it the scores of a head exceed 256 MiB
FULL_PRECISION = (torch.float32, torch.float64)


def unsupported(case: Case) -> list[str]:
    """Return the reasons why this backend does not support the call that `case` describes.

    Returns an empty list if the backend supports the call.
    """
    reasons = []
    if case.window.repeats():
        reasons.append(
            "keys repeat: the cyclic window spans more rows or columns of chunks than the grid"
        )
    if not case.window.symbolic and case.window.length > MAX_MASKED_LENGTH:
        reasons.append(
            f"{case.window.length} tokens are more than {MAX_MASKED_LENGTH}: it stores all scores"
        )
    return reasons


def run(call: Call) -> Tensor:
    """Compute `vil.ops.local_attention` for a validated `Call`. Returns (B, N, L, D)."""
    return _run_sdpa(call) if _is_exact_with_sdpa(call) else run_eager(call)


def _is_exact_with_sdpa(call: Call) -> bool:
    """Return whether torch's fused attention computes the output and all gradients of a call."""
    window, biases = call.window, [part for part in call.bias if part is not None]
    if call.dropout_p or Case.of(call).symbolic or is_exporting():
        return False
    if not (isinstance(window, Layout) or window.attends_all):
        return False
    if is_transformed(call.q, call.k, call.v, *biases):  # its kernels have no jvp
        return False
    # the kernels have no gradient of a bias, and would round it to half precision
    learned = torch.is_grad_enabled() and any(part.requires_grad for part in biases)
    return not biases or (call.q.dtype in FULL_PRECISION and not learned)


def _run_sdpa(call: Call) -> Tensor:
    """Compute a call with torch's scaled_dot_product_attention. Returns (B, N, L, D)."""
    window = call.window
    no_mask = call.valid_hw is None and not isinstance(window, Layout)
    if no_mask and all(part is None for part in call.bias):
        return F.scaled_dot_product_attention(call.q, call.k, call.v, scale=call.scale)
    visible, index = _visible_keys(call)
    is_empty = None
    if not call.num_global:  # torch's kernels return different results for a query without keys
        is_empty = ~visible.any(3, keepdim=True)
        visible = visible | is_empty
    bias = LocalBias(*(part if part is None else part.to(call.q.dtype) for part in call.bias))
    mask = _add_bias(visible, index, bias, call.num_global)
    out = F.scaled_dot_product_attention(call.q, call.k, call.v, mask, scale=call.scale)
    return out if is_empty is None else out.masked_fill(is_empty, 0.0)


def _visible_keys(call: Call) -> tuple[Tensor, Tensor]:
    """Return (visible, index) for L local queries and G global and L local keys.

    visible (B or 1, H, L, G+L) bool: whether the query attends to the key. index (L, L): see
    `dense_window`.
    """
    visible, index = dense_window(call.window, call.q.device)
    visible = visible[None]
    if call.valid_hw is not None:
        real = real_cells(call.valid_hw.to(call.q.device), call.window.grid).flatten(2)
        visible = visible & real[:, :, None]
    return F.pad(visible, (call.num_global, 0), value=True), index


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


def run_eager(call: Call) -> Tensor:
    """Compute a call with plain operations, which store all scores. Returns (B, N, L, D)."""
    q, k, v, window, num_global, bias, valid_hw, scale, dropout_p, *_ = call
    visible, index = _visible_keys(call)
    scores = (q * scale) @ k.mT
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if bias.table is not None:
        local = bias.table.index_select(1, index.flatten()).unflatten(1, index.shape)
        scores = scores + F.pad(local, (num_global, 0))
    if bias.to_global is not None:
        scores = scores + F.pad(bias.to_global, (0, window.length))[:, None]
    may_be_empty = num_global == 0 and (valid_hw is not None or isinstance(window, Layout))
    weights = masked_softmax(scores, visible, may_be_empty)
    return F.dropout(weights, dropout_p).to(v.dtype) @ v


def dense_window(window: Window | Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (visible, index) for all pairs of L queries and L keys.

    visible (H, L, L) bool: whether the query attends to the key in each pattern.
    index (L, L) int64: the index of the pair's bias in the flattened bias table.
    """
    if isinstance(window, Layout):
        pairs = Pairs.every(window.grid)
        mask = window.pattern.mask(window.grid)[None] if window.symbolic else window.mask
        return mask.to(device), window.bias_index(pairs.rows, pairs.cols).to(device)
    side = 4 * window.size - 1
    visible = torch.zeros(*window.grid, *window.grid, dtype=torch.bool, device=device)
    index = torch.zeros(*window.grid, *window.grid, dtype=torch.long, device=device)
    for dx, dy in window.offsets:
        row_visible, row_index = _along(window, 0, dx, device)
        col_visible, col_index = _along(window, 1, dy, device)
        added = row_visible[:, None, :, None] & col_visible[None, :, None, :]
        visible |= added
        entry = row_index[:, None, :, None] * side + col_index[None, :, None, :]
        index = torch.where(added, entry, index)
    return visible.flatten(2).flatten(0, 1)[None], index.flatten(2).flatten(0, 1)


def _along(window: Window, axis: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (visible, index) for all pairs of a query and a key position along one axis.

    The n positions are the rows of the grid (axis 0) or its columns (axis 1).
    visible (n, n) bool: whether the key's chunk is `step` chunks after the query's chunk. In an
    exact window, the distance must also be at most `window.size`.
    index (n, n) int64: row (axis 0) or column (axis 1) of the pair's bias in the bias table.
    """
    w, count = window.size, window.chunks[axis]
    token = torch.arange(window.grid[axis], device=device)
    query, key = token[:, None], token[None, :]
    target = query // w + step
    visible = key // w == (target % count if window.cyclic else target)
    distance = query % w - (key % w + step * w)  # query minus key, unwrapped
    if window.mask == Mask.EXACT:
        visible = visible & (distance.abs() <= w)
    return visible, distance + 2 * w - 1
