"""Fused local attention in Triton: one forward and a few backward kernels, no copies of q, k or v.

This file has the limits of the backend, and the forward and backward passes. Windows and layouts
of patterns use the same kernels. A window finds a query's keys in a few rectangles of tokens. A
layout finds them in lists of chunks (lists.py, layouts.py).

Memory of the backward pass, besides the gradients:

- delta, the sum of out * dout over the channels: 4 bytes per query and head.
- Partial sums of the gradient of a bias table. For a window, each takes up to 4 * 64 * 9 * w**2
  bytes per head. More than one is used only if all of them together take at most 1/TILE_SHARE of
  the bytes of q, k, v, out and their gradients.

Memory of a layout: up to 28 bytes per pair of chunks for the lists, and 16 * W * ceil(W / 64) bytes
per mask.

Shapes: B batch, N heads, X Y grid, L = X*Y tokens, G global tokens, D head dim, w chunk side, W =
w*w tokens of a chunk.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.backends import blocked
from vil.ops.backends.triton.bias_gradients import global_gradients, table_gradient
from vil.ops.backends.triton.launch import Launcher, Tokens, interpreted
from vil.ops.call import Call, Gradients

HEAD_DIMS = (16, 128)
WINDOWS = (2, 32)
MAX_GLOBAL = 64
MIN_CAPABILITY = (8, 0)  # the first with bfloat16 and asynchronous copies
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unsupported(case: Case) -> list[str]:
    """Return the reasons why this backend does not support the call that `case` describes.

    Returns an empty list if the backend supports the call.
    """
    has_gpu = case.device == "cuda" and torch.cuda.is_available()
    too_old = has_gpu and torch.cuda.get_device_capability() < MIN_CAPABILITY
    channels_fit = HEAD_DIMS[0] <= case.head_dim <= HEAD_DIMS[1]
    window_fits, size = WINDOWS[0] <= case.window.size <= WINDOWS[1], case.window.size
    word = "chunk size" if case.is_layout else "window size"
    checks = {
        "triton is not installed": find_spec("triton") is None,
        f"it needs a CUDA device, not {case.device}": case.device != "cuda" and not interpreted(),
        "it needs a GPU of compute capability {}.{} or newer".format(*MIN_CAPABILITY): too_old,
        f"it computes in 16 or 32 bits, not in {str(case.dtype)[6:]}": case.dtype not in DTYPES,
        "heads must have {} to {} channels, not {}".format(
            *HEAD_DIMS, case.head_dim
        ): not channels_fit,
        "the {} must be {} to {}, not {}".format(word, *WINDOWS, size): not window_fits,
        f"{case.num_global} global tokens are more than {MAX_GLOBAL}": case.num_global > MAX_GLOBAL,
    }
    # recomputing the scores of chunks has the limits of the blocked backend
    return [text for text, applies in checks.items() if applies] + blocked.unsupported(case)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute the output (B, N, L, D) and the log-sum-exp (B, N, L) of each query's scores."""
    q, launcher = call.q, Launcher(call)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    with torch.cuda.device_of(q):
        launcher.by_chunk(
            "forward", "queries", *map(Tokens.of, (q, call.k, call.v, out)), lse,
            launcher.table, launcher.to_global, launcher.valid_hw, K_GLOBAL=launcher.global_block,
        )  # fmt: skip
    return out, lse


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    """Compute the gradients of q, k, v and the biases.

    out, lse: the output and log-sum-exp that `forward` returned. dout: the gradient of the output.
    """
    launcher, (table, to_global) = Launcher(call), call.bias
    dq, dk, dv = (torch.empty_like(x) for x in call[:3])
    lse, delta = lse.contiguous(), torch.empty_like(lse, memory_format=torch.contiguous_format)
    inputs, grads = [Tokens.of(x) for x in call[:3]], Tokens.of(dout)
    with torch.cuda.device_of(dq):
        launcher.by_chunk(
            "query", "queries", *inputs, Tokens.of(out), grads, Tokens.of(dq), lse, delta,
            launcher.table, launcher.to_global, launcher.valid_hw, K_GLOBAL=launcher.global_block,
        )  # fmt: skip
        launcher.by_chunk(
            "key", "keys", *inputs, grads, Tokens.of(dk), Tokens.of(dv), lse, delta,
            launcher.table, launcher.valid_hw,
        )  # fmt: skip
        rest = (*inputs, grads, lse, delta)
        dto_global = global_gradients(launcher, rest, dk, dv) if call.num_global else None
        dtable = None if table is None else table_gradient(launcher, rest).to(table.dtype)
    if to_global is not None:  # without global tokens it has no elements
        dto_global = (
            torch.empty_like(to_global) if dto_global is None else dto_global.to(to_global.dtype)
        )
    return dq, dk, dv, dtable, dto_global
