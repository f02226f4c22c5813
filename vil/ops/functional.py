"""Local 2-D attention: check the arguments, select a backend and run it.

Shapes: B batch, N heads, D head dim, X Y grid, L = X*Y local tokens, G global tokens, w window.
"""

import torch.nn.functional as F
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.backends import BUILT_IN
from vil.ops.bias import NO_BIAS, LocalBias
from vil.ops.call import Call
from vil.ops.dispatch import BACKENDS, choose
from vil.ops.layout import Layout
from vil.ops.window import Window, real_cells
from vil.utils.precision import autocast_off
from vil.utils.transforms import is_transformed

TRANSFORMABLE = "chunk_autograd"  # consists of differentiable tensor operations only


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window | Layout,
    *,
    num_global: int = 0,
    bias: LocalBias | None = None,
    valid_hw: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
    neighbor: Tensor | None = None,
) -> Tensor:
    """Attend from each local token to the global tokens and its window, with a single softmax.

    q (B, N, L, D): local queries, row-major over the grid.
    k, v (B, N, G+L, D): keys and values, global tokens first.
    window: a `Window` with chunks of w x w tokens, or a `Layout`. It defines which local keys
    each query attends to. Its grid has X * Y = L tokens.
    num_global: G.
    bias.table (N, window.table_entries): bias toward local keys by relative position. For a
    `Window`, there are (4w-1)**2 entries.
    bias.to_global (N, G): bias toward global keys.
    valid_hw (B, 2): rows and columns of each image that are not padding. No token attends to
    padding.
    scale: factor of q @ k^T, D**-0.5 by default.
    dropout_p: dropout probability of the attention weights.
    backend: "auto" or a name in `vil.ops.BACKENDS`. All backends compute the same result, which
    `vil.ops.reference` defines. Under torch.func transforms and in forward-mode AD, a built-in
    backend is replaced by `chunk_autograd`, or by `masked` for a layout.
    neighbor: scalar int64 on the CPU: the neighbor mode 1 to 8 whose offsets replace those of the
    window, which must also be those of such a mode. torch.compile then need not compile each mode.

    Returns (B, N, L, D) in the dtype of q. The output of a query without any key is 0. The softmax
    statistics are computed in fp32 (fp64 for fp64 inputs). Autocast has no effect.
    Raises ValueError for inconsistent shapes or dtypes, for values out of range, and for a backend
    that does not support the case.
    Source: Vision Longformer, arXiv:2103.15358, section 3.2.
    """
    bias = NO_BIAS if bias is None else bias
    call = Call(q, k, v, window, num_global, bias, valid_hw, 1.0, dropout_p, neighbor=neighbor)
    _check(call)
    call = call._replace(scale=q.shape[-1] ** -0.5 if scale is None else scale)
    if q.shape[0] == 0:
        return _no_images(call)
    entry = BACKENDS[choose(Case.of(call), backend)]
    if entry.name in BUILT_IN and is_transformed(q, k, v, *bias):  # an operator's jvp would be zero
        name = "masked" if isinstance(window, Layout) else TRANSFORMABLE
        entry = BACKENDS[choose(Case.of(call), name)]
    with autocast_off(q.device.type):
        call = hide_padding(call)
        if not entry.is_operator:  # operators do this themselves
            call = call.with_offsets()
        return entry.run(call)


def hide_padding(call: Call) -> Call:
    """Return the call with the padding of q, k and v set to zero.

    Masking the attention weights is not enough if the padding contains NaN or infinity: 0 * NaN is
    NaN, also in the backward pass.
    """
    if call.valid_hw is None:
        return call
    real = real_cells(call.valid_hw.to(call.q.device), call.window.grid).flatten(2)[..., None]
    keys = F.pad(real, (0, 0, call.num_global, 0), value=True)
    q, k, v = (x.masked_fill(~m, 0.0) for x, m in ((call.q, real), (call.k, keys), (call.v, keys)))
    return call._replace(q=q, k=k, v=v)


def _no_images(call: Call) -> Tensor:
    """Return the empty output for a batch of size 0.

    It depends on all inputs, so that their gradients are 0 instead of None.
    """
    tensors = (call.k, call.v, *(x for x in call.bias if x is not None))
    return call.q + sum(x.sum() for x in tensors) * 0


def _check(call: Call) -> None:
    q, k, v, window, num_global, bias, valid_hw, _, dropout_p, *_ = call
    if q.ndim != 4 or 0 in (q.shape[1], q.shape[3]):
        raise ValueError(
            "q must be (B, N, L, D) with at least one head and one channel, "
            f"got shape {tuple(q.shape)}"
        )
    batch, heads, length, dim = q.shape
    if num_global < 0 or not 0 <= dropout_p <= 1:
        raise ValueError(
            "num_global must be at least 0, and dropout_p must be from 0 to 1, "
            f"got num_global {num_global} and dropout_p {dropout_p}"
        )
    if length != window.length:
        raise ValueError(
            f"q has {length} tokens, but the window's grid {window.grid} has {window.length} tokens"
        )
    if isinstance(window, Layout) and window.heads not in (1, heads):
        raise ValueError(
            f"q has {heads} heads, but the pattern {window.pattern} has {window.heads} heads"
        )
    keys = (batch, heads, num_global + length, dim)
    if k.shape != keys or v.shape != keys:
        raise ValueError(
            f"k and v must have shape {keys} for {num_global} global tokens, "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    others = {"k": k, "v": v, "bias.table": bias.table, "bias.to_global": bias.to_global}
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {q.device}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(
            f"q, k, v must have one floating-point dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if valid_hw is not None and valid_hw.shape != (batch, 2):
        raise ValueError(
            f"valid_hw must have shape (batch, 2) = {(batch, 2)}, got {tuple(valid_hw.shape)}"
        )
    for name, part, shape in (
        ("table", bias.table, (heads, window.table_entries)),
        ("to_global", bias.to_global, (heads, num_global)),
    ):
        if part is not None and part.shape != shape:
            where = ""
            if part is bias.table and isinstance(window, Layout):
                where = f" for displacements up to {window.table_reach} of {window.pattern}"
            raise ValueError(f"bias.{name} must have shape {shape}{where}, got {tuple(part.shape)}")
