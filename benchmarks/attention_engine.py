"""Compare local attention with targets for speed and memory, and print a line for each target.

  python benchmarks/attention_engine.py            all parts, and benchmarks/results/*.json
  python benchmarks/attention_engine.py A B        some parts; writes no file

A speed   B memory   C growth with the grid   E random shift

Shapes: B images, N heads, D head dim, w side of a chunk in tokens.

A line has the form "name: value (wanted ...)". "x faster" is the time of the other attention,
divided by that of ours. "floor" is the time of the matmuls of the attended query-key pairs alone,
in the same run. "sliding chunks" is the backend chunk_handgrad. Unless stated otherwise: two
threads; B 2, N 12, D 64, w 8, one global token, and nine chunks that are cut at the border; medians
of nine interleaved rounds of forward and backward.
"""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from shared import CPU, RESULTS, add_json, make_parser, resident_bytes, time_all, write_json

from vil.ops import Case, Window, choose
from vil.ops.testing import make_inputs
from vil.utils.interleaved_timer import Times, peak_bytes
from vil.utils.machine import machine
from vil.workflows.benchmark_attention import FLOOR, Row, count_pairs, make_candidate, measure

THREADS, ROUNDS = 2, 9
OURS, BASE = "blocked", "chunk_handgrad"
RESULT = RESULTS / "attention-engine-cpu.json"
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


def shift() -> Iterator[Ratio]:
    """E: compare random shift, which attends to the self chunk and one neighbor, with all nine
    chunks."""
    nine, two = make_case(56), make_case(56, mode=1)
    for label, names in (("auto", (choose(nine), choose(two))), (OURS, (OURS, OURS))):
        times = time_backends(nine=(names[0], nine), two=(names[1], two))
        share = times["two"].total_ms / times["nine"].total_ms
        yield Ratio(f"E 56x56, {label}: one neighbour over all nine", share, None, 0.35)


PARTS = dict(zip("ABCE", (speed, memory, growth, shift)))


def run(parts: list[str], file: Path | None) -> None:
    """Measure the parts and print each ratio when it is known. file: JSON file for the ratios and
    all measurements; None to write no file."""
    torch.set_num_threads(THREADS)
    about = machine(CPU)
    print(f"{about['name']}, {THREADS} threads, torch {about['torch']}\n")
    ratios = []
    for part in parts:
        for ratio in PARTS[part]():
            print(ratio, flush=True)
            ratios.append(vars(ratio) | {"wanted": ratio.wanted, "kept": ratio.kept})
    write_json(
        file, {"machine": about, "ratios": ratios, "rows": [row.plain() for row in MEASURED]}
    )


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_json(parser)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts: {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed rounds ({ROUNDS})")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))} (choices: {', '.join(PARTS)})")
    ROUNDS = args.rounds
    run(args.parts or list(PARTS), args.json or (None if args.parts else RESULT))
