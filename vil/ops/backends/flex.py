"""FlexAttention, torch's attention with a mask and bias of one's own, compiled for local windows.

FlexAttention cuts the sequences of queries and keys into blocks. A list (the BlockMask) tells which
blocks of keys each block of queries sees, and functions that mask and change single scores are
compiled into its kernel. A 2-D window is scattered over a row-major sequence: most blocks would
hold a few visible keys among many hidden ones, all of which are computed. So tokens are first put
chunk after chunk, and each chunk is padded to a block:

    chunks a, b, c, d     row by row            a a b b | a a b b | c c d d | c c d d
    of 2 x 2 tokens       chunk after chunk     a a a a | b b b b | c c c c | d d d d

The list is then just the list of neighbouring chunks, every block that is computed is dense, and
every length is a multiple of the block, as FlexAttention wants it. Global tokens are the first
blocks of keys.

Compiling takes seconds for every new shape, and after too many shapes torch computes all scores
(L x L) with no more than a warning. So shapes are rounded: images and heads are one dimension, the
number of chunks goes up to a power of two, all else that differs is in tensors of the same size.
Beyond MAX_SHAPES of them `unsupported` says so; should torch meet more all the same, it raises.

`attend` has FlexAttention's own backward, on CUDA only; `forward` gives the log-sum-exp for a
backward of ours (`vil.ops.custom_op`), which torch does not compile on CPUs.

Letters: B images, N heads, h = B*N, L tokens, G global tokens, D channels, W = w*w tokens of a
chunk, P tokens of a block (a padded chunk), M query blocks (chunks, and empty ones), S first key
blocks (of global tokens), T entries of the bias table.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from vil.ops.attention_case import Case
from vil.ops.backends.chunk_layout import from_chunks, to_chunks
from vil.ops.bias import LocalBias
from vil.ops.call_spec import CallSpec
from vil.ops.window import Window
from vil.utils.machine import has_compiler

try:
    from torch.nn.attention.flex_attention import AuxRequest

    WITH_LSE = {"return_aux": AuxRequest(lse=True)}
except ImportError:  # before torch 2.9
    WITH_LSE = {"return_lse": True}

# "eager" computes all scores, as torch's own definition of FlexAttention does: to look inside, and
# to test on CPUs what only CUDA compiles.
COMPILER = "inductor"
MAX_SHAPES = 32  # a model of four stages needs four for training and four for evaluation
FEWEST_BLOCKS = 16  # below it, blocks without tokens cost less than another compilation
MAX_BLOCKS = 2048  # the lists of blocks are square: 16 MiB each
MAX_LAUNCHED = 65535  # images times heads are the second dimension of CUDA's grid of programs
LIMITS = (  # what torch calls the number of compilations and the wish to raise beyond; older names
    ("recompile_limit", "fail_on_recompile_limit_hit"),
    ("cache_size_limit", "fail_on_cache_limit_hit"),
)

_shapes: set[str] = set()  # compiled in this process


class Blocks(NamedTuple):
    """What is known of a window in blocks.

    base (M, S+M) int32: where in `added` the bias of two chunks starts; -1 for no neighbours.
    code (P) int32: what a place in a chunk adds to that (a query) or takes off (a key).
    near (S*P + T) bool: the places of `added` that the exact window reaches; None if all are.
    real (h, (S+M)*P) bool: the keys that exist.
    lists: num and indices of key blocks in part visible, the same of fully visible ones (or None),
    then the four for the backward pass, of query blocks (or None).
    """

    base: Tensor
    code: Tensor
    near: Tensor | None
    real: Tensor
    lists: tuple[Tensor | None, ...]


def unsupported(case: Case) -> list[str]:
    """The reasons why `forward` cannot compute a case."""
    reasons = _reasons(case, lse=True)
    if case.device == "cpu" and COMPILER == "inductor":
        reasons.append("torch does not compile FlexAttention's log-sum-exp on CPUs")
    return reasons


def attend_unsupported(case: Case) -> list[str]:
    """The reasons why `attend` cannot compute a case."""
    reasons = _reasons(case, lse=False)
    if case.needs_grad and case.device == "cpu":
        reasons.append("FlexAttention has no backward on CPUs: it computes without gradients only")
    biased = case.table_bias or case.global_bias
    if case.needs_grad and biased and torch.are_deterministic_algorithms_enabled():
        reasons.append(
            "deterministic algorithms are asked for: it sums the gradient of the bias in any order"
        )
    return reasons


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    to_global: Tensor | None,
    valid: Tensor | None,
    facts: CallSpec,
) -> tuple[Tensor, Tensor]:
    """See `vil.ops.custom_op`."""
    with torch.no_grad():
        out, lse = _run(q, k, v, LocalBias(table, to_global), valid, facts, lse=True)
        return torch.empty_like(q).copy_(out), lse.contiguous()  # strides, too, are promised


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    num_global: int,
    bias: LocalBias,
    valid: Tensor | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """See `vil.ops.local_attention`."""
    assert dropout_p == 0, "refused by the table of backends"
    facts = CallSpec(window, num_global, scale)
    return _run(q, k, v, bias, valid, facts, lse=False)[0]


def forget() -> None:
    """Free what is compiled, so that MAX_SHAPES other shapes may be; torch can only free it all."""
    if _shapes:
        torch._dynamo.reset()
    _shapes.clear()


def _reasons(case: Case, lse: bool) -> list[str]:
    """What both ways cannot compute."""
    reasons, window = _missing(case.device, COMPILER), case.window
    if case.dropout:
        reasons.append("dropout: FlexAttention has none")
    if case.symbolic:
        return [*reasons, "the batch or the grid is open: their blocks are listed beforehand"]
    if window.repeats():
        reasons.append("keys repeat: a list names every block of keys once")
    if case.dtype == torch.float64:
        reasons.append("float64: FlexAttention computes in float32")
    if case.device == "cuda" and case.head_dim < 16:
        reasons.append(f"{case.head_dim} channels a head: on GPUs FlexAttention needs 16")
    if case.device == "cuda" and case.batch * case.heads > MAX_LAUNCHED:
        reasons.append(f"{case.batch * case.heads} images times heads: more than {MAX_LAUNCHED}")
    if math.prod(window.chunks) > MAX_BLOCKS:
        reasons.append(
            f"{math.prod(window.chunks)} chunks are more than {MAX_BLOCKS}: "
            "the lists of blocks grow with the square"
        )
    if not _has_room(_shape(case, lse)):
        reasons.append(
            f"{MAX_SHAPES} shapes are compiled already and this is another: "
            "torch compiles for seconds each, and keeps them all"
        )
    return reasons


@torch.compiler.assume_constant_result
def _missing(device: str, compiler: str) -> list[str]:
    """What this machine lacks."""
    reasons = []
    if _limits() is None:
        reasons.append(f"torch {torch.__version__} cannot be told to raise rather than not compile")
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
    """Whether a shape is compiled already, or may be."""
    return shape in _shapes or len(_shapes) < MAX_SHAPES


@functools.cache
def _limits() -> dict[str, int | bool] | None:
    """The settings by which torch raises instead of computing all scores; None if it has none.

    A few more than MAX_SHAPES, since torch also compiles anew for things of no shape, such as
    whether an input needs a gradient.
    """
    for number, wish in LIMITS:
        if hasattr(torch._dynamo.config, wish):
            return {number: 4 * MAX_SHAPES, wish: True}
    return None


def _shape(case: Case, lse: bool) -> str:
    """All that makes torch compile anew."""
    window, backward = case.window, case.needs_grad and not lse
    block = _block_size(window, case.device, backward)
    first, count = _num_first(case.num_global, block), _num_blocks(window)
    biased, exact = case.table_bias or case.global_bias, window.exact == 1
    return (
        f"{case.device} {case.dtype} h{case.batch * case.heads} D{case.head_dim} "
        f"P{block} M{count} S{first} biased{biased} exact{exact} full{_has_full(window, block)} "
        f"lse{lse} backward{backward}"
    )


def _block_size(window: Window, device: str, backward: bool) -> int:
    """P: a chunk, padded to what the kernels compute at a time."""
    step = 16 if device == "cpu" else 128 if backward else 64
    return math.ceil(window.tile / step) * step


def _num_blocks(window: Window) -> int:
    """M: the number of chunks, up to a power of two; blocks without tokens are skipped."""
    return max(FEWEST_BLOCKS, 1 << (math.prod(window.chunks) - 1).bit_length())


def _num_first(num_global: int, block: int) -> int:
    """S: one block at least, though empty, so that no global tokens are no shape of their own."""
    return max(1, math.ceil(num_global / block))


def _has_full(window: Window, block: int) -> bool:
    """Whether there are pairs of blocks without anything hidden, which need no mask."""
    return window.tile == block and window.exact != 1


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: LocalBias,
    valid: Tensor | None,
    facts: CallSpec,
    lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """out (B, N, L, D) and lse (B, N, L) or None; gradients if they are enabled."""
    window, num_global = facts.window, facts.num_global
    case = Case.of(q, window, num_global, bias, valid, 0.0)
    size = _block_size(window, case.device, case.needs_grad)
    inputs = (
        _to_blocks(q * facts.scale, window, size),
        _keys(k, window, num_global, size),
        _keys(v, window, num_global, size),
        _added(bias, num_global, size, case.batch),
        _plan(case, size, valid, q.device),
    )
    out, stat = _compute(inputs, lse, case)
    if lse:
        stat = _from_blocks(stat[..., None], window, q.shape[:2])[..., 0]
    return _from_blocks(out, window, q.shape[:2]), stat


def _compute(inputs: tuple, lse: bool, case: Case) -> tuple[Tensor, Tensor | None]:
    """`_flex`, compiled."""
    if case.device == "cpu":  # where FlexAttention refuses what may ever have a gradient
        inputs = (*(None if x is None else x.detach() for x in inputs[:4]), inputs[4])
    options = {"FORCE_USE_FLEX_ATTENTION": True}  # not the kernel for short sequences
    if case.device != "cpu" and not case.needs_grad:
        options |= {"BLOCK_M": 64, "BLOCK_N": 64}  # must divide P; torch might take 128
    if torch.compiler.is_dynamo_compiling():  # then this is a part of a larger program
        return _flex(*inputs, lse, options)
    with torch._dynamo.config.patch(_limits()):
        found = _compiled(COMPILER)(*inputs, lse, options)
    _shapes.add(_shape(case, lse))
    return found


@functools.cache
def _compiled(compiler: str) -> Callable:
    """One function for all shapes: torch keeps what it compiled for each."""
    return torch.compile(_flex, backend=compiler, dynamic=False, fullgraph=True)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor | None,
    plan: Blocks,
    lse: bool,
    options: dict,
) -> tuple[Tensor, Tensor | None]:
    """q (h, 1, M*P, D), k, v (h, 1, (S+M)*P, D), added (h, S*P + T) -> like q, (h, 1, M*P)."""
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError("torch.compile is switched off: FlexAttention would store all scores")
    size = len(plan.code)
    first = k.shape[2] - q.shape[2]

    def place(query: Tensor, key: Tensor) -> Tensor:
        """Where the bias of a pair stands; somewhere within the bounds if it is hidden."""
        start = plan.base[query // size, key // size]
        local = start + plan.code[query % size] - plan.code[key % size]
        return torch.where(key < first, key, local.clamp(min=0))

    def visible(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = plan.real[b, key] & (plan.base[query // size, key // size] >= 0)
        return seen if plan.near is None else seen & plan.near[place(query, key)]

    def biased(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + added[b, place(query, key)]

    mask = BlockMask((q.shape[2], k.shape[2]), *plan.lists, (size, size), visible)
    change, wish = None if added is None else biased, WITH_LSE if lse else {}
    found = flex_attention(q, k, v, change, mask, scale=1.0, kernel_options=options, **wish)
    if not lse:
        return found, None
    out, stat = found
    return out, stat if isinstance(stat, Tensor) else stat.lse


def _to_blocks(x: Tensor, window: Window, size: int) -> Tensor:
    """(B, N, L, ..) -> (h, 1, M*P, ..), chunk after chunk, zeros where no token is."""
    x = to_chunks(x, window).flatten(2, 3).flatten(0, 1)  # (h, chunks, W, ..)
    x = F.pad(x, (0, 0, 0, size - window.tile, 0, _num_blocks(window) - x.shape[1]))
    return x.flatten(1, 2)[:, None]


def _from_blocks(x: Tensor, window: Window, lead: torch.Size) -> Tensor:
    """(h, 1, M*P, ..) -> (B, N, L, ..)."""
    x = x.unflatten(2, (_num_blocks(window), -1))[:, 0, : math.prod(window.chunks), : window.tile]
    return from_chunks(x.unflatten(1, window.chunks).unflatten(0, lead), window)


def _keys(x: Tensor, window: Window, num_global: int, size: int) -> Tensor:
    """(B, N, G+L, D) -> (h, 1, (S+M)*P, D)."""
    first = x[:, :, :num_global].flatten(0, 1)[:, None]
    first = F.pad(first, (0, 0, 0, _num_first(num_global, size) * size - num_global))
    return torch.cat([first, _to_blocks(x[:, :, num_global:], window, size)], dim=2)


def _added(bias: LocalBias, num_global: int, size: int, images: int) -> Tensor | None:
    """(h, S*P + T): the bias towards each global key, then the table; None without either.

    One copy for each image, so that the kernel need not sum their gradients.
    """
    table, to_global = bias
    if table is None and to_global is None:
        return None
    heads = len(table if table is not None else to_global)
    some = dict(dtype=torch.float32, device=(table if table is not None else to_global).device)
    parts = [
        torch.zeros(heads, width, **some)
        if part is None
        else F.pad(part.float(), (0, width - part.shape[1]))
        for part, width in zip((to_global, table), _widths(num_global, size))
    ]
    return torch.cat(parts, dim=1).repeat(images, 1)


def _widths(num_global: int, size: int) -> tuple[int, int]:
    """S*P, and T of the largest window whose chunks fit into a block."""
    return _num_first(num_global, size) * size, (4 * math.isqrt(size) - 1) ** 2


def _plan(case: Case, size: int, valid: Tensor | None, device: torch.device) -> Blocks:
    """Made anew in every call: a few small operations, and no copy kept for each size of grid."""
    window, (first, width) = case.window, _widths(case.num_global, size)
    side, inside = 4 * window.size - 1, torch.arange(window.size, device=device)
    code = (inside[:, None] * side + inside).flatten()
    near = None
    if window.exact == 1:
        line = (torch.arange(side, device=device) - (2 * window.size - 1)).abs() <= window.size
        near = (line[:, None] & line).flatten()
        near = F.pad(F.pad(near, (0, width - len(near))), (first, 0), value=True)
    real = _real(case, size, valid, device)
    base = _base(window, case.num_global, size, device)
    lists = _lists(base, real, _has_full(window, size), case.needs_grad)
    return Blocks(base, F.pad(code, (0, size - window.tile)).int(), near, real, lists)


def _base(window: Window, num_global: int, size: int, device: torch.device) -> Tensor:
    """(M, S+M) int32: see `Blocks`; 0 towards global tokens."""
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


def _real(case: Case, size: int, valid: Tensor | None, device: torch.device) -> Tensor:
    """bool (h, (S+M)*P): the global tokens, and the local ones within the grid and `valid`."""
    window = case.window
    limit = torch.tensor([window.grid], device=device)
    limit = limit if valid is None else limit.minimum(valid.to(device))
    row, col = (torch.arange(n, device=device) for n in window.grid)
    tokens = (row[:, None] < limit[:, 0, None, None]) & (col < limit[:, 1, None, None])
    local = _to_blocks(tokens.flatten(1)[:, None, :, None], window, size)[:, 0, :, 0]
    first = torch.arange(_widths(case.num_global, size)[0], device=device) < case.num_global
    real = torch.cat([first.expand(len(local), -1), local], dim=1)
    return real.expand(case.batch, -1).repeat_interleave(case.heads, dim=0)


def _lists(base: Tensor, real: Tensor, has_full: bool, backward: bool) -> tuple:
    """See `Blocks`. What is fully visible holds for all images and heads."""
    seen, full = base >= 0, None
    if has_full:
        whole = real.unflatten(1, (base.shape[1], -1)).all(2).all(0)
        seen, full = seen & ~whole, seen & whole
    of_keys = [*_ordered(seen), *(_ordered(full) if has_full else (None, None))]
    if not backward:
        return (*of_keys, None, None, None, None)
    return (*of_keys, *_ordered(seen.mT), *(_ordered(full.mT) if has_full else (None, None)))


def _ordered(seen: Tensor) -> tuple[Tensor, Tensor]:
    """bool (rows, cols) -> int32 (1, 1, rows) how many, (1, 1, rows, cols) which of them, first."""
    rows, cols = seen.shape
    rank = torch.where(seen, seen.cumsum(1) - 1, cols)  # what is not seen goes beyond the end
    column = torch.arange(cols, device=seen.device, dtype=torch.int32).expand(rows, cols)
    indices = column.new_zeros(rows, cols + 1).scatter_(1, rank, column)[:, :cols].contiguous()
    return seen.sum(1, dtype=torch.int32)[None, None], indices[None, None]
