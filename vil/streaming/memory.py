"""Count the bytes of tensors that a block needs to compute a strip, using fake tensors.

A strip is a range of complete rows of the token grid, see `vil.streaming.local_rows`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vil.layers.attention.longformer import LongformerAttention
from vil.layers.block import Block
from vil.ops import Case, Window
from vil.ops.backends import BACKENDS, blocked
from vil.ops.call import Call
from vil.ops.dispatch import choose
from vil.streaming.global_rows import GlobalRows
from vil.streaming.local_rows import compute_strip
from vil.streaming.tokens import sizes_only
from vil.utils.memory import TensorMemory
from vil.utils.precision import autocast_off


class StripMemory(TensorMemory):
    """A counter of the bytes of fake tensors.

    Fake tensors have no values. Code that reads a value, for example with `item()`, gets 0 or
    False. A backend that checks whether all keys are valid thus runs its code for padded keys.
    """

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        return super().__torch_dispatch__(operator, types, args, kwargs)


@contextmanager
def count_bytes() -> Iterator[TensorMemory]:
    """Count the bytes of fake tensors inside a `with` block. Yields the counter.

    Operations inside the block may combine fake tensors with the real weights of a model. Inference
    mode is off inside the block.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # in inference mode, composite operators reach the counter before they are decomposed
    with torch.inference_mode(False), torch.no_grad(), sizes_only(), fake, StripMemory() as memory:
        yield memory


def peak_of(function: Callable[[], object]) -> int:
    """Call a function on fake tensors, and return the peak bytes of tensors during the call."""
    with count_bytes() as memory:
        function()
    return memory.peak


def strip_bytes(
    block: Block,
    rows: tuple[int, int],
    *,
    cols: int,
    dtype: torch.dtype,
    device: torch.device,
    collects: bool,
) -> int:
    """Return the peak bytes of tensors while a block with local attention computes a strip.

    The block's input and the tensors inside the attention operator are not included. rows: (rows of
    the strip and its neighbors together, rows of the strip alone). cols: columns of the grid.
    collects: whether global tokens attend to the strip.
    """
    attn, (n, wanted) = block.attn, rows
    first = (n - wanted) // 2

    def run() -> None:
        x = torch.empty(n, cols, attn.dim, dtype=dtype, device=device)
        x_global = torch.empty(1, attn.num_global, attn.dim, dtype=dtype, device=device)
        collect = GlobalRows(block, x_global) if collects else None
        compute_strip(block, x, x_global, slice(first, first + wanted), collect)

    return peak_of(run) - n * cols * attn.dim * dtype.itemsize


def attention_bytes(
    attn: LongformerAttention, window: Window, dtype: torch.dtype, device: torch.device
) -> int:
    """Return the peak bytes of local attention, including q, k, v and the output. dtype: dtype of
    q, k and v."""

    def tensor(tokens: int, width: int) -> torch.Tensor:
        return torch.empty(1, tokens, width, dtype=dtype, device=device)

    with count_bytes() as memory:
        kv = tensor(attn.num_global + window.length, 2 * attn.dim)
        k, v = attn.split_parts(kv, 2)
        q = attn.split_heads(tensor(window.length, attn.dim))
        bias = attn.bias(window.grid)
        options = {} if bias is None else {"bias": bias}
        call = Call(q, k, v, window, attn.num_global, scale=attn.scale, **options)
        name = choose(Case.of(call), attn.backend)
        memory.peak = memory.now
        with autocast_off(device.type):
            if BACKENDS[name].is_operator:  # not counted inside
                blocked.forward(call, sizes_only=True)
            else:
                BACKENDS[name].run(call)
    return memory.peak
