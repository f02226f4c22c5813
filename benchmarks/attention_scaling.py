"""Time attention per query-key pair and per token, for grids of 14x14 to 512x512 tokens.

  python benchmarks/attention_scaling.py
  python benchmarks/attention_scaling.py --sides 56 112 --dtypes float32 --backends native

All grids have about the same number of tokens in total, because larger grids have smaller batches.
A pair is a query and a key that it attends to. Grids and backends are timed in interleaved rounds,
and the results are medians. chunk_handgrad uses the algorithm of the 2021 code. sdpa is torch's
full attention, so its pairs are all pairs. flex has no backward pass on CPUs. sdpa and flex do not
run on large grids. The script also plots the times per token.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from shared import CPU, RESULTS, add_json, make_parser, write_json

from vil.ops import BACKENDS, Case, Window
from vil.ops.testing import make_inputs
from vil.utils.interleaved_timer import Candidate, Limits, time_interleaved
from vil.utils.machine import free_bytes, machine
from vil.workflows.benchmark_attention import (
    BASELINES,
    count_pairs,
    make_candidate,
    reasons_against,
)

SIDES = (14, 28, 56, 112, 224, 512)
WINDOW, HEADS, CHANNELS = 7, 2, 32
NAMES = ("native", "blocked", "chunk_handgrad", "flex", "sdpa")
LARGEST = {"sdpa": 56, "flex": 112}  # {backend: side of the largest grid on which it runs}
FORWARD_ONLY = ("flex",)
SLOW = Limits(slow=3.0, too_slow=1000.0)


def make_candidates(side: int, tokens: int, dtype: torch.dtype, names: list[str]) -> dict:
    """Return {backend: (functions to time, query-key pairs of all images and heads, tokens of all
    images)} for a grid. side: side of the grid. tokens: tokens of all images together."""
    batch = max(1, round(tokens / side**2))
    case = Case(Window((side, side), WINDOW), batch, HEADS, CHANNELS, 1, dtype)
    inputs, found = make_inputs(case), {}
    for name in names:
        grad = name not in FORWARD_ONLY
        wanted = replace(case, needs_grad=grad)
        if side > LARGEST.get(name, side) or reasons_against(name, wanted, free_bytes(CPU) / 2):
            continue
        candidate = make_candidate(name, wanted, inputs)
        if not grad:
            candidate = Candidate(candidate.forward)
        pairs = count_pairs(case.window, 1) if name in BACKENDS else side**2 * (side**2 + 1)
        found[name] = candidate, batch * HEADS * pairs, batch * side**2
    return found


def measure(args: argparse.Namespace, dtype: torch.dtype) -> list[dict]:
    """Time all grids and backends in interleaved rounds. Returns a row per grid and backend."""
    tokens = max(args.sides) ** 2
    cases = {
        (name, side): candidate
        for side in args.sides
        for name, candidate in make_candidates(side, tokens, dtype, args.backends).items()
    }
    keys = {f"{name} {side}": (name, side) for name, side in cases}
    candidates = {key: cases[case][0] for key, case in keys.items()}
    times, failed = time_interleaved(candidates, args.rounds, CPU, limits=SLOW)
    rows = []
    for key, each in times.items():
        name, side = keys[key]
        _, pairs, count = cases[name, side]
        row = dict(backend=name, side=side, dtype=str(dtype).removeprefix("torch."))
        row["forward_ns_per_pair"] = 1e6 * each.forward_ms / pairs
        row["forward_us_per_token"] = 1e3 * each.forward_ms / count
        if name not in FORWARD_ONLY:
            row["both_ns_per_pair"] = 1e6 * each.total_ms / pairs
            row["both_us_per_token"] = 1e3 * each.total_ms / count
        rows.append(row)
    for key, reason in failed.items():
        print(f"{key}: {reason}")
    return rows


def show(rows: list[dict], sides: list[int]) -> None:
    """Print the times per pair and per token, a line per backend."""
    for unit in ("forward_ns_per_pair", "both_ns_per_pair", "both_us_per_token"):
        print(f"\n{rows[0]['dtype']}, {unit.replace('_', ' ')}: grid side {sides}")
        for name in dict.fromkeys(row["backend"] for row in rows):
            cells = {row["side"]: row.get(unit) for row in rows if row["backend"] == name}
            shown = (cells.get(side) for side in sides)
            print(
                f"  {name:16}" + "".join(f"{'-' if x is None else f'{x:.3f}':>10}" for x in shown)
            )


def plot(rows: list[dict], file: Path) -> None:
    """Plot the time of both passes per token against the side of the grid."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure = Figure(figsize=(5 * len(dtypes), 4), layout="constrained")
    for axes, dtype in zip(figure.subplots(1, len(dtypes), squeeze=False)[0], dtypes):
        for name in dict.fromkeys(row["backend"] for row in rows):
            points = [
                (row["side"], row["both_us_per_token"])
                for row in rows
                if (row["backend"], row["dtype"]) == (name, dtype) and "both_us_per_token" in row
            ]
            if points:
                axes.loglog(*zip(*points), "o-", label=name, base=2)
        axes.set(title=dtype, xlabel="tokens per side", ylabel="microseconds per token")
        sides = sorted({row["side"] for row in rows})
        axes.set_xticks(sides, labels=map(str, sides))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylim(top=3 * axes.get_ylim()[1])  # room for the legend
        axes.legend(ncols=2, loc="upper left")
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sides", nargs="+", type=int, default=list(SIDES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--backends",
        nargs="+",
        default=list(NAMES),
        choices=[*BACKENDS, *BASELINES],
        metavar="NAME",
    )
    parser.add_argument("--rounds", type=int, default=9)
    add_json(parser, RESULTS / "attention-scaling-cpu.json")
    args = parser.parse_args()
    rows = []
    for dtype in args.dtypes:
        rows += (found := measure(args, getattr(torch, dtype)))
        show(found, args.sides)
    about = machine(CPU)
    write_json(args.json, {"machine": about, "window": WINDOW, "rows": rows})
    if args.json:
        plot(rows, args.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
