"""Predict a lower bound on the time of the attention kernels (a roofline) for a GPU.

The bound of a kernel is the longest of three times: its matmuls at the rate of the tensor cores,
its exponentials at the rate of the special function units, and one transfer of its inputs and
outputs at the memory bandwidth. Padding of blocks and channels counts as work. The bound of a pass
is the sum over its kernels.

`flash` is the bound for a fused attention kernel without bias that computes only the attended
query-key pairs, with two matmuls per pair in the forward pass and five in the backward pass.

Shapes: B batch, N heads, L tokens, D head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vil.bench.baselines import count_pairs
from vil.bench.kernel_table import KernelRow, make_case
from vil.ops import Case, Window
from vil.ops.attention_case import next_power_of_2
from vil.ops.backends.triton.launch import Rectangle, area, rectangles
from vil.ops.layout import Layout
from vil.ops.window import Mask
from vil.utils.text_table import align

LIMITED_BY = ("matmuls", "exponentials", "memory")
FORWARD, BACKWARD = ("forward",), ("query", "key", "global", "tile", "step")
MATMULS = {"forward": 2, "query": 3, "key": 4, "global": 4, "tile": 2, "step": 2}  # per block
# tensors (B, N, L, D) that a kernel reads or writes, and float32 numbers per query
TENSORS = {"forward": 4, "query": 6, "key": 6, "global": 2, "tile": 4, "step": 4}
STATISTICS = {"forward": 1, "query": 2, "key": 2, "global": 2, "tile": 2, "step": 2}


@dataclass(frozen=True)
class Rates:
    """Published rates of a GPU.

    flops: dense 16-bit FLOP/s of the tensor cores. bytes: memory bandwidth in bytes/s.
    exponentials: exponentials/s, at 16 per multiprocessor and clock cycle.
    """

    name: str
    flops: float
    bytes: float
    exponentials: float


RATES = {  # data sheets; multiprocessors * 16 * boost clock for the exponentials
    "sm_80": Rates("A100 SXM 80 GB", 312e12, 2.039e12, 108 * 16 * 1.41e9),
    "sm_90": Rates("H100 SXM", 989.4e12, 3.35e12, 132 * 16 * 1.83e9),
    "sm_100": Rates("B200", 2250e12, 8e12, 148 * 16 * 1.85e9),
    "gfx942": Rates("MI300X", 1307.4e12, 5.3e12, 304 * 16 * 2.1e9),
}


@dataclass(frozen=True)
class Work:
    """Work of a kernel: FLOP of its matmuls, number of exponentials, and bytes moved."""

    flops: float
    exponentials: float
    bytes: float

    def microseconds(self, rates: Rates) -> dict[str, float]:
        """Return {part of the work: time in microseconds that this part takes alone}. The parts
        are "matmuls", "exponentials" and "memory"."""
        seconds = (
            self.flops / rates.flops,
            self.exponentials / rates.exponentials,
            self.bytes / rates.bytes,
        )
        return {name: 1e6 * value for name, value in zip(LIMITED_BY, seconds)}


@dataclass(frozen=True)
class Prediction:
    """Lower bounds on the time of an attention call, in microseconds.

    forward, backward: bounds for vil's attention kernels.
    flash_forward, flash_backward: bounds for `flash`, an ideal fused attention kernel without bias
    or padding.
    limits: {kernel: the part of its work that takes the most time}. The parts are "matmuls",
    "exponentials" and "memory".
    """

    forward: float
    backward: float
    flash_forward: float
    flash_backward: float
    limits: dict[str, str]

    @property
    def ratio(self) -> float:
        """The bound of vil's kernels for both passes, divided by the bound of `flash`."""
        return (self.forward + self.backward) / (self.flash_forward + self.flash_backward)


def predict(target: str, case: Case, blocks: Mapping[str, tuple[int, int]]) -> Prediction:
    """Predict lower bounds on the time of an attention call on a GPU.

    target: GPU architecture, a key of RATES such as "sm_90". blocks: {kernel: (queries, keys)}. A
    kernel computes the scores in blocks of this size.
    """
    rates = RATES[target]
    times = {name: count_work(name, case, *sizes) for name, sizes in blocks.items()}
    times = {name: work.microseconds(rates) for name, work in times.items()}
    least = {name: max(parts.values()) for name, parts in times.items()}
    flash = [max(work.microseconds(rates).values()) for work in flash_work(case)]
    return Prediction(
        sum(least[name] for name in FORWARD),
        sum(least[name] for name in BACKWARD if name in least),
        *flash,
        {name: max(parts, key=parts.get) for name, parts in times.items()},
    )


def predict_rows(rows: Sequence[KernelRow]) -> dict[tuple, Prediction]:
    """Predict lower bounds on the times of the attention calls in a table of kernels. Returns
    {(target, window, dtype, head dim): prediction}."""
    found = {}
    for key in dict.fromkeys(row.key[:4] for row in rows):
        blocks = {row.kernel: (row.queries, row.keys) for row in rows if row.key[:4] == key}
        found[key] = predict(key[0], make_case(*key[1:]), blocks)
    return found


def format_predictions(predictions: Mapping[tuple, Prediction]) -> str:
    """Format predictions of `predict_rows` as a text table, with times in microseconds."""
    lines = [HEAD]
    for (target, window, dtype, head_dim), x in predictions.items():
        flash = f"{x.flash_forward:.0f} + {x.flash_backward:.0f}"
        times = [f"{x.forward:.0f}", f"{x.backward:.0f}", flash, f"{x.ratio:.2f}"]
        lines.append([target, window, dtype, str(head_dim), *times, _group(x.limits)])
    return align(lines)


HEAD = ["target", "window", "dtype", "D", "forward", "backward", "flash's", "ratio", "limited by"]


def _group(limits: Mapping[str, str]) -> str:
    """Format {kernel: limit} as text that lists the kernels of each limit, such as "matmuls:
    forward query, memory: key". A limit is "matmuls", "exponentials" or "memory"."""
    by_limit = {limit: [k for k in limits if limits[k] == limit] for limit in LIMITED_BY}
    return ", ".join(f"{limit}: {' '.join(names)}" for limit, names in by_limit.items() if names)


def count_work(kernel: str, case: Case, queries: int, keys: int) -> Work:
    """Count the work of a kernel for an attention call. queries, keys: numbers of queries and keys
    in a block of scores that the kernel computes at a time."""
    pairs = count_blocks(kernel, case.window, queries, keys) * queries * keys
    if kernel == "global":
        pairs = case.window.length * max(16, next_power_of_2(case.num_global))
    elif kernel in ("forward", "query") and case.num_global:
        owned = count_owned(case.window, queries) * queries
        pairs += owned * max(16, next_power_of_2(case.num_global))
    lead = case.batch * case.heads
    flops = 2.0 * MATMULS[kernel] * pairs * max(16, next_power_of_2(case.head_dim))
    size = TENSORS[kernel] * case.head_dim * case.dtype.itemsize + 4 * STATISTICS[kernel]
    return Work(lead * flops, float(lead * pairs), float(lead * case.window.length * size))


def flash_work(case: Case) -> tuple[Work, Work]:
    """Count the work of a fused attention kernel that computes only the attended query-key pairs.

    Returns (work of the forward pass, work of the backward pass).
    """
    lead = case.batch * case.heads
    pairs = lead * count_pairs(case.window, case.num_global)
    tensor = lead * case.window.length * case.head_dim * case.dtype.itemsize
    flops = 2.0 * pairs * case.head_dim
    return Work(2 * flops, pairs, 4 * tensor), Work(5 * flops, pairs, 8 * tensor)


def count_owned(window: Window | Layout, size: int) -> int:
    """Count the blocks of tokens into which a kernel divides the grid. Each chunk of the grid is
    divided into blocks of at most `size` tokens, and each program of the kernel has one block."""
    return sum(-(-rows * cols // size) for _, _, rows, cols in chunk_sizes(window))


def count_blocks(kernel: str, window: Window | Layout, queries: int, keys: int) -> int:
    """Count the `queries` x `keys` blocks of scores that a kernel computes per image and head."""
    owned, walked = (keys, queries) if kernel == "key" else (queries, keys)
    if kernel == "global":
        return -(-window.length // queries)
    if isinstance(window, Layout):
        is_step, is_key = kernel == "step", kernel == "key"
        return _layout_blocks(window, owned, walked, all_owned=is_step, by_key=is_key)
    rects = rectangles(window, mirrored=kernel == "key")
    if kernel == "tile":
        parts = -(-window.tile // owned) * len(chunk_sizes(window))
        return parts * sum(-(-area(rect) // walked) for rect in rects)
    return sum(
        -(-_clipped(window, rect, chunk, part * owned, owned) // walked)
        for chunk in chunk_sizes(window)
        for part in range(-(-chunk[2] * chunk[3] // owned))
        for rect in rects
    )


def chunk_sizes(window: Window | Layout) -> list[tuple[int, int, int, int]]:
    """Return (first row, first column, rows, columns) of each chunk, clipped to the grid."""
    (X, Y), w = window.grid, window.size
    return [(x, y, min(w, X - x), min(w, Y - y)) for x in range(0, X, w) for y in range(0, Y, w)]


def _clipped(window: Window, rect: Rectangle, chunk: Sequence[int], first: int, size: int) -> int:
    """Count the keys in a rectangle that a kernel visits for one block of queries.

    For the kernel "key", swap the words "queries" and "keys" in this text.
    chunk: the chunk that has the block: (first row, first column, rows, columns).
    rect: (top, bottom, left, right), relative to the chunk's first token.
    first: index in the chunk of the block's first query. size: number of queries in the block.
    """
    x0, y0, rows, cols = chunk
    top, bottom, left, right = x0 + rect[0], x0 + rect[1], y0 + rect[2], y0 + rect[3]
    if window.mask == Mask.EXACT:
        last = min(first + size, rows * cols) - 1
        top = max(top, x0 + first // cols - window.size)
        bottom = min(bottom, x0 + last // cols + window.size + 1)
    if window.mask != Mask.CYCLIC:
        top, bottom = max(top, 0), min(bottom, window.grid[0])
        left, right = max(left, 0), min(right, window.grid[1])
    return max(0, bottom - top) * max(0, right - left)


def _layout_blocks(
    layout: Layout, owned: int, walked: int, *, all_owned: bool, by_key: bool
) -> int:
    """Count the blocks of scores that a kernel computes per image, as the mean over heads.

    Each program of the kernel loads one block of `owned` tokens and loops over blocks of `walked`
    tokens. by_key: whether the loaded tokens are keys and the others queries; False for the
    reverse. all_owned: count a loaded chunk at the border of the grid as a full chunk.
    """
    lists = layout.lists
    parts = [-(-rows * cols // owned) for _, _, rows, cols in chunk_sizes(layout)]
    if all_owned:
        parts = [-(-layout.tile // owned)] * len(parts)
    chunks = (lists.key if by_key else lists.query).bincount(minlength=len(parts)).tolist()
    pairs = sum(part * count for part, count in zip(parts, chunks))
    return pairs * -(-layout.tile // walked) // layout.heads
