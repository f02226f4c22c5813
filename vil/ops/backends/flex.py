"""FlexAttention for local windows: torch's compiled attention with a custom mask and bias.

FlexAttention divides the sequences of queries and keys into blocks. A list (the BlockMask) has the
key blocks of each query block, and functions that mask and change single scores are compiled into
FlexAttention's kernel. A 2-D window is scattered over a row-major sequence: most blocks would have
a few visible keys among many hidden ones, all of which are computed. So tokens are reordered chunk
by chunk, and each chunk is padded to a block:

    chunks a, b, c, d     row-major order       a a b b | a a b b | c c d d | c c d d
    of 2 x 2 tokens       chunk order           a a a a | b b b b | c c c c | d d d d

The list is then the list of neighbor chunks, every computed block is dense, and every length is a
multiple of the block, as FlexAttention requires. Global tokens are the first key blocks.

Compiling takes seconds per shape, and above a number of shapes torch computes all scores (L x L)
with only a warning. So shapes are rounded: images and heads are one dimension, the number of chunks
is rounded up to a power of two, everything else that varies is in tensors of a fixed size. Above
MAX_SHAPES, `unsupported` refuses further shapes; torch raises an error if it gets them anyway.

`run` uses FlexAttention's own backward pass, on CUDA only. `forward` returns the log-sum-exp for
a backward pass of `vil.ops.custom_op`; on CPUs, torch cannot compile `forward`.

Shapes: B batch, N heads, h = B*N, L tokens, G global tokens, D channels, W = w*w tokens of a chunk,
P tokens of a block (a padded chunk), M query blocks (chunks, and empty ones), S first key blocks
(of global tokens), T entries of the bias table.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from vil.ops.attention_case import Case, next_power_of_2
from vil.ops.backends.chunk_layout import from_chunks, to_chunks
from vil.ops.bias import LocalBias
from vil.ops.call import Call
from vil.ops.window import Mask, Window, real_cells
from vil.utils.machine import has_compiler

try:
    from torch.nn.attention.flex_attention import AuxRequest

    WITH_LSE = {"return_aux": AuxRequest(lse=True)}
except ImportError:  # before torch 2.9
    WITH_LSE = {"return_lse": True}

# "eager" computes all scores, as torch's reference of FlexAttention does: for debugging, and to
# test on CPUs what only CUDA compiles.
COMPILER = "inductor"
MAX_SHAPES = 32  # a model of four stages needs four in training and four in evaluation
FEWEST_BLOCKS = 16  # below it, empty blocks cost less than another compilation
MAX_BLOCKS = 2048  # the block lists are square: 16 MiB each
MAX_GRID = 65535  # images times heads are the second dimension of CUDA's launch grid
_shapes: set[str] = set()  # compiled in this process


class Blocks(NamedTuple):
    """The window in FlexAttention's terms.

    The tensor `added` has the bias of each global key, followed by the bias table. The bias of a
    query and a local key is at index base + (code of the query) - (code of the key).

    base (M, S+M) int32: the base index of each pair of a query block and a key block; -1 if their
    chunks are not neighbors. code (P) int32: a number for each position in a chunk.
    near (S*P + T) bool: whether an entry of `added` is in the exact window; None for other
    masks. real (h, (S+M)*P) bool: whether a key is not padding. lists: four pairs of tensors
    (number of blocks, their indices). The first two pairs have the key blocks that each query block
    sees partly, and fully. The other two have the query blocks of each key block, for the backward
    pass. Tensors that are not needed are None.
    """

    base: Tensor
    code: Tensor
    near: Tensor | None
    real: Tensor
    lists: tuple[Tensor | None, ...]


def unsupported(case: Case) -> list[str]:
    """Return the reasons why `forward` does not support a case."""
    reasons = _reasons(case, lse=True)
    if case.device == "cpu" and COMPILER == "inductor":
        reasons.append("torch does not compile the log-sum-exp of FlexAttention on CPUs")
    return reasons


def run_unsupported(case: Case) -> list[str]:
    """Return the reasons why `run` does not support a case."""
    reasons = _reasons(case, lse=False)
    if case.needs_grad and case.device == "cpu":
        reasons.append("FlexAttention has no backward pass on CPUs")
    biased = case.table_bias or case.global_bias
    if case.needs_grad and biased and torch.are_deterministic_algorithms_enabled():
        reasons.append("deterministic algorithms: it sums the gradient of the bias in any order")
    return reasons


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute the output and the log-sum-exp, see `vil.ops.custom_op`."""
    with torch.no_grad():
        out, lse = _run(call, lse=True)
        # the operator promises the strides too
        return torch.empty_like(call.q).copy_(out), lse.contiguous()


def run(call: Call) -> Tensor:
    """Compute `vil.ops.local_attention` for a checked call."""
    assert call.dropout_p == 0, "`unsupported` refuses dropout"
    return _run(call, lse=False)[0]


def forget() -> None:
    """Free all compiled kernels. MAX_SHAPES other shapes can then be compiled."""
    if _shapes:
        torch._dynamo.reset()
    _shapes.clear()


def _reasons(case: Case, lse: bool) -> list[str]:
    """Return the reasons why a case is not supported by `forward` (if `lse`) or by `run`."""
    reasons, window = _missing(case.device, COMPILER), case.window
    if case.dropout:
        reasons.append("dropout: FlexAttention has none")
    if case.symbolic:
        return [*reasons, "the batch or the grid is open: their blocks are listed in advance"]
    lanes, chunks = case.batch * case.heads, math.prod(window.chunks)
    on_gpu, has_room = case.device == "cuda", _has_room(_shape(case, lse))
    few, many = case.head_dim < 16, lanes > MAX_GRID
    checks = {
        "keys repeat: a list has every key block once": window.repeats(),
        "float64: FlexAttention computes in float32": case.dtype == torch.float64,
        f"{case.head_dim} channels per head: on GPUs FlexAttention needs 16": on_gpu and few,
        f"{lanes} images times heads: more than {MAX_GRID}": on_gpu and many,
        f"{chunks} chunks are more than {MAX_BLOCKS}: "
        "the lists of blocks grow with the square": chunks > MAX_BLOCKS,
        f"{MAX_SHAPES} shapes are compiled and this is another: "
        "each takes seconds to compile and stays in memory": not has_room,
    }
    return reasons + [text for text, applies in checks.items() if applies]


@torch.compiler.assume_constant_result
def _missing(device: str, compiler: str) -> list[str]:
    """Return the requirements that this machine does not meet."""
    reasons = []
    if device not in ("cpu", "cuda"):
        reasons.append(f"device {device}: FlexAttention is compiled for cpu and cuda")
    if device == "cuda" and not has_compiler(device):
        reasons.append("no Triton: torch compiles FlexAttention for GPUs with it")
    if device == "cpu" and compiler == "inductor":
        if not has_compiler(device):
            reasons.append("no C++ compiler (CXX or g++): torch needs one on CPUs")
        if not torch.cpu._is_avx2_supported():
            reasons.append("the CPU has no AVX2: torch does not compile FlexAttention for it")
    return reasons


@torch.compiler.assume_constant_result
def _has_room(shape: str) -> bool:
    """Return whether a shape is already compiled, or whether one more may be compiled."""
    return shape in _shapes or len(_shapes) < MAX_SHAPES


def _limits() -> dict[str, int | bool]:
    """Return torch settings under which torch raises an error instead of computing all L x L
    scores.

    They allow more than MAX_SHAPES compilations, because torch also recompiles for other
    properties, such as whether an input requires a gradient.
    """
    if hasattr(torch._dynamo.config, "recompile_limit"):
        return {"recompile_limit": 4 * MAX_SHAPES, "fail_on_recompile_limit_hit": True}
    return {"cache_size_limit": 4 * MAX_SHAPES, "fail_on_cache_limit_hit": True}  # torch 2.6


def _shape(case: Case, lse: bool) -> str:
    """Return a key with everything in a case that makes torch recompile."""
    window, backward = case.window, case.needs_grad and not lse
    block = _block_size(window, case.device, backward)
    first, count = _num_first(case.num_global, block), _num_blocks(window)
    biased, exact = case.table_bias or case.global_bias, window.mask == Mask.EXACT
    return (
        f"{case.device} {case.dtype} h{case.batch * case.heads} D{case.head_dim} "
        f"P{block} M{count} S{first} biased{biased} exact{exact} full{_has_full(window, block)} "
        f"lse{lse} backward{backward}"
    )


def _block_size(window: Window, device: str, backward: bool) -> int:
    """Return P: the tokens of a chunk, rounded up to the block size of the kernels."""
    step = 16 if device == "cpu" else 128 if backward else 64
    return math.ceil(window.tile / step) * step


def _num_blocks(window: Window) -> int:
    """Return M, the number of chunks rounded up to a power of two. The kernels skip empty
    blocks."""
    return max(FEWEST_BLOCKS, next_power_of_2(math.prod(window.chunks)))


def _num_first(num_global: int, block: int) -> int:
    """Return S, the number of blocks for global tokens. It is at least 1, so that G = 0 needs no
    compilation of its own."""
    return max(1, math.ceil(num_global / block))


def _has_full(window: Window, block: int) -> bool:
    """Return whether some pairs of blocks are fully visible, so that they need no mask."""
    return window.tile == block and window.mask != Mask.EXACT


def _run(call: Call, lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return out (B, N, L, D) and lse (B, N, L) or None, with gradients if enabled."""
    q, window, num_global, case = call.q, call.window, call.num_global, Case.of(call)
    size = _block_size(window, case.device, case.needs_grad)
    inputs = (
        _to_blocks(q * call.scale, window, size),
        _keys(call.k, window, num_global, size),
        _keys(call.v, window, num_global, size),
        _added(call.bias, num_global, size, case.batch),
        _plan(case, size, call.valid_hw, q.device),
    )
    out, stat = _compute(inputs, lse, case)
    if lse:
        stat = _from_blocks(stat[..., None], window, q.shape[:2])[..., 0]
    return _from_blocks(out, window, q.shape[:2]), stat


def _compute(inputs: tuple, lse: bool, case: Case) -> tuple[Tensor, Tensor | None]:
    """Run the compiled `_flex`."""
    if case.device == "cpu":  # where FlexAttention refuses inputs that require gradients
        inputs = (*(None if x is None else x.detach() for x in inputs[:4]), inputs[4])
    options = {"FORCE_USE_FLEX_ATTENTION": True}  # not the kernel for short sequences
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
    """Compile `_flex`, once for all shapes. torch caches the kernels of each shape."""
    return torch.compile(_flex, backend=compiler, dynamic=False, fullgraph=True)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, plan: Blocks, lse: bool, options: dict
) -> tuple[Tensor, Tensor | None]:
    """Attend from q (h, 1, M*P, D) to k, v (h, 1, (S+M)*P, D) with biases added (h, S*P + T).
    Return the output, in the shape of q, and the log-sum-exp (h, 1, M*P) or None."""
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError("torch.compile is disabled: FlexAttention would store all scores")
    size = len(plan.code)
    first = k.shape[2] - q.shape[2]

    def bias_index(query: Tensor, key: Tensor) -> Tensor:
        """Return the index into `added` of a query and a key; any valid index for a hidden key."""
        start = plan.base[query // size, key // size]
        local = start + plan.code[query % size] - plan.code[key % size]
        return torch.where(key < first, key, local.clamp(min=0))

    def visible(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shown = plan.real[b, key] & (plan.base[query // size, key // size] >= 0)
        return shown if plan.near is None else shown & plan.near[bias_index(query, key)]

    def biased(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + added[b, bias_index(query, key)]

    mask = BlockMask((q.shape[2], k.shape[2]), *plan.lists, (size, size), visible)
    score_mod, aux = None if added is None else biased, WITH_LSE if lse else {}
    result = flex_attention(q, k, v, score_mod, mask, scale=1.0, kernel_options=options, **aux)
    if not lse:
        return result, None
    out, stat = result
    return out, stat if isinstance(stat, Tensor) else stat.lse


def _to_blocks(x: Tensor, window: Window, size: int) -> Tensor:
    """Reorder (B, N, L, ..) to (h, 1, M*P, ..) in chunk order, zero-padded."""
    x = to_chunks(x, window).flatten(2, 3).flatten(0, 1)  # (h, chunks, W, ..)
    x = F.pad(x, (0, 0, 0, size - window.tile, 0, _num_blocks(window) - x.shape[1]))
    return x.flatten(1, 2)[:, None]


def _from_blocks(x: Tensor, window: Window, lead: torch.Size) -> Tensor:
    """Reorder (h, 1, M*P, ..) to (B, N, L, ..)."""
    x = x.unflatten(2, (_num_blocks(window), -1))[:, 0, : math.prod(window.chunks), : window.tile]
    return from_chunks(x.unflatten(1, window.chunks).unflatten(0, lead), window)


def _keys(x: Tensor, window: Window, num_global: int, size: int) -> Tensor:
    """Reorder (B, N, G+L, D) to (h, 1, (S+M)*P, D)."""
    first = x[:, :, :num_global].flatten(0, 1)[:, None]
    first = F.pad(first, (0, 0, 0, _num_first(num_global, size) * size - num_global))
    return torch.cat([first, _to_blocks(x[:, :, num_global:], window, size)], dim=2)


def _added(bias: LocalBias, num_global: int, size: int, images: int) -> Tensor | None:
    """Return (h, S*P + T): the bias of each global key, then the table; None without a bias.

    There is a copy per image, so that the kernel does not sum gradients over images.
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
        for part, width in zip((to_global, table), _widths(num_global, size))
    ]
    return torch.cat(parts, dim=1).repeat(images, 1)


def _widths(num_global: int, size: int) -> tuple[int, int]:
    """Return (S*P, T), with T for the largest window whose chunks fit into a block."""
    return _num_first(num_global, size) * size, (4 * math.isqrt(size) - 1) ** 2


def _plan(case: Case, size: int, valid_hw: Tensor | None, device: torch.device) -> Blocks:
    """Build the `Blocks` of a call. It takes a few small operations, so nothing is cached per
    grid."""
    window, (first, width) = case.window, _widths(case.num_global, size)
    side, inside = 4 * window.size - 1, torch.arange(window.size, device=device)
    code = (inside[:, None] * side + inside).flatten()
    near = None
    if window.mask == Mask.EXACT:
        line = (torch.arange(side, device=device) - (2 * window.size - 1)).abs() <= window.size
        near = (line[:, None] & line).flatten()
        near = F.pad(F.pad(near, (0, width - len(near))), (first, 0), value=True)
    real = _real(case, size, valid_hw, device)
    base = _base(window, case.num_global, size, device)
    lists = _lists(base, real, _has_full(window, size), case.needs_grad)
    return Blocks(base, F.pad(code, (0, size - window.tile)).int(), near, real, lists)


def _base(window: Window, num_global: int, size: int, device: torch.device) -> Tensor:
    """Return `Blocks.base` (M, S+M) int32. It is 0 for global tokens."""
    rows, cols = window.chunks
    first, (count, side) = _num_first(num_global, size), (_num_blocks(window), 4 * window.size - 1)
    base = torch.full((count, first + count), -1, dtype=torch.int32, device=device)
    base[: rows * cols, : math.ceil(num_global / size)] = 0
    row = torch.arange(rows, device=device)[:, None].expand(rows, cols)
    col = torch.arange(cols, device=device).expand(rows, cols)
    for dx, dy in window.offsets:
        r, c = row + dx, col + dy
        inside = (r >= 0) & (r < rows) & (c >= 0) & (c < cols) | window.cyclic
        start = (2 * window.size - 1 - dx * window.size) * side
        start += 2 * window.size - 1 - dy * window.size + first * size
        key = (first + r % rows * cols + c % cols).reshape(-1, 1)
        local = base[: rows * cols]
        old = local.gather(1, key)
        local.scatter_(1, key, torch.where(inside.reshape(-1, 1), start, old).int())
    return base


def _real(case: Case, size: int, valid_hw: Tensor | None, device: torch.device) -> Tensor:
    """Return `Blocks.real`: True for global tokens, and for local tokens that are not padding."""
    window = case.window
    limit = torch.tensor([window.grid]) if valid_hw is None else valid_hw
    tokens = real_cells(limit.to(device), window.grid).flatten(2)[..., None]
    local = _to_blocks(tokens, window, size)[:, 0, :, 0]
    first = torch.arange(_widths(case.num_global, size)[0], device=device) < case.num_global
    real = torch.cat([first.expand(len(local), -1), local], dim=1)
    return real.expand(case.batch, -1).repeat_interleave(case.heads, dim=0)


def _lists(base: Tensor, real: Tensor, has_full: bool, backward: bool) -> tuple:
    """Return `Blocks.lists`. A pair of blocks is fully visible only if it is so in all images."""
    partial, full = base >= 0, None
    if has_full:
        is_real = real.unflatten(1, (base.shape[1], -1)).all(2).all(0)
        partial, full = partial & ~is_real, partial & is_real
    key_lists = [*_indices(partial), *(_indices(full) if has_full else (None, None))]
    if not backward:
        return (*key_lists, None, None, None, None)
    return (*key_lists, *_indices(partial.mT), *(_indices(full.mT) if has_full else (None, None)))


def _indices(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each row of a bool tensor (rows, cols), the number of its True entries, and all
    columns, beginning with those of the True entries.

    The counts are (1, 1, rows) int32, the columns (1, 1, rows, cols) int32.
    """
    rows, cols = visible.shape
    rank = torch.where(visible, visible.cumsum(1) - 1, cols)  # hidden ones go to the extra column
    column = torch.arange(cols, device=visible.device, dtype=torch.int32).expand(rows, cols)
    indices = column.new_zeros(rows, cols + 1).scatter_(1, rank, column)[:, :cols].contiguous()
    return visible.sum(1, dtype=torch.int32)[None, None], indices[None, None]
