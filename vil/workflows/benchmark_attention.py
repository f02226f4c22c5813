"""Measure the time and memory of the local attention backends, and of attention to compare with.

An attention call is a `Case`: its tensor sizes and its window or pattern. All backends and
baselines of a case are timed in interleaved rounds, forward and backward. The baselines are torch's
full attention (`sdpa`), the same under the mask of a pattern (`sdpa_masked`), and NATTEN if it is
installed (`natten`). The lower bound `floor` is the time of the matmuls alone.

Memory is the peak size of the tensors that one forward and backward pass allocates. `peak_mib`
includes the output and the gradients of the inputs, and `extra_mib` does not.

Shapes: B images, N heads, X Y rows and columns of the grid, L = X*Y tokens, D head dim.
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vil.ops import BACKENDS, Case, Layout, Window, choose
from vil.ops.backends.masked import MAX_MASKED_LENGTH
from vil.ops.patterns import parse_pattern
from vil.ops.testing import Inputs, leaves_of, make_inputs
from vil.ops.tuning import tuning_cache
from vil.ops.tuning.tuner import backend_candidate, expected_bytes
from vil.ops.window import ALL_NINE, NEIGHBORS, Mask
from vil.utils.errors import as_config_error, one_line
from vil.utils.interleaved_timer import Candidate, peak_bytes, time_interleaved
from vil.utils.lookup import lookup
from vil.utils.machine import free_bytes
from vil.workflows.benchmark_results import ResultFolder

MIB = 2**20
DTYPES = ("float32", "bfloat16", "float16", "float64")
MASKS = {"exact": 1, "chunks": 0, "cyclic": -1}
FLOOR = "floor"
BASES = ("chunk_handgrad", "sdpa", FLOOR)  # each row's time is divided by the time of each base
ALL_PAIRS = ("masked", "sdpa", "sdpa_masked")  # these multiply every query with every key
SPARE = 0.8  # fraction of the free memory that a backend may be expected to need
# (m, n): numbers of queries and keys in one matmul of the floor. Which is fastest depends on the
# hardware.
TILES = ((64, 512), (256, 256), (512, 512), (1024, 1024))
# number of scores in one bmm: fits a CPU's cache, or fills a GPU
SCORES = {"cpu": 2**20, "cuda": 2**26}
FEW_TILES = 16
TRIES = 2


@dataclass
class Row:
    """Measurements of one backend or baseline on one attention call.

    auto: whether backend="auto" selects this backend.
    forward_ms, backward_ms: median times.
    over_NAME: total time divided by that of the backend or baseline NAME.
    peak_mib, extra_mib: peak memory with and without output and gradients.
    note: a remark such as "full attention, no bias".
    reason: why there are no measurements, or "".
    """

    backend: str
    case: Case
    auto: bool = False
    rounds: int = 0
    forward_ms: float | None = None
    backward_ms: float | None = None
    peak_mib: float | None = None
    extra_mib: float | None = None
    over_chunk_handgrad: float | None = None
    over_sdpa: float | None = None
    over_floor: float | None = None
    note: str = ""
    reason: str = ""

    @property
    def total_ms(self) -> float | None:
        """Forward plus backward time; None if the row was not measured."""
        return None if self.forward_ms is None else self.forward_ms + self.backward_ms

    @property
    def spec(self) -> dict:
        """Settings of the attention call as {column of the result file: value}. "pairs" is the
        number of query-key pairs, summed over images and heads."""
        case, window = self.case, self.case.window
        return dict(
            grid=list(window.grid),
            window=window.size,
            mask=str(window.pattern) if case.is_layout else window.mask.name.lower(),
            mode=None if case.is_layout else mode_of(window),
            **{name: getattr(case, name) for name in ("batch", "heads", "head_dim", "num_global")},
            dtype=str(case.dtype).removeprefix("torch."),
            bias=case.table_bias,
            device=case.device,
            pairs=case.batch * case.heads * count_pairs(window, case.num_global),
        )

    def plain(self) -> dict:
        """Return the row as a dict for JSON and CSV."""
        values = {name: value for name, value in vars(self).items() if name != "case"}
        return {"backend": self.backend, **self.spec} | values


# ----------------------------------------------------------------------------- what is measured


@as_config_error
def list_cases(
    *,
    grids: Sequence[tuple[int, int]],
    window: Sequence[int],
    heads: Sequence[int],
    dtype: Sequence[str],
    masks: Sequence[str] = (),
    modes: Sequence[int] = (),
    patterns: Sequence[str] = (),
    bias: bool = True,
    device: torch.device,
    **spec: int,
) -> list[Case]:
    """List the attention calls with every combination of the values in the sequences.

    grids: grid sizes, as (rows, columns) of tokens. window: sides of a chunk in tokens. masks:
    "exact", "chunks" or "cyclic". modes: values of the config key MODE. patterns: attention
    patterns, such as "axial", which replace masks and modes. bias: whether to add relative position
    biases. spec: batch, head_dim and num_global (number of global tokens).

    Raises ConfigError for invalid settings.
    """
    types = {name: getattr(torch, name) for name in DTYPES}
    dtypes = [lookup(types, name, "dtype") for name in dtype]
    makers = [partial(Layout, pattern=parse_pattern(text)) for text in patterns] or [
        partial(Window.from_mode, mask=lookup(MASKS, mask, "mask"), mode=mode)
        for mask, mode in itertools.product(masks, modes)
    ]
    spec |= dict(table_bias=bias, global_bias=bias and spec["num_global"] > 0)
    return [
        Case(make(grid, size), heads=num_heads, dtype=each, device=device.type, **spec)
        for each, make, size, num_heads, grid in itertools.product(
            dtypes, makers, window, heads, grids
        )
    ]


@as_config_error
def check_names(names: Sequence[str] | None) -> list[str]:
    """Return the names of backends and baselines, by default all. Raises ConfigError for an unknown
    name."""
    known = dict.fromkeys([*BACKENDS, *BASELINES])
    for name in names or ():
        lookup(known, name, "backend")
    return list(known if names is None else dict.fromkeys(names))


@as_config_error
def find_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda". "auto" is the CUDA device if there is one,
    otherwise the CPU. Raises ConfigError for any other name, and for "cuda" without a CUDA
    device."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda, got {name!r}")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("--device cuda: there is no CUDA device (choices: auto, cpu)")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


# ------------------------------------------------------------------------------------ measuring


def measure_cases(
    cases: Sequence[Case], names: Sequence[str], rounds: int, results: ResultFolder
) -> Iterator[list[Row]]:
    """Measure backends and baselines on each attention call, and yield the rows of the call.

    After each call, the rows of all calls so far are written to `results`, so that an interrupted
    benchmark leaves results.
    """
    tuning_cache.load(cases[0].device)
    written: list[dict] = []
    for case in cases:
        rows = measure(case, names, rounds)
        written += [row.plain() for row in rows]
        results.write(written)
        yield rows


def measure(case: Case, names: Iterable[str], rounds: int) -> list[Row]:
    """Measure backends and baselines on one attention call. Returns a row for each name, then the
    row of the lower bound `floor`.

    rounds: number of measurements of each name; slow ones get fewer.
    """
    names, device = list(names), torch.device(case.device)
    max_bytes = SPARE * free_bytes(device)
    reasons = {name: "; ".join(reasons_against(name, case, max_bytes)) for name in names}
    floor, floor_seconds = find_floor(case)
    candidates, inputs = {FLOOR: floor}, make_inputs(case)
    window, num_global = case.window, case.num_global
    all_pairs = window.length * (num_global + window.length)
    for name in (name for name in names if not reasons[name]):
        try:
            candidates[name] = make_candidate(name, case, inputs)
        except Exception as error:
            reasons[name] = one_line(error)
            continue
        if name in ALL_PAIRS:
            least = floor_seconds * all_pairs / count_pairs(window, num_global)
            candidates[name] = replace(candidates[name], least=least)
    times, dropped = time_interleaved(candidates, rounds, device, exempt=[FLOOR])
    reasons |= dropped
    rows = []
    for name in (*names, FLOOR):
        note = BASELINES[name].note if name in BASELINES else ""
        row = Row(name, case, name == choose(case), note=note, reason=reasons.get(name, ""))
        if name in times:
            row.rounds = len(times[name].forward)
            row.forward_ms, row.backward_ms = times[name].forward_ms, times[name].backward_ms
            for base in times.keys() & set(BASES):
                setattr(row, f"over_{base}", row.total_ms / times[base].total_ms)
            if name != FLOOR:  # the floor's buffers are not what a backend needs
                add_memory(row, candidates[name], device)
        rows.append(row)
    return rows


def add_memory(row: Row, candidate: Candidate, device: torch.device) -> None:
    """Measure the peak memory of a forward and backward pass, and store it in the row. If the
    measurement fails, add the reason to the row's note."""
    try:
        row.peak_mib, row.extra_mib = (size / MIB for size in peak_bytes(candidate, device))
    except Exception as error:
        row.note = "; ".join(filter(None, [row.note, f"memory: {one_line(error)}"]))


def make_candidate(name: str, case: Case, inputs: Inputs) -> Candidate:
    """Return functions that run the forward and backward pass of a backend or baseline."""
    if name in BASELINES:
        return BASELINES[name].candidate(case, inputs)
    return backend_candidate(name, case, inputs, leaves_of(inputs))


def reasons_against(name: str, case: Case, max_bytes: float) -> list[str]:
    """Return the reasons why a backend or baseline cannot run an attention call; [] if it can. One
    reason is that the estimated memory of a backend exceeds `max_bytes`."""
    if name in BASELINES:
        return BASELINES[name].reasons(case)
    if reasons := BACKENDS[name].unsupported(case):
        return reasons
    size, problem = expected_bytes(name, case), "would need {:.0f} MiB, but the limit is {:.0f} MiB"
    return [problem.format(size / MIB, max_bytes / MIB)] if size > max_bytes else []


def mode_of(window: Window) -> int | None:
    """Return the value of the config key MODE (-1, 0 or 1..8) that selects the same neighboring
    chunks as `window`; None if there is no such value."""
    if window.offsets == ALL_NINE:
        return 0
    if len(window.offsets) == 1:
        return -1
    others = [offset for offset in window.offsets if offset != (0, 0)]
    return NEIGHBORS.index(others[0]) + 1 if len(others) == 1 else None


# ------------------------------------------------------------------------------------ baselines


class Baseline(NamedTuple):
    """Attention implementation with which the backends of vil are compared.

    candidate: function that returns the forward and backward functions to time. reasons: function
    that returns why the baseline cannot run a call; [] if it can. note: difference from the
    backends.
    """

    candidate: Callable[[Case, Inputs], Candidate]
    reasons: Callable[[Case], list[str]]
    note: str


def differentiate(compute: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor) -> Candidate:
    """Return `compute`, which runs the forward pass, with a function that runs its backward pass.

    leaves: tensors whose gradients the backward pass computes. dout: gradient of the output.
    """
    grad = torch.autograd.grad
    return Candidate(compute, lambda out: grad(out, leaves, dout, materialize_grads=True))


def sdpa(case: Case, inputs: Inputs) -> Candidate:
    """Run torch's full attention, without a bias."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    return differentiate(lambda: F.scaled_dot_product_attention(*leaves), leaves, inputs.cotangent)


def masked_sdpa(case: Case, inputs: Inputs) -> Candidate:
    """Run torch's attention with a pattern as its mask, without a bias. Each query also attends to
    all global tokens."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    mask = F.pad(case.window.mask.to(inputs.q.device), (case.num_global, 0), value=True)
    mask = mask[None] if len(mask) > 1 else mask[0]  # the fused kernel takes no three dimensions
    attend = F.scaled_dot_product_attention
    return differentiate(lambda: attend(*leaves, mask), leaves, inputs.cotangent)


def masked_sdpa_reasons(case: Case) -> list[str]:
    if not case.is_layout:
        return ["it computes patterns, not windows"]
    if case.window.length > MAX_MASKED_LENGTH:
        return [f"{case.window.length} tokens: masks are limited to {MAX_MASKED_LENGTH} tokens"]
    return []


def natten(case: Case, inputs: Inputs) -> Candidate:
    """Run NATTEN's 2-D attention. A query attends to the (2w+1)**2 nearest tokens, where w is the
    window's `size`.

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


BASELINES = {
    "sdpa": Baseline(sdpa, lambda case: [], "full attention, no bias"),
    "sdpa_masked": Baseline(masked_sdpa, masked_sdpa_reasons, "under the pattern's mask, no bias"),
    "natten": Baseline(natten, natten_reasons, "no bias, window moved inwards at the border"),
}


# ------------------------------------------------------------------------------ the lower bound


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
