"""Compare attention patterns with torch's masked attention.

  python benchmarks/layouts.py               all parts, and benchmarks/results/layouts-cpu.json
  python benchmarks/layouts.py speed memory  some parts; writes no file

speed      time of the backends blocked and native, compared with scaled_dot_product_attention and
           the same boolean mask; and time per computed pair, compared with a window
memory     peak of the tensors without inputs, output and gradients, compared with the same mask and
           with a learned dense bias
large      memory of the process on 256 x 256 tokens

All parts use two threads, float32 and head dim 64. Times are medians of interleaved rounds of
forward and backward. Density is the fraction of all pairs of chunks that are computed.
"""

import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from attention_engine import GIB, Ratio, process_memory
from shared import CPU, MIB, RESULTS, add_json, make_parser, time_all, write_json

from vil.ops import BACKENDS, Case, Layout, Window, patterns
from vil.ops.custom_op import num_pairs
from vil.ops.patterns import parse_pattern
from vil.ops.testing import Inputs, make_inputs
from vil.utils.interleaved_timer import Candidate, peak_bytes
from vil.utils.machine import machine
from vil.workflows.benchmark_attention import differentiate, make_candidate, masked_sdpa

THREADS, ROUNDS = 2, 9
RESULT = RESULTS / "layouts-cpu.json"
SPARSE, COMPILED = "blocked", "native"  # the second needs a C++ compiler


def chunk_mask(side: int, chunk: int, density: float, seed: int = 0) -> patterns.Pattern:
    """Return a pattern of random pairs of chunks, in which each chunk also attends to itself."""
    count = math.ceil(side / chunk) ** 2
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(count, count, generator=generator).fill_diagonal_(-1).flatten().argsort()
    blocks = torch.zeros(count * count, dtype=torch.bool)
    blocks[order[: max(count, round(density * count * count))]] = True
    return patterns.from_blocks(blocks.view(count, count), chunk)


def make_case(window: Window | Layout, batch: int = 2, heads: int = 12, **spec: Any) -> Case:
    return Case(window, batch, heads, 64, **spec)


def layout_of(side: int, pattern: patterns.Pattern | str, chunk: int = 8) -> Layout:
    pattern = parse_pattern(pattern) if isinstance(pattern, str) else pattern
    return Layout((side, side), chunk, pattern)


def biased_sdpa(case: Case, inputs: Inputs) -> Candidate:
    """Return torch's attention with a dense bias (N, L, L) from a learned table, to time it."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.table)]
    layout = case.window
    pairs = patterns.Pairs.every(layout.grid)
    index = layout.bias_index(pairs.rows, pairs.cols)

    def attend() -> torch.Tensor:
        bias = leaves[3][:, index].masked_fill(~layout.mask, -torch.inf)
        return F.scaled_dot_product_attention(*leaves[:3], bias)

    return differentiate(attend, leaves, inputs.cotangent)


def measure(candidates: dict[str, Candidate]) -> dict[str, float]:
    """Return {name: median seconds of forward and backward}, measured in interleaved rounds."""
    return {
        name: statistics.median(map(sum, zip(each.forward, each.backward)))
        for name, each in time_all(candidates, ROUNDS).items()
    }


def computed_pairs(window: Window | Layout) -> int:
    """Return the number of query-key pairs that are computed for one image and head."""
    return num_pairs(window, 0)


def sparse_backends(case: Case) -> list[str]:
    """Return the backends that run on this machine and compute only the attended chunks."""
    return [SPARSE] if BACKENDS[COMPILED].reasons_against(case) else [SPARSE, COMPILED]


def speed() -> Iterator[Ratio]:
    """Compare the time of layouts with a dense mask and, per computed pair, with a window."""
    plain = make_case(Window.from_mode((56, 56), 8, 0, 0))
    inputs = make_inputs(plain)
    names = sparse_backends(plain)
    of_window = {f"window {name}": make_candidate(name, plain, inputs) for name in names}
    for side, name, pattern, wanted in (
        (56, "random chunks, 30 %", chunk_mask(56, 8, 0.3), 2.2),
        (56, "axial | local:3", "axial | local:3", None),
        (56, "axial", "axial", None),
        (64, "random chunks, 10 %", chunk_mask(64, 8, 0.1), 5.0),
        (64, "local:4", "local:4", None),
    ):
        case = make_case(layout_of(side, pattern))
        inputs = make_inputs(case)
        ours = {name: make_candidate(name, case, inputs) for name in names}
        times = measure({**ours, **of_window, "sdpa": masked_sdpa(case, inputs)})
        work = computed_pairs(case.window) / computed_pairs(plain.window)
        for backend in names:
            text = f"{side}x{side} {name} (density {case.window.density:.0%}), {backend}: "
            least, most = (wanted, 1.15) if wanted and backend == names[-1] else (None, None)
            share = times[backend] / times[f"window {backend}"] / work
            yield Ratio(f"{text}x faster than masked sdpa", times["sdpa"] / times[backend], least)
            yield Ratio(f"{text}time per computed pair over a window's", share, None, most)


def memory() -> Iterator[Ratio]:
    """Compare the peak memory of a layout with that of a dense mask and a dense bias."""
    pattern = chunk_mask(56, 8, 0.3)
    for bias, dense, most in ((False, masked_sdpa, 1.0), (True, biased_sdpa, 1 / 8)):
        case = make_case(layout_of(56, pattern), table_bias=bias)
        inputs = make_inputs(case)
        theirs = peak_bytes(dense(case, inputs), CPU)[1]
        for name in sparse_backends(case):
            ours = peak_bytes(make_candidate(name, case, inputs), CPU)[1]
            text = f"56x56 random chunks, 30 %, {'with' if bias else 'without'} bias, {name}: "
            yield Ratio(f"{text}MiB at the peak", ours / MIB)
            yield Ratio(f"{text}over the memory of sdpa", ours / theirs, None, most)


def large() -> Iterator[Ratio]:
    """Measure how much forward and backward on a large grid increase the memory of a process."""
    case = make_case(layout_of(256, "local:8 | global_tokens:1"), batch=1, heads=3)
    for name in sparse_backends(case):
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            grown, peak = fresh.apply(process_memory, (name, case))
        text = f"256x256 local:8 | global_tokens:1, B 1, N 3, {name}: GiB"
        yield Ratio(f"{text} that the process grew by", grown / GIB, None, 2.0)
        yield Ratio(f"{text} of tensors beyond inputs", peak / GIB)


PARTS: dict[str, Callable[[], Iterator[Ratio]]] = {
    function.__name__: function for function in (speed, memory, large)
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("parts", nargs="*", help=f"parts: {', '.join(PARTS)} (all)")
    add_json(parser)
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    ratios = []
    for part in args.parts or PARTS:
        for ratio in PARTS[part]():
            print(ratio, flush=True)
            ratios.append(ratio)
    values = [{"name": r.name, "value": r.value, "wanted": r.wanted} for r in ratios]
    file = args.json or (None if args.parts else RESULT)
    write_json(file, {"machine": machine(CPU), "ratios": values})


if __name__ == "__main__":
    main()
