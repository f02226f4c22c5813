"""FlexAttention for windows and layouts: torch's compiled attention with a custom mask and bias.

FlexAttention computes all scores of a block of queries with a block of keys, or none. In a
row-major sequence, the tokens of a 2-D window are scattered over many blocks. So tokens are
reordered chunk by chunk, and each chunk is padded to a block:

    chunks a, b, c, d     row-major order       a a b b | a a b b | c c d d | c c d d
    of 2 x 2 tokens       chunk order           a a a a | b b b b | c c c c | d d d d

The BlockMask, which lists the key blocks of each query block, then has the neighbor chunks of each
chunk, or the key chunks of a layout. Global tokens are the first key blocks.

Compilation takes seconds for each shape. To need fewer shapes, images and heads are merged to one
dimension, the number of chunks is rounded up to a power of two, and most other values that vary are
in tensors of a fixed size. After MAX_SHAPES shapes, `unsupported` rejects further shapes.

`run` uses FlexAttention's own backward pass, which exists only on CUDA. `forward` also returns the
log-sum-exp for the backward pass of another backend (see `vil.ops.custom_op`). torch can compile
the log-sum-exp only on CUDA.

Shapes: B batch, N heads, h = B*N, L tokens, G global tokens, D channels, P tokens of a block (a
padded chunk), M query blocks (chunks, and empty blocks), S first key blocks (of global tokens), T
entries of the bias table.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from vil.ops.attention_case import Case
from vil.ops.backends.flex_blocks import (
    LayoutBlocks,
    WindowBlocks,
    block_size,
    from_blocks,
    has_full,
    make_blocks,
    num_blocks,
    num_first,
    num_tiles,
    score_functions,
    table_reach,
    to_blocks,
    widths,
)
from vil.ops.bias import LocalBias
from vil.ops.call import Call
from vil.ops.layout import Layout
from vil.ops.window import Mask, Window
from vil.utils.machine import has_compiler

try:
    from torch.nn.attention.flex_attention import AuxRequest

    WITH_LSE: dict[str, Any] = {"return_aux": AuxRequest(lse=True)}
except ImportError:  # before torch 2.9
    WITH_LSE = {"return_lse": True}

# "eager" computes all scores, as torch's reference of FlexAttention does: for debugging, and to
# test on CPUs what only CUDA compiles.
COMPILER = "inductor"
MAX_SHAPES = 32  # a model of four stages needs four in training and four in evaluation
MAX_BLOCKS = 2048  # the block lists are square: 16 MiB each
MAX_GRID = 65535  # images times heads are the second dimension of CUDA's launch grid
_shapes: set[str] = set()  # compiled in this process
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, WindowBlocks | LayoutBlocks]


def unsupported(case: Case) -> list[str]:
    """Return the reasons why `forward` does not support the call that `case` describes.

    Returns an empty list if `forward` supports the call.
    """
    reasons = _reasons(case, lse=True)
    if case.device == "cpu" and COMPILER == "inductor":
        reasons.append("torch does not compile the log-sum-exp of FlexAttention on CPUs")
    return reasons


def run_unsupported(case: Case) -> list[str]:
    """Return the reasons why `run` does not support the call that `case` describes.

    Returns an empty list if `run` supports the call.
    """
    reasons = _reasons(case, lse=False)
    if case.needs_grad and case.device == "cpu":
        reasons.append("torch's FlexAttention has no backward pass on CPUs")
    if case.is_layout and torch.compiler.is_dynamo_compiling():
        reasons.append(
            "inside torch.compile it computes windows only; flex+blocked and flex+triton compute "
            "patterns too"
        )
    biased = case.table_bias or case.global_bias
    if case.needs_grad and biased and torch.are_deterministic_algorithms_enabled():
        reasons.append(
            "deterministic algorithms are enabled, but FlexAttention sums the gradient of the "
            "bias in a nondeterministic order"
        )
    return reasons


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute local attention with FlexAttention.

    Returns the output (B, N, L, D) and the log-sum-exp (B, N, L) of each query's scores.
    """
    with torch.no_grad():
        out, lse = _run(call, lse=True)
        # the operator promises the strides too
        # pyrefly: ignore[missing-attribute]  # with lse=True it is not None
        return torch.empty_like(call.q).copy_(out), lse.contiguous()


def run(call: Call) -> Tensor:
    """Compute `vil.ops.local_attention` for a validated `Call`. Returns (B, N, L, D)."""
    assert call.dropout_p == 0, "`unsupported` refuses dropout"
    return _run(call, lse=False)[0]


def forget() -> None:
    """Free all compiled kernels, so that up to MAX_SHAPES new shapes can be compiled."""
    if _shapes:
        torch._dynamo.reset()
    _shapes.clear()


def _reasons(case: Case, lse: bool) -> list[str]:
    """Return the reasons why `forward` (lse True) or `run` (lse False) does not support a `Case`.

    Returns an empty list if the case is supported.
    """
    reasons, window = _missing(case.device, COMPILER), case.window
    if case.dropout:
        reasons.append("FlexAttention does not support dropout")
    if case.symbolic:
        return [*reasons, "the batch or grid size is symbolic, but block lists need fixed sizes"]
    lanes, chunks, most = case.batch * case.heads, math.prod(window.chunks), _most_chunks(window)
    on_gpu, has_room = case.device == "cuda", chunks > most or _has_room(_shape(case, lse))
    few, many = case.head_dim < 16, lanes > MAX_GRID
    checks = {
        "keys repeat in a small cyclic grid, but a block list can have each block only once": (
            window.repeats()
        ),
        "FlexAttention computes in float32, not in float64": case.dtype == torch.float64,
        f"{case.head_dim} channels per head: FlexAttention needs at least 16 on GPUs": on_gpu
        and few,
        f"{lanes} images times heads are more than {MAX_GRID}": on_gpu and many,
        f"{chunks} chunks are more than {most}: block lists would be too large": chunks > most,
        f"the limit of {MAX_SHAPES} compiled shapes is reached: "
        "each shape takes seconds to compile and stays in memory": not has_room,
    }
    return reasons + [text for text, applies in checks.items() if applies]


def _most_chunks(window: Window | Layout) -> int:
    """Return the largest number of chunks for which `flex` supports a grid.

    The size of a block list is the square of this number. If patterns differ by head, each head has
    its own lists, so the number is smaller.
    """
    return math.isqrt(MAX_BLOCKS**2 // (window.heads if isinstance(window, Layout) else 1))


@torch.compiler.assume_constant_result
def _missing(device: str, compiler: str) -> list[str]:
    """Return the reasons why FlexAttention cannot run on this machine, such as a missing compiler.

    device: "cpu" or "cuda". compiler: the backend of torch.compile, such as "inductor".
    """
    reasons = []
    if device not in ("cpu", "cuda"):
        reasons.append(f"device {device} is not supported: FlexAttention needs cpu or cuda")
    if device == "cuda" and not has_compiler(device):
        reasons.append("Triton is not installed: torch compiles FlexAttention for GPUs with Triton")
    if device == "cpu" and compiler == "inductor":
        if not has_compiler(device):
            reasons.append(
                "no C++ compiler (CXX or g++): torch compiles FlexAttention for CPUs with one"
            )
        if not torch.cpu._is_avx2_supported():
            reasons.append("the CPU has no AVX2: torch does not compile FlexAttention for it")
    return reasons


@torch.compiler.assume_constant_result
def _has_room(shape: str) -> bool:
    """Return whether a shape is already compiled, or may be compiled within the limit MAX_SHAPES.

    shape: the string that `_shape` returns.
    """
    return shape in _shapes or len(_shapes) < MAX_SHAPES


def _limits() -> dict[str, int | bool]:
    """Return torch._dynamo settings, with which torch raises an error after too many compilations.

    By default, torch would continue without compilation, and compute all L x L scores. The limit is
    larger than MAX_SHAPES, because torch compiles a shape again if other properties change, such as
    whether an input requires a gradient.
    """
    if hasattr(torch._dynamo.config, "recompile_limit"):
        return {"recompile_limit": 4 * MAX_SHAPES, "fail_on_recompile_limit_hit": True}
    return {"cache_size_limit": 4 * MAX_SHAPES, "fail_on_cache_limit_hit": True}  # torch 2.6


def _shape(case: Case, lse: bool) -> str:
    """Return a string that identifies the compiled kernel for a case.

    It contains each property of the case that is compiled into the kernel. Cases with the same
    string share a kernel. lse: whether the kernel also returns the log-sum-exp.
    """
    window, backward = case.window, case.needs_grad and not lse
    block = block_size(window, case.device, backward)
    first, count = num_first(case.num_global, block), num_blocks(window)
    images, heads = _lanes(case)
    biased = case.table_bias or case.global_bias
    if isinstance(window, Layout):
        kind = f"layout w{window.size} tiles{num_tiles(window)} reach{table_reach(case)}"
    else:
        kind = f"exact{window.mask == Mask.EXACT}"
    return (
        f"{case.device} {case.dtype} B{images} N{heads} D{case.head_dim} "
        f"P{block} M{count} S{first} biased{biased} {kind} full{has_full(window, block)} "
        f"lse{lse} backward{backward}"
    )


def _lanes(case: Case) -> tuple[int, int]:
    """Return the first two dimensions of FlexAttention's q: images and heads.

    They are (B, N) if patterns differ by head. Otherwise they are merged to (B*N, 1).
    """
    own_lists = isinstance(case.window, Layout) and case.window.heads > 1
    return (case.batch, case.heads) if own_lists else (case.batch * case.heads, 1)


def _run(call: Call, lse: bool) -> tuple[Tensor, Tensor | None]:
    """Compute local attention with FlexAttention.

    Returns the output (B, N, L, D), and the log-sum-exp (B, N, L) of each query's scores, or None
    if `lse` is False.
    """
    q, window, num_global, case = call.q, call.window, call.num_global, Case.of(call)
    size, lanes = block_size(window, case.device, case.needs_grad), _lanes(case)
    tokens = (
        to_blocks(q * call.scale, window, size),
        _keys(call.k, window, num_global, size),
        _keys(call.v, window, num_global, size),
    )
    queries, keys, values = (x[:, 0].unflatten(0, lanes) for x in tokens)
    inputs = (
        queries,
        keys,
        values,
        _added(call.bias, widths(case, size), case.batch),
        make_blocks(case, size, call.valid_hw, q.device),
    )
    out, stat = _compute(inputs, lse, case)
    if stat is not None:
        stat = from_blocks(stat[..., None], window, q.shape[:2])[..., 0]
    return from_blocks(out, window, q.shape[:2]), stat


def _compute(inputs: Inputs, lse: bool, case: Case) -> tuple[Tensor, Tensor | None]:
    """Run the compiled `_flex`. Returns (output, log-sum-exp or None).

    inputs: the arguments (q, k, v, added, blocks) of `_flex`. lse: whether to return the
    log-sum-exp.
    """
    if case.device == "cpu":  # where FlexAttention refuses inputs that require gradients
        q, k, v, added, blocks = inputs
        added = None if added is None else added.detach()
        inputs = (q.detach(), k.detach(), v.detach(), added, blocks)
    # not the kernel for short sequences
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    if case.device != "cpu" and not case.needs_grad:
        options |= {"BLOCK_M": 64, "BLOCK_N": 64}  # must divide P; torch may choose 128
    if torch.compiler.is_dynamo_compiling():  # part of a larger program
        return _flex(*inputs, lse, options)
    with torch._dynamo.config.patch(_limits()):
        result = _compiled(COMPILER)(*inputs, lse, options)
    _shapes.add(_shape(case, lse))
    return result


@functools.cache
def _compiled(compiler: str) -> Callable:
    """Wrap `_flex` in `torch.compile`, which compiles and caches a kernel for each shape.

    compiler: the backend of torch.compile, such as "inductor".
    """
    return torch.compile(_flex, backend=compiler, dynamic=False, fullgraph=True)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor | None,
    blocks: WindowBlocks | LayoutBlocks,
    lse: bool,
    options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run FlexAttention on blocks of P tokens. Returns (output, log-sum-exp or None).

    q (h, 1, M*P, D): M blocks of queries. h is images times heads.
    k, v (h, 1, (S+M)*P, D): S blocks of global tokens, followed by M blocks of local tokens.
    If patterns differ by head, q, k and v begin with the dimensions (B, N) instead of (h, 1).
    added (h, S*P + T): the bias of each global key, followed by the bias table of T entries.
    blocks: the window or layout as tensors.
    lse: whether to return the log-sum-exp.
    options: FlexAttention's kernel options.
    The output has the shape of q. The log-sum-exp has the same shape without the dimension D.
    """
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "torch.compile is disabled, so FlexAttention would store all scores: "
            "enable torch.compile, or select an attention backend other than flex"
        )
    first = k.shape[2] - q.shape[2]
    size = q.shape[2] // blocks[0].shape[-2]
    visible, biased = score_functions(blocks, added, size, first, q.shape[1])
    mask = BlockMask((q.shape[2], k.shape[2]), *blocks.lists, (size, size), visible)
    score_mod, aux = None if added is None else biased, WITH_LSE if lse else {}
    result: Any = flex_attention(q, k, v, score_mod, mask, scale=1.0, kernel_options=options, **aux)
    if not lse:
        return result, None
    out, stat = result
    return out, stat if isinstance(stat, Tensor) else stat.lse


def _keys(x: Tensor, window: Window | Layout, num_global: int, size: int) -> Tensor:
    """Reorder keys or values (B, N, G+L, D) to blocks of P = `size` tokens, (B*N, 1, (S+M)*P, D).

    S zero-padded blocks of global tokens come first, then M blocks of local tokens.
    """
    first = x[:, :, :num_global].flatten(0, 1)[:, None]
    first = F.pad(first, (0, 0, 0, num_first(num_global, size) * size - num_global))
    return torch.cat([first, to_blocks(x[:, :, num_global:], window, size)], dim=2)


def _added(bias: LocalBias, sizes: tuple[int, int], images: int) -> Tensor | None:
    """Return the bias to global keys and the bias table as one tensor, or None without bias.

    The tensor has a row for each image and head: the bias to each global key, followed by the
    head's table. Both parts are zero-padded to the lengths `sizes`. images: the number of images.
    """
    table, to_global = bias
    if table is None and to_global is None:
        return None
    heads = len(table if table is not None else to_global)
    like = dict(dtype=torch.float32, device=(table if table is not None else to_global).device)
    parts = [
        torch.zeros(heads, width, **like)
        if part is None
        else F.pad(part.float(), (0, width - part.shape[1]))
        for part, width in zip((to_global, table), sizes)
    ]
    # a copy per image, so that the kernel does not sum gradients over images
    return torch.cat(parts, dim=1).repeat(images, 1)
