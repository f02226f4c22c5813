"""How many bytes of tensors a strip of a block needs, counted on tensors without values.

Shapes: n rows of a strip with its neighbors, Y columns, C channels, G global tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vil.layers.attention.longformer import LongformerAttention
from vil.layers.block import Block
from vil.ops import Case, Window
from vil.ops.backends import BACKENDS, FORWARDS, blocked
from vil.ops.call import Call
from vil.ops.dispatch import choose
from vil.ops.small_grid import shrink_call
from vil.streaming.global_rows import GlobalRows
from vil.streaming.local_rows import compute_strip
from vil.streaming.tokens import sizes_only
from vil.utils.memory import TensorMemory
from vil.utils.precision import autocast_off


class StripMemory(TensorMemory):
    """Counter of bytes. A value that is read from a tensor without values is 0, or False: a
    backend that checks whether all keys are real then takes the path for those that are not."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 0
        return super().__torch_dispatch__(operator, types, args, kwargs)


@contextmanager
def count_bytes() -> Iterator[TensorMemory]:
    """Run a block on tensors without values, next to real weights; see `vil.utils.memory`.

    Inference mode is off inside: under it, composite operators reach the counter undivided.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.inference_mode(False), torch.no_grad(), sizes_only(), fake, StripMemory() as memory:
        yield memory


def peak_of(function: Callable[[], object]) -> int:
    """Return the most bytes of tensors that a function holds at once."""
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
    """Return the most bytes that a strip of local attention holds, beyond its input, but for what
    is inside of attention.

    rows: (rows with the neighbors, rows of queries). cols: Y. dtype: of the tokens. collects:
    whether global tokens attend to the strip.
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
    """Return the most bytes that local attention holds, with q, k, v and its output."""

    def tensor(tokens: int, width: int) -> torch.Tensor:
        return torch.empty(1, tokens, width, dtype=dtype, device=device)

    with count_bytes() as memory:
        kv = tensor(attn.num_global + window.length, 2 * attn.dim)
        k, v = attn.split_parts(kv, 2)
        q = attn.split_heads(tensor(window.length, attn.dim))
        bias = attn.bias(window.grid)
        options = {} if bias is None else {"bias": bias}
        call = shrink_call(Call(q, k, v, window, attn.num_global, scale=attn.scale, **options))
        name = choose(Case.of(call), attn.backend)
        memory.peak = memory.now
        with autocast_off(device.type):
            if name.partition("+")[0] in FORWARDS:  # an operator, whose inside is not counted
                blocked.forward(call, sizes_only=True)
            else:
                BACKENDS[name].run(call)
    return memory.peak
