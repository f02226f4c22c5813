"""What is timed on a case of local attention: a backend, full attention, NATTEN, and the floor.

Letters: B images, N heads, X Y grid, L = X*Y tokens, G global tokens, D channels of a head, w
window, T tiles of m queries and n keys.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from math import isqrt, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.bench.interleaved_timer import Candidate, turn
from vil.ops import BACKENDS, Case, Window
from vil.ops.testing import Inputs, forward, leaves_of
from vil.ops.tuning.tuner import expected_bytes
from vil.ops.window import Mask

# m, n of the floor's products: the sides of matrix units and of caches differ
TILES = ((64, 512), (256, 256), (512, 512), (1024, 1024))
# scores of one call of bmm: on a CPU few enough for the cache, on a GPU enough to fill it
SCORES = {"cpu": 2**20, "cuda": 2**26}
FEW_TILES = 16
TRIES = 2
MIB = 2**20


def of_backend(name: str, case: Case, inputs: Inputs, least: float = 0.0) -> Candidate:
    """Local attention by a backend of the table: gradients of q, k, v and both bias terms."""
    leaves, attend = leaves_of(inputs), BACKENDS[name].attend
    return Candidate(
        lambda: forward(attend, case, inputs, leaves),
        slopes(list(leaves.values()), inputs.cotangent),
        least,
    )


def of_sdpa(case: Case, inputs: Inputs, least: float = 0.0) -> Candidate:
    """torch's own attention of every token to all, without bias."""
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    return Candidate(
        lambda: F.scaled_dot_product_attention(q, k, v),
        slopes([q, k, v], inputs.cotangent),
        least,
    )


def of_natten(case: Case, inputs: Inputs, least: float = 0.0) -> Candidate:
    """NATTEN's two-dimensional attention to the (2w+1)**2 nearest tokens, in its own layout.

    It has no bias, and moves the window inwards at the border where ours is cut.
    """
    from natten.functional import na2d

    def by_place(x: Tensor) -> Tensor:
        """(B, N, L, D) -> (B, X, Y, N, D)."""
        return x.transpose(1, 2).unflatten(1, case.window.grid).contiguous()

    split = [case.num_global, case.window.length]
    parts = [x.split(split, dim=2) for x in (inputs.k, inputs.v)]
    leaves = [by_place(inputs.q), *(by_place(local) for _, local in parts)]
    if case.num_global:
        leaves += [first.transpose(1, 2).contiguous() for first, _ in parts]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    first = dict(zip(("additional_keys", "additional_values"), leaves[3:]))
    side = 2 * case.window.size + 1
    return Candidate(
        lambda: na2d(*leaves[:3], kernel_size=side, **first),
        slopes(leaves, by_place(inputs.cotangent)),
        least,
    )


def natten_cannot(case: Case) -> list[str]:
    """The reasons why NATTEN cannot be compared on a case."""
    reasons, side = [], 2 * case.window.size + 1
    if case.device != "cuda":
        reasons.append("NATTEN is compared on a CUDA device only")
    elif importlib.util.find_spec("natten") is None:
        reasons.append("not installed: pip install natten")
    if case.window.mask != Mask.EXACT:
        reasons.append("NATTEN has no chunk masks, only the exact window")
    if side > min(case.window.grid):
        reasons.append(f"its window of {side} x {side} is larger than the grid")
    return reasons


def slopes(leaves: list[Tensor], cotangent: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The backward of an output: the gradients of all leaves."""
    return lambda out: torch.autograd.grad(out, leaves, cotangent, materialize_grads=True)


# name: (candidate, reasons against it, what to bear in mind); beside the table of backends
BESIDE = {
    "sdpa": (of_sdpa, lambda case: [], "full attention, no bias"),
    "natten": (of_natten, natten_cannot, "no bias, window moved inwards at the border"),
}


def candidate(name: str, case: Case, inputs: Inputs, least: float = 0.0) -> Candidate:
    """The candidate of a name in BACKENDS or BESIDE."""
    if name in BESIDE:
        return BESIDE[name][0](case, inputs, least)
    return of_backend(name, case, inputs, least)


def reasons_against(name: str, case: Case, max_bytes: float) -> list[str]:
    """Why a candidate cannot run a case, its memory included; empty: it can."""
    if name in BESIDE:
        return BESIDE[name][1](case)
    if reasons := BACKENDS[name].unsupported(case):
        return reasons
    size = expected_bytes(name, case)
    if size > max_bytes:
        return [f"would hold {size / MIB:.0f} MiB, of {max_bytes / MIB:.0f} it may"]
    return []


def visited(window: Window, num_global: int) -> int:
    """Pairs of a query and a key it sees, global tokens included, of one image and head.

    Padding counts for nothing; a key that is met twice counts twice.
    """
    local = sum(
        prod(_met(window, axis, offset[axis]) for axis in (0, 1)) for offset in window.offsets
    )
    return local + num_global * window.length


def _met(window: Window, axis: int, step: int) -> int:
    """Pairs along an axis whose chunks are `step` apart."""
    w, count = window.size, window.chunks[axis]
    token = torch.arange(window.grid[axis])
    query, key = token[:, None], token[None, :]
    target = query // w + step
    seen = key // w == (target % count if window.cyclic else target)
    if window.mask == Mask.EXACT:
        seen &= (query - key).abs() <= w
    return int(seen.sum())


def full_pairs(case: Case) -> int:
    """Pairs of one image and head that full attention multiplies."""
    return case.window.length * (case.num_global + case.window.length)


def floor(case: Case) -> tuple[Candidate, float]:
    """The products that no backend can leave out, and the seconds of the seven of them.

    Two forward and five backward (scores anew, and the gradients of weights, v, q, k), of as many
    pairs as are visited, by torch.bmm on operands that stay where they are, at the best of TILES.
    """
    device = torch.device(case.device)
    found = []
    for tile in TILES:
        trial = products(case, tile)
        found.append((min(sum(turn(trial, device)) for _ in range(TRIES)), trial))
    took, best = min(found, key=lambda pair: pair[0])
    return best, took


def products(case: Case, tile: tuple[int, int]) -> Candidate:
    """Products of tiles (m, D) x (D, n) and (m, n) x (n, D), until all visited pairs are done."""
    pairs = case.batch * case.heads * visited(case.window, case.num_global)
    m, n = tile
    m = min(m, isqrt(pairs))
    tiles = max(1, round(pairs / (m * n)))
    if tiles < FEW_TILES:  # then rounding their number would miss the pairs
        n = max(1, round(pairs / (m * tiles)))
    size = min(tiles, max(1, SCORES[case.device] // (m * n)))
    sizes = [size] * (tiles // size) + [tiles % size] * (tiles % size > 0)
    some = dict(dtype=case.dtype, device=case.device)
    q, dq = torch.randn(size, m, case.head_dim, **some), torch.empty(size, m, case.head_dim, **some)
    k, dk = torch.randn(size, n, case.head_dim, **some), torch.empty(size, n, case.head_dim, **some)
    scores = torch.empty(size, m, n, **some)

    def compute(by_pair: int, by_query: int, by_key: int) -> list[Tensor]:
        """So many products that give scores, rows of queries, and rows of keys."""
        for part in sizes:
            s = scores[:part]
            for _ in range(by_pair):
                torch.bmm(q[:part], k[:part].mT, out=s)
            for _ in range(by_query):
                torch.bmm(s, k[:part], out=dq[:part])
            for _ in range(by_key):
                torch.bmm(s.mT, q[:part], out=dk[:part])
        return []

    return Candidate(lambda: compute(1, 1, 0), lambda out: compute(2, 1, 2))
