"""Local attention in C++, for CPUs. It computes few scores at a time, which fit into the cache.

The library of vil/ops/native is loaded at first use. It is compiled then if the package has none
that fits.

Unlike the backend `blocked`, it packs keys only once, applies the bias, the mask and the softmax in
one pass, and has no intermediate tensor of the size of the grid.

Shapes: B batch, N heads, L tokens of the grid, G global tokens, D channels.
"""

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vil.ops.attention_case import Case
from vil.ops.backends import blocked
from vil.ops.call import Call, Gradients
from vil.ops.custom_op import declare_attention
from vil.ops.layout import Layout
from vil.ops.native import library
from vil.ops.window import Mask, Window
from vil.utils.transforms import untraced

prepare = library.prepare


def unsupported(case: Case) -> list[str]:
    """Return the reasons why this backend does not support the call that `case` describes.

    Returns an empty list if the backend supports the call.
    """
    # recomputing the scores of chunks has the limits of the blocked backend
    return library.unsupported(case.device, case.dtype) + blocked.unsupported(case)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute the output (B, N, L, D) and the log-sum-exp (B, N, L) of each query's scores."""
    out = torch.empty_like(call.q)
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    target = _with_adjacent_channels(out)
    run(call, False, {"out": target}, {"lse": lse})
    return out if target is out else out.copy_(target), lse


def backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    """Compute the gradients of q, k, v and the biases. dout: the gradient of the output.

    `out` and `lse` (log-sum-exp of the scores) are not used. The attention weights are recomputed
    with a softmax, which is more accurate than exp(scores - lse).
    """
    padded = call.valid_hw is not None  # the gradients of padding are not written
    grads = [torch.zeros_like(x) if padded else torch.empty_like(x) for x in call[:3]]
    targets = [_with_adjacent_channels(grad) for grad in grads]
    biases = [None if x is None else x.new_zeros(x.shape, dtype=torch.float32) for x in call.bias]
    tensors = dict(zip(("dq", "dk", "dv"), targets), dout=_with_adjacent_channels(dout))
    run(call, True, tensors, dict(zip(("dtable", "dto_global"), biases)))
    grads = [x if target is x else x.copy_(target) for x, target in zip(grads, targets)]
    biases = [  # with the strides of the parameters
        None if x is None or like is None else torch.empty_like(like).copy_(x)
        for x, like in zip(biases, call.bias)
    ]
    return *grads, *biases


def _with_adjacent_channels(x: Tensor) -> Tensor:
    """Return x if its last dimension has stride 1, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


class _Tokens(ctypes.Structure):
    """A tensor (B, N, L, D) as a C structure: its address, and the strides of B, N and L."""

    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3)]


class AttentionCall(ctypes.Structure):
    """The C structure `Call` of window.h, the arguments of the C++ forward and backward pass."""

    _fields_ = [
        *((name, _Tokens) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("table", "to_global", "lse", "dtable")),
        *((name, ctypes.c_void_p) for name in ("dto_global", "valid_hw")),
        *((name, ctypes.c_int64) for name in ("images", "heads", "rows", "cols", "num_global")),
        *((name, ctypes.c_int64) for name in ("dim", "size", "exact", "cyclic", "num_offsets")),
        ("offsets", ctypes.c_int64 * 18),
        *((name, ctypes.c_int64) for name in ("bfloat16", "threads")),
        *((name, ctypes.c_int64 * 2) for name in ("reach", "span")),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("first", "keys", "key_masks", "masks")),
        *((name, ctypes.c_int64) for name in ("layout_heads", "mask_bytes")),
        *((name, _Tokens) for name in ("q_global", "out_global", "dout_global", "dq_global")),
        *((name, ctypes.c_void_p) for name in ("from_globals", "dfrom_globals")),
    ]


def run(
    call: Call, is_backward: bool, tokens: dict[str, Tensor], others: Mapping[str, Tensor | None]
) -> None:
    """Run the forward or backward pass of the native library, which writes to the result tensors.

    `tokens` and `others` map fields of `AttentionCall` to inputs and results of the pass. They do
    not contain the fields that are read from `call`: q, k, v and the bias.
    tokens: tensors (images, heads, tokens, channels), such as `out`.
    others: contiguous float32 tensors of other shapes, such as `lse`, or None.
    """
    q, window = call.q, call.window
    keys, lists = key_fields(window)
    tokens = {
        **{name: _with_adjacent_channels(x) for name, x in zip("qkv", call[:3])},
        **tokens,
    }
    biases = library.as_float32(**call.bias._asdict())
    valid_hw = None if call.valid_hw is None else call.valid_hw.to("cpu", torch.int64).contiguous()
    # keep references to the copies until the pass ends
    others = {**others, **biases, **lists, "valid_hw": valid_hw}
    numbers = AttentionCall(
        images=q.shape[0], heads=q.shape[1], rows=window.grid[0], cols=window.grid[1],
        num_global=call.num_global, dim=q.shape[3], size=window.size,
        bfloat16=q.dtype == torch.bfloat16, threads=torch.get_num_threads(), scale=call.scale,
        **keys,
        **{name: _Tokens(x.data_ptr(), x.stride()[:3]) for name, x in tokens.items()},
        **{name: None if x is None else x.data_ptr() for name, x in others.items()},
    )  # fmt: skip
    library.call("vil_attention", numbers, is_backward)


def key_fields(window: Window | Layout) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return two dicts of the fields of `AttentionCall` that say which keys each query attends to:
    numbers and tensors."""
    return _layout_keys(window) if isinstance(window, Layout) else _window_keys(window)


def _window_keys(window: Window) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return `key_fields` of a window. The second dict is empty."""
    reach = (2 * window.size - 1,) * 2
    return dict(
        exact=window.mask == Mask.EXACT, cyclic=window.cyclic, num_offsets=len(window.offsets),
        offsets=tuple(step for offset in window.offsets for step in offset),
        reach=reach, span=reach,
    ), {}  # fmt: skip


@lru_cache(maxsize=64)
@untraced
def _layout_keys(layout: Layout) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return `key_fields` of a layout.

    The number num_offsets is the largest number of key chunks of a query chunk. The tensor masks
    has a bit for each pair of a query and a key.
    """
    lists, num_chunks = layout.lists, layout.chunks[0] * layout.chunks[1]
    counts = (lists.head * num_chunks + lists.query).bincount(minlength=layout.heads * num_chunks)
    steps, _ = layout.steps()
    largest = steps.abs().amax(0) if len(steps) else torch.zeros(2, dtype=torch.int64)
    bits = np.packbits(lists.masks.flatten(2).numpy(), axis=2, bitorder="little")
    # four unused bytes follow, because the library reads four bytes at a time
    masks = torch.from_numpy(np.pad(bits, ((0, 0), (0, 0), (0, 4))))
    tensors = dict(
        first=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        keys=lists.key.contiguous(),
        key_masks=lists.mask.contiguous(),
        masks=masks,
    )
    return dict(
        num_offsets=int(counts.max()), reach=layout.table_reach,
        span=tuple((largest * layout.size + layout.size - 1).tolist()),
        layout_heads=layout.heads, mask_bytes=masks.shape[2],
    ), tensors  # fmt: skip


attend = declare_attention("native", forward, backward)
