"""Local 2-D attention, the operation this package exists for.

Letters: B images, N heads, D channels of a head, X Y grid, L = X*Y local tokens, G global
tokens, w window.
"""

from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.bias import NO_BIAS, LocalBias
from vil.ops.dispatch import BACKENDS, choose
from vil.ops.window import Window
from vil.utils.precision import autocast_off


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    num_global: int = 0,
    bias: LocalBias | None = None,
    valid: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Attention of each local token to the global tokens and to its window, under one softmax.

    q (B, N, L, D): local queries, row-major over the grid.
    k, v (B, N, G+L, D): global tokens first.
    bias.table (N, (4w-1)**2): added by relative position.
    bias.to_global (N, G): added towards global tokens.
    valid (B, 2): real rows and columns of each image; the tokens beyond are never seen.
    scale: of the scores, D**-0.5 by default.
    backend: "auto" or a name of `vil.ops.dispatch.BACKENDS`; never changes the meaning, which
    definition.py spells out.

    Returns (B, N, L, D). A query that sees nothing (padding, without global tokens) gives 0.
    Statistics are in fp32 (fp64 for fp64 inputs). Autocast does not change the computation: it runs
    in q's type, which the result has too.
    Raises ValueError for shapes, types or settings that do not fit, and for a backend that cannot
    run the case.
    Source: Vision Longformer, arXiv:2103.15358, section 3.2.
    """
    bias = NO_BIAS if bias is None else bias
    _check(q, k, v, window, num_global, bias, valid, dropout_p)
    name = choose(Case.of(q, window, num_global, bias, valid, dropout_p), backend)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with autocast_off(q.device.type):
        return BACKENDS[name].attend(
            q,
            k,
            v,
            window,
            num_global=num_global,
            bias=bias,
            valid=valid,
            scale=scale,
            dropout_p=dropout_p,
        )


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    num_global: int,
    bias: LocalBias,
    valid: Tensor | None,
    dropout_p: float,
) -> None:
    batch, heads, length, dim = q.shape
    if num_global < 0 or not 0 <= dropout_p <= 1:
        raise ValueError(f"num_global {num_global} and dropout_p {dropout_p} are out of range")
    if length != window.length:
        raise ValueError(f"q has {length} tokens, the grid {window.grid} has {window.length}")
    keys = (batch, heads, num_global + length, dim)
    if k.shape != keys or v.shape != keys:
        raise ValueError(
            f"k and v must be {keys} for {num_global} global tokens, "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(
            f"q, k, v must have one floating-point type, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if valid is not None and valid.shape != (batch, 2):
        raise ValueError(f"valid must be (batch, 2) = {(batch, 2)}, got {tuple(valid.shape)}")
    for part, shape in (
        (bias.table, (heads, (4 * window.size - 1) ** 2)),
        (bias.to_global, (heads, num_global)),
    ):
        if part is not None and part.shape != shape:
            raise ValueError(f"the bias must have shape {shape}, got {tuple(part.shape)}")
