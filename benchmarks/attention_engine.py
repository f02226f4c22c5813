"""Compare local attention with targets for speed and memory, and print a line for each target.

  python benchmarks/attention_engine.py            parts A to F, and benchmarks/results/*.json
  python benchmarks/attention_engine.py A B        some parts; writes no file
  python benchmarks/attention_engine.py H --json FILE

A speed   B memory   C growth with the grid   D the backend that `auto` selects, tuned and untuned
E random shift   F small calls
H speed and memory on a GPU: bfloat16, B 8, N 6, 56x56 and 128x128, with bias

Shapes: B images, N heads, D head dim, w side of a chunk in tokens.

A line has the form "name: value (wanted ...)". "x faster" is the time of the other attention,
divided by that of ours. "floor" is the time of the matmuls of the attended query-key pairs alone,
in the same run. "sliding chunks" is the backend chunk_handgrad. Unless stated otherwise: two
threads; B 2, N 12, D 64, w 8, one global token, and nine chunks that are cut at the border; medians
of nine interleaved rounds of forward and backward.
"""

import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from shared import CPU, MIB, RESULTS, add_json, make_parser, time_all, write_json

from vil.bench.attention import FLOOR, Row, measure, plain
from vil.bench.baselines import count_pairs, make_candidate
from vil.ops import Case, Window, choose
from vil.ops.backends import chunk_groups
from vil.ops.testing import make_inputs
from vil.utils.interleaved_timer import Candidate, Times, peak_bytes
from vil.utils.machine import machine
from vil.utils.resident_memory import resident_bytes

THREADS, ROUNDS = 2, 9
OURS, BASE = "blocked", "chunk_handgrad"
RESULT = RESULTS / "attention-engine-cpu.json"
NEAR = 2.5  # times the tuner's fastest time: the truly fastest backend is assumed to be within it
GIB = 2**30
MEASURED: list[Row] = []


@dataclass(frozen=True)
class Ratio:
    """Measured value with its target, which is a lower bound, an upper bound, both, or none."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def wanted(self) -> str:
        bounds = {">=": self.at_least, "<=": self.at_most}
        return " and ".join(f"{sign} {n:g}" for sign, n in bounds.items() if n is not None)

    @property
    def kept(self) -> bool:
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    def __str__(self) -> str:
        wanted = f" (wanted {self.wanted})" if self.wanted else ""
        return f"{self.name}: {self.value:.3g}{wanted}{'' if self.kept else '  <- missed'}"


def make_case(side: int, size: int = 8, *, mode=0, exact=0, bias: bool = True, **spec) -> Case:
    """Return an attention call on a square grid, with this script's defaults for missing sizes.

    side: side of the grid in tokens. size: chunk side. mode, exact: values of the config keys MODE
    and SW_EXACT. bias: use the biases between local tokens and to global tokens, or none. spec:
    other fields of the `Case`.
    """
    spec = dict(batch=2, heads=12, head_dim=64, num_global=1) | spec
    window = Window.from_mode((side, side), size, exact, mode)
    return Case(window, **spec, table_bias=bias, global_bias=bias and spec["num_global"] > 0)


@cache
def measure_once(case: Case, *names: str) -> dict[str, Row]:
    """Return {backend: row}. A call is measured once per run of this script. Fails if a backend
    cannot be measured."""
    rows = measure(case, names, ROUNDS)
    MEASURED.extend(rows)
    for row in rows:
        assert row.total_ms is not None, f"{row.backend}: {row.reason}"
    return {row.backend: row for row in rows}


def time_backends(**entries: tuple[str, Case]) -> dict[str, Times]:
    """Time backends on different attention calls in interleaved rounds. entries: pairs (backend,
    attention call) by label."""
    return time_all(
        {
            label: make_candidate(name, case, make_inputs(case))
            for label, (name, case) in entries.items()
        },
        ROUNDS,
    )


def ours(case: Case) -> list[str]:
    """Return the backend with the targets, and the backend that `auto` selects if it is another."""
    return list(dict.fromkeys((OURS, choose(case))))


def speed() -> Iterator[Ratio]:
    """A: compare with full attention, the floor, the sliding chunks, and float32 with bfloat16."""
    for bias in (False, True):
        case = make_case(56, bias=bias)
        text = f"56x56 {'with' if bias else 'without'} bias"
        rows = measure_once(case, *ours(case), BASE, "sdpa")
        for name in ours(case):
            row = rows[name]
            yield Ratio(f"A {text}, {name}: x faster than full sdpa", 1 / row.over_sdpa, 2.5)
            yield Ratio(f"A {text}, {name}: time over floor", row.over_floor, None, 2.0)
            share = row.forward_ms / rows[FLOOR].forward_ms
            yield Ratio(f"A {text}, {name}: forward over its two products", share, None, 2.0)
            yield Ratio(f"A {text}, {name}: x faster than {BASE}", 1 / row.over_chunk_handgrad, 2.0)
            half = replace(case, dtype=torch.bfloat16)
            times = time_backends(single=(name, case), half=(name, half))
            faster = times["single"].total_ms / times["half"].total_ms
            yield Ratio(f"A {text}, {name}: bfloat16 x faster than float32", faster, 1.6)
    for side in (14, 28):
        case = make_case(side, 7, batch=16, heads=3, head_dim=32)
        rows = measure_once(case, *ours(case), BASE)
        for name in ours(case):
            text = f"A {side}x{side} w 7 B 16 N 3 D 32, {name}: x faster than {BASE}"
            yield Ratio(text, 1 / rows[name].over_chunk_handgrad, 2.0)
    case = make_case(32)
    rows = measure_once(case, *ours(case), "sdpa")
    for name in ours(case):
        yield Ratio(f"A 32x32, {name}: x faster than full sdpa", 1 / rows[name].over_sdpa, 1.0)


def memory() -> Iterator[Ratio]:
    """B: measure the peak of the tensors, without inputs, output and gradients."""
    for bias in (False, True):
        case = make_case(56, bias=bias)
        rows = measure_once(case, *ours(case), BASE, "sdpa")
        for name in ours(case):
            text = f"B 56x56 {'with' if bias else 'without'} bias, {name}: "
            yield Ratio(f"{text}MiB at the peak", rows[name].extra_mib)
            share = rows[name].extra_mib / rows[BASE].extra_mib
            yield Ratio(f"{text}memory over {BASE}'s", share, None, 1 / 8)


def growth() -> Iterator[Ratio]:
    """C: measure the time per pair on a large grid, and the memory on a very large grid."""
    small, large = (make_case(side, batch=1) for side in (56, 224))
    more = count_pairs(large.window, 1) / count_pairs(small.window, 1)
    for name in ours(large):
        times = time_backends(small=(name, small), large=(name, large))
        per_pair = times["large"].total_ms / times["small"].total_ms / more
        yield Ratio(f"C B 1, {name}: time per pair at 224x224 over 56x56", per_pair, None, 1.2)
    case = make_case(512, 7, batch=1, heads=3, head_dim=32)
    for name in ours(case):
        with multiprocessing.get_context("spawn").Pool(1) as fresh:  # its peak starts at 0
            grown, peak = fresh.apply(process_memory, (name, case))
        text = f"C 512x512 w 7 B 1 N 3 D 32, {name}: GiB"
        yield Ratio(f"{text} that the process grew by", grown / GIB, None, 3.0)
        yield Ratio(f"{text} of tensors beyond inputs", peak / GIB, None, 3.0)


def process_memory(name: str, case: Case) -> tuple[int, int]:
    """Run one forward and backward pass. Returns (growth of the process's peak resident memory,
    peak of the tensors beyond the inputs), in bytes."""
    torch.set_num_threads(THREADS)
    one, before = make_candidate(name, case, make_inputs(case)), resident_bytes("VmRSS")
    one.backward(one.forward())
    grown = resident_bytes("VmHWM") - before
    return grown, peak_bytes(one, CPU)[0]


def choices() -> Iterator[Ratio]:
    """D: compare the backends that `auto` selects untuned and tuned with the fastest backend and
    with the sliding chunks."""
    from vil.ops.dispatch import CHOICES
    from vil.ops.tuning import tuner

    mean = statistics.geometric_mean
    slower: dict[str, list[float]] = {}
    faster: dict[str, list[float]] = {}
    print("  case: best, untuned, tuned: time of the last two over the best's")
    for case in VARIETY:
        CHOICES.clear()
        untuned = choose(case)
        trials = tuner.tune(case)
        tuned = choose(case)
        near = [t.name for t in trials if not t.reason and t.seconds <= NEAR * trials[0].seconds]
        rows = measure(case, dict.fromkeys((untuned, *near, BASE)), ROUNDS)
        MEASURED.extend(rows)
        times = {row.backend: row.total_ms for row in rows if row.total_ms and row.backend != FLOOR}
        best = min(times, key=times.get)
        over = f"{times[untuned] / times[best]:.2f}, {times[tuned] / times[best]:.2f}"
        print(f"  {describe(case)}: {best}, {untuned}, {tuned}: {over}", flush=True)
        for how, name in (("untuned", untuned), ("tuned", tuned)):
            slower.setdefault(how, []).append(times[name] / times[best])
            faster.setdefault(how, []).append(times[BASE] / times[name])
    for how, most, worst in (("tuned", 1.05, 1.2), ("untuned", 1.3, None)):
        text, over = f"D {len(VARIETY)} cases, {how}:", slower[how]
        yield Ratio(f"{text} time over the best's, mean", mean(over), None, most)
        yield Ratio(f"{text} time over the best's, worst", max(over), None, worst)
        gain, least = faster[how], 2.0 if how == "tuned" else None
        yield Ratio(f"{text} x faster than {BASE}, mean", mean(gain), least)
        yield Ratio(f"{text} x faster than {BASE}, worst", min(gain))


def describe(case: Case) -> str:
    """Describe an attention call in one line."""
    window, rows = case.window, case.window.grid[0]
    kind = f"exact {int(window.mask)}, {len(window.offsets)} offsets"
    sizes = f"B {case.batch} N {case.heads} D {case.head_dim} G {case.num_global}"
    return f"{rows}x{rows} w {window.size} {sizes}, {kind}, {'' if case.table_bias else 'no '}bias"


VARIETY = [
    make_case(side, size, batch=batch, heads=heads, head_dim=dim, num_global=g,
            bias=bias, exact=exact, mode=mode)
    for side, size, batch, heads, dim, g, bias, exact, mode in (
        (14, 7, 16, 3, 32, 1, True, 0, 0), (14, 7, 16, 3, 32, 1, True, 0, 3),
        (14, 7, 8, 6, 64, 0, False, -1, 0), (14, 8, 8, 6, 48, 1, True, 1, 0),
        (14, 15, 8, 3, 32, 2, True, 0, 0), (20, 7, 8, 3, 96, 1, False, 0, 0),
        (28, 7, 16, 3, 32, 1, True, 0, 0), (28, 7, 8, 6, 64, 1, True, 1, 0),
        (28, 7, 8, 3, 32, 1, True, 0, 8), (28, 8, 4, 6, 48, 0, False, 0, 0),
        (28, 8, 4, 3, 96, 2, True, -1, 0), (28, 15, 4, 3, 64, 1, True, 0, 0),
        (32, 8, 2, 12, 64, 1, True, 0, 0), (32, 8, 2, 12, 64, 1, True, 0, -1),
        (40, 15, 2, 3, 32, 1, True, 0, 0), (40, 7, 4, 3, 48, 0, True, -1, 5),
        (48, 8, 2, 6, 32, 1, False, 1, 0), (56, 7, 4, 3, 32, 1, True, 0, 0),
        (56, 7, 4, 3, 32, 1, True, 0, 1), (56, 7, 2, 3, 32, 1, True, 1, 0),
        (56, 8, 2, 12, 64, 1, True, 0, 0), (56, 8, 2, 6, 96, 0, False, -1, 0),
        (56, 15, 1, 3, 64, 1, True, 0, 0), (64, 8, 1, 6, 48, 2, False, 0, 0),
        (72, 15, 1, 3, 48, 0, True, -1, 0), (96, 7, 1, 3, 32, 1, True, 0, 0),
        (96, 8, 1, 6, 64, 1, False, 0, 2), (96, 15, 1, 3, 32, 0, False, 1, 0),
    )
]  # fmt: skip


def shift() -> Iterator[Ratio]:
    """E: compare random shift, which attends to the self chunk and one neighbor, with all nine
    chunks."""
    nine, two = make_case(56), make_case(56, mode=1)
    for label, names in (("auto", (choose(nine), choose(two))), (OURS, (OURS, OURS))):
        times = time_backends(nine=(names[0], nine), two=(names[1], two))
        share = times["two"].total_ms / times["nine"].total_ms
        yield Ratio(f"E 56x56, {label}: one neighbour over all nine", share, None, 0.35)


def small_calls() -> Iterator[Ratio]:
    """F: measure the small feature maps of a detector, for four images of several sizes. One chunk
    group with a border of empty chunks is compared with nine chunk groups without a border."""
    for side, size, heads in ((12, 3, 4), (24, 3, 2), (48, 4, 1)):
        case = make_case(side, size, batch=4, heads=heads, head_dim=32, valid=True)
        entries = {name: make_candidate(name, case, make_inputs(case)) for name in ours(case)}
        entries["nine cuts"] = without_border(make_candidate(OURS, case, make_inputs(case)))
        times = time_all(entries, ROUNDS)
        for name in ours(case):
            gain = times["nine cuts"].total_ms / times[name].total_ms
            text = f"F {side}x{side} w {size} N {heads}, {name}: x faster than nine cuts"
            yield Ratio(text, gain)


def without_border(entry: Candidate) -> Candidate:
    """Return a candidate that uses nine chunk groups on the smallest grids too."""

    def patch(call: Callable) -> Callable:
        def patched(*arguments):
            with mock.patch.object(chunk_groups, "MAX_EMPTY_SCORES", 0):
                return call(*arguments)

        return patched

    return replace(entry, forward=patch(entry.forward), backward=patch(entry.backward))


def on_gpu() -> Iterator[Ratio]:
    """H: compare the fused kernels with sliding chunks, FlexAttention and gathered attention."""
    for side in (56, 128):
        case = make_case(side, batch=8, heads=6, dtype=torch.bfloat16, device="cuda")
        rows = measure_once(case, "triton", "flex", "gathered", BASE)
        triton, text = rows["triton"], f"H {side}x{side}, triton:"
        yield Ratio(f"{text} x faster than {BASE}", 1 / triton.over_chunk_handgrad, 8.0)
        for way in ("forward_ms", "backward_ms"):
            rival = min(getattr(rows[name], way) for name in ("flex", "gathered"))
            share = rival / getattr(triton, way)
            yield Ratio(f"{text} {way[:-3]} x faster than flex and gathered", share, 1.3)
        inputs = make_inputs(case)
        q, k = inputs.q.nbytes, inputs.k.nbytes  # of q, out and dq; of k, v, dk and dv
        share = triton.extra_mib * MIB / (3 * q + 4 * k)
        yield Ratio(f"{text} extra memory over inputs, output and gradients", share, None, 0.1)


PARTS = dict(zip("ABCDEFH", (speed, memory, growth, choices, shift, small_calls, on_gpu)))
ON_CPU = tuple("ABCDEF")


def run(parts: list[str], file: Path | None) -> None:
    """Measure the parts and print each ratio when it is known. file: JSON file for the ratios and
    all measurements; None to write no file."""
    torch.set_num_threads(THREADS)
    about = machine(torch.device("cuda") if "H" in parts else CPU)
    print(f"{about['name']}, {THREADS} threads, torch {about['torch']}\n")
    ratios = []
    for part in parts:
        for ratio in PARTS[part]():
            print(ratio, flush=True)
            ratios.append(vars(ratio) | {"wanted": ratio.wanted, "kept": ratio.kept})
    write_json(file, {"machine": about, "ratios": ratios, "rows": plain(MEASURED)})


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_json(parser)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts: {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed rounds ({ROUNDS})")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))} (choices: {', '.join(PARTS)})")
    ROUNDS = args.rounds
    run(args.parts or list(ON_CPU), args.json or (None if args.parts else RESULT))
