"""Candidates of the attention benchmark: backends, full attention, NATTEN and a lower bound.

A candidate is a pair of functions to time: a forward pass and a backward pass. A case is one
attention call: its tensor sizes and its window or pattern.

Shapes: B images, N heads, X Y rows and columns of the grid, L = X*Y tokens, D head dim.
"""

import importlib.util
from collections.abc import Callable
from math import isqrt, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops import BACKENDS, Case, Layout, Window
from vil.ops.backends.masked import MAX_MASKED_LENGTH
from vil.ops.testing import Inputs, leaves_of
from vil.ops.tuning.tuner import backend_candidate, expected_bytes
from vil.ops.window import Mask
from vil.utils.interleaved_timer import Candidate

# (m, n): numbers of queries and keys in one matmul of the floor. Which is fastest depends on the
# hardware.
TILES = ((64, 512), (256, 256), (512, 512), (1024, 1024))
# number of scores in one bmm: fits a CPU's cache, or fills a GPU
SCORES = {"cpu": 2**20, "cuda": 2**26}
FEW_TILES = 16
TRIES = 2
MIB = 2**20


class Baseline(NamedTuple):
    """Attention implementation with which the backends of vil are compared.

    candidate: function that returns the forward and backward functions to time.
    reasons: function that returns why the baseline cannot run a call; [] if it can.
    note: difference from the backends, such as "full attention, no bias".
    """

    candidate: Callable[[Case, Inputs], Candidate]
    reasons: Callable[[Case], list[str]]
    note: str


def differentiate(compute: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor) -> Candidate:
    """Return a `Candidate`, two functions to time: `compute`, which runs the forward pass, and a
    function that runs its backward pass.

    leaves: tensors whose gradients the backward pass computes. dout: gradient of the output.
    """
    grad = torch.autograd.grad
    return Candidate(compute, lambda out: grad(out, leaves, dout, materialize_grads=True))


def sdpa(case: Case, inputs: Inputs) -> Candidate:
    """Return functions that run torch's full attention (SDPA), forward and backward. There is no
    bias."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    return differentiate(lambda: F.scaled_dot_product_attention(*leaves), leaves, inputs.cotangent)


def masked_sdpa(case: Case, inputs: Inputs) -> Candidate:
    """Return functions that run torch's SDPA with an attention pattern as its mask, forward and
    backward.

    Each query also attends to all global tokens. There is no bias. case: attention call with the
    pattern.
    """
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    mask = F.pad(case.window.mask.to(inputs.q.device), (case.num_global, 0), value=True)
    mask = mask[None] if len(mask) > 1 else mask[0]  # the fused kernel takes no three dimensions
    attend = F.scaled_dot_product_attention
    return differentiate(lambda: attend(*leaves, mask), leaves, inputs.cotangent)


def masked_sdpa_reasons(case: Case) -> list[str]:
    """Return the reasons why `masked_sdpa` cannot run an attention call; [] if it can."""
    if not case.is_layout:
        return ["it computes patterns, not windows"]
    if case.window.length > MAX_MASKED_LENGTH:
        return [f"{case.window.length} tokens: masks are limited to {MAX_MASKED_LENGTH} tokens"]
    return []


def natten(case: Case, inputs: Inputs) -> Candidate:
    """Return functions that run NATTEN's 2-D attention, forward and backward. A query attends to
    the (2w+1)**2 nearest tokens, where w is the window's `size`.

    Unlike the backends of vil, NATTEN adds no bias. At the border of the grid, NATTEN moves the
    window inwards, and the backends clip it.
    """
    from natten.functional import na2d

    def to_grid(x: Tensor) -> Tensor:
        """Reshape (B, N, L, D) to (B, X, Y, N, D)."""
        return x.transpose(1, 2).unflatten(1, case.window.grid).contiguous()

    split = [case.num_global, case.window.length]
    chunks = [x.split(split, dim=2) for x in (inputs.k, inputs.v)]
    leaves = [to_grid(inputs.q), *(to_grid(local) for _, local in chunks)]
    if case.num_global:
        leaves += [glob.transpose(1, 2).contiguous() for glob, _ in chunks]
    # converted to NATTEN's layout here, outside the timed functions
    leaves = [leaf.requires_grad_() for leaf in leaves]
    extra = dict(zip(("additional_keys", "additional_values"), leaves[3:]))
    side = 2 * case.window.size + 1
    dout = to_grid(inputs.cotangent)
    return differentiate(lambda: na2d(*leaves[:3], kernel_size=side, **extra), leaves, dout)


def natten_reasons(case: Case) -> list[str]:
    """Return the reasons why NATTEN cannot run an attention call; [] if it can."""
    reasons, side = [], 2 * case.window.size + 1
    if case.device != "cuda":
        reasons.append("NATTEN is compared on a CUDA device only")
    elif importlib.util.find_spec("natten") is None:
        reasons.append("NATTEN is not installed: pip install natten")
    if case.is_layout or case.window.mask != Mask.EXACT:
        reasons.append("NATTEN computes only the exact window (SW_EXACT 1)")
    if side > min(case.window.grid):
        reasons.append(f"its window of {side} x {side} is larger than the grid")
    return reasons


BESIDE = {
    "sdpa": Baseline(sdpa, lambda case: [], "full attention, no bias"),
    "sdpa_masked": Baseline(masked_sdpa, masked_sdpa_reasons, "under the pattern's mask, no bias"),
    "natten": Baseline(natten, natten_reasons, "no bias, window moved inwards at the border"),
}


def make_candidate(name: str, case: Case, inputs: Inputs) -> Candidate:
    """Return a `Candidate`, functions that run the forward and backward pass of a baseline or
    backend. name: name of the baseline (a key of BESIDE) or backend (a key of BACKENDS)."""
    if name in BESIDE:
        return BESIDE[name].candidate(case, inputs)
    return backend_candidate(name, case, inputs, leaves_of(inputs))


def reasons_against(name: str, case: Case, max_bytes: float) -> list[str]:
    """Return the reasons why a baseline or backend cannot run an attention call; [] if it can.

    One reason is that the estimated memory of a backend exceeds `max_bytes`.
    """
    if name in BESIDE:
        return BESIDE[name].reasons(case)
    if reasons := BACKENDS[name].unsupported(case):
        return reasons
    size, problem = expected_bytes(name, case), "would need {:.0f} MiB, but the limit is {:.0f} MiB"
    return [problem.format(size / MIB, max_bytes / MIB)] if size > max_bytes else []


def count_pairs(window: Window | Layout, num_global: int) -> int:
    """Count the query-key pairs of one image and head, including pairs with global keys.

    Padding is not counted. A key that occurs twice in a cyclic window counts twice. For a `Layout`,
    the count is the mean over heads, rounded down.
    """
    if isinstance(window, Layout):
        return window.count_pairs() // window.heads + num_global * window.length
    axes = [[count_axis_pairs(window, axis, o[axis]) for axis in (0, 1)] for o in window.offsets]
    return sum(map(prod, axes)) + num_global * window.length


def count_axis_pairs(window: Window, axis: int, step: int) -> int:
    """Count the query-key pairs along one axis of the grid (0: rows, 1: columns).

    The axis is divided into chunks of `window.size` tokens. A pair counts if the key's chunk is
    `step` chunks after the query's chunk, and the window's mask allows the pair.
    """
    w, count = window.size, window.chunks[axis]
    token = torch.arange(window.grid[axis])
    query, key = token[:, None], token[None, :]
    target = query // w + step
    seen = key // w == (target % count if window.cyclic else target)
    if window.mask == Mask.EXACT:
        seen &= (query - key).abs() <= w
    return int(seen.sum())


def find_floor(case: Case) -> tuple[Candidate, float]:
    """Measure a lower bound on the time of an attention call: the time of its matmuls alone.

    Returns (candidate, seconds). candidate: functions that run only these matmuls, with the fastest
    tile size in TILES. seconds: measured time of the forward and backward pass.
    """
    trials = []
    for candidate in (matmuls(case, tile) for tile in TILES):
        times = [sum(candidate.time(torch.device(case.device))) for _ in range(TRIES)]
        trials.append((candidate, min(times)))
    return min(trials, key=lambda trial: trial[1])


def matmuls(case: Case, tile: tuple[int, int]) -> Candidate:
    """Return forward and backward functions that run only the matmuls of an attention call.

    tile: (m, n), the numbers of queries and keys in one matmul. They are adjusted if the call has
    few query-key pairs.
    """
    pairs = case.batch * case.heads * count_pairs(case.window, case.num_global)
    m, n = tile
    m = min(m, isqrt(pairs))
    tiles = max(1, round(pairs / (m * n)))
    if tiles < FEW_TILES:  # rounding so few tiles would change the number of pairs too much
        n = max(1, round(pairs / (m * tiles)))
    size = min(tiles, max(1, SCORES[case.device] // (m * n)))
    sizes = [size] * (tiles // size) + [tiles % size] * (tiles % size > 0)
    options = dict(dtype=case.dtype, device=case.device)
    q, k = (torch.randn(size, rows, case.head_dim, **options) for rows in (m, n))
    dq, dk, scores = torch.empty_like(q), torch.empty_like(k), torch.empty(size, m, n, **options)

    def compute(num_scores: int, num_dq: int, num_dk: int) -> list[Tensor]:
        for count in sizes:
            s = scores[:count]
            for _ in range(num_scores):
                torch.bmm(q[:count], k[:count].mT, out=s)
            for _ in range(num_dq):
                torch.bmm(s, k[:count], out=dq[:count])
            for _ in range(num_dk):
                torch.bmm(s.mT, q[:count], out=dk[:count])
        return []

    # forward: scores and output; backward: scores again, gradients of the weights, q, k and v
    return Candidate(lambda: compute(1, 1, 0), lambda out: compute(2, 1, 2))
