"""Fused local attention in Triton: one forward and a few backward kernels, no copies of q, k or v.

This file has the limits of the backend, and the forward and backward passes. Windows and layouts of
patterns use the same kernels (kernels.py). They differ in their plan (plan.py), which lists the
tokens that a program reads.

Memory, besides the output and the gradients:

- biases and masks as tiles, T * R * C values of q's size (see plan.py) for each head with biases of
  its own. For a window in 16 bits, that is at most 2 MiB up to w = 8 and about 18 * w**4 bytes
  above. While the backward pass computes dk and dv, there are those of two plans.
- the log-sum-exp, and delta, the sum of out * dout over the channels: 8 bytes per query and head.
- partial sums of the gradient of the biases: 4 * R * C bytes per head. More are used only if all of
  them together take at most 1/SUMS_SHARE of the bytes of q, k, v, out and their gradients.

Shapes: B batch, N heads, L tokens of the grid, G global tokens, D head dim, w chunk side.
"""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.backends import blocked
from vil.ops.backends.triton.gradients import bias_gradients, global_gradients
from vil.ops.backends.triton.launch import Launcher, Tokens, interpreted
from vil.ops.backends.triton.plan import make_plan
from vil.ops.call import Call, Gradients
from vil.ops.custom_op import declare_attention

HEAD_DIMS = (16, 128)
WINDOWS = (2, 32)
MAX_GLOBAL = 64
MIN_CAPABILITY = (8, 0)  # the first with bfloat16 and asynchronous copies
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_TILE_BYTES = 1 << 30  # of the biases and masks of a layout


def unsupported(case: Case) -> list[str]:
    """Return the reasons why this backend does not support the call that `case` describes.

    Returns an empty list if the backend supports the call.
    """
    channels_fit = HEAD_DIMS[0] <= case.head_dim <= HEAD_DIMS[1]
    window_fits, size = WINDOWS[0] <= case.window.size <= WINDOWS[1], case.window.size
    word = "chunk size" if case.is_layout else "window size"
    checks = {
        f"it computes in 16 or 32 bits, not in {str(case.dtype)[6:]}": case.dtype not in DTYPES,
        "heads must have {} to {} channels, not {}".format(
            *HEAD_DIMS, case.head_dim
        ): not channels_fit,
        "the {} must be {} to {}, not {}".format(word, *WINDOWS, size): not window_fits,
        f"{case.num_global} global tokens are more than {MAX_GLOBAL}": case.num_global > MAX_GLOBAL,
    }
    reasons = missing(case.device) + [text for text, applies in checks.items() if applies]
    # recomputing the scores of chunks has the limits of the blocked backend
    return reasons + blocked.unsupported(case) or _too_many_tiles(case)


@torch.compiler.assume_constant_result
def missing(device: str) -> list[str]:
    """Return what this machine lacks to run the kernels on a device type; mostly nothing.

    torch.compile treats the result as a constant and does not trace this function.
    """
    if not _has_triton():
        return ["triton is not installed"]
    if interpreted():
        return []
    if device != "cuda":
        return [f"it needs a CUDA device, not {device}"]
    if torch.cuda.is_initialized():
        capability = _capability(torch.cuda.current_device())
    elif torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    else:
        return []
    if capability < MIN_CAPABILITY:
        return ["it needs a GPU of compute capability {}.{} or newer".format(*MIN_CAPABILITY)]
    return []


# both results are cached, because each call of attention needs them
@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


@lru_cache
def _capability(gpu: int) -> tuple[int, int]:
    """Return the compute capability of a GPU. gpu: its index."""
    return torch.cuda.get_device_capability(gpu)


def _too_many_tiles(case: Case) -> list[str]:
    """Return a reason if the biases and masks of a layout would take too much memory."""
    if not case.is_layout or torch.compiler.is_compiling():  # which cannot trace a plan
        return []
    tiles = make_plan(case.window, case.num_global, case.table_bias).bias_index
    heads = case.heads if case.table_bias or case.global_bias else 1
    size = heads * tiles.numel() * case.dtype.itemsize
    if size <= MAX_TILE_BYTES:
        return []
    return [f"the biases of the pattern take {size >> 20} MiB, above {MAX_TILE_BYTES >> 20} MiB"]


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute the output (B, N, L, D) and the log-sum-exp (B, N, L) of each query's scores."""
    q = call.q
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    with torch.cuda.device_of(q):
        launcher = Launcher(call)
        launcher.by_group("forward", *map(Tokens.of, (q, call.k, call.v, out)), lse)
    return out, lse


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    """Compute the gradients of q, k, v and the biases.

    out, lse: the output and log-sum-exp that `forward` returned. dout: the gradient of the output.
    """
    dq, dk, dv = (torch.empty_like(x) for x in call[:3])
    stats = lse.new_empty(*lse.shape, 2)  # log-sum-exp and delta of each query
    inputs, grads = [Tokens.of(x) for x in call[:3]], Tokens.of(dout)
    tensors = (*inputs, grads, stats.view(torch.int64))
    with torch.cuda.device_of(dq):
        launcher = Launcher(call)
        outs = Tokens.of(out), grads, Tokens.of(dq)
        launcher.by_group("query", *inputs, *outs, lse.contiguous(), stats)
        launcher.by_group("key", *tensors[:4], Tokens.of(dk), Tokens.of(dv), tensors[4])
        if call.num_global:
            global_gradients(launcher, tensors, dk, dv)
        biases = bias_gradients(launcher, tensors)
    return dq, dk, dv, *biases


attend = declare_attention("triton", forward, backward)
