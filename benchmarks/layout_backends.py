"""Compare the time of attention patterns: vil's backends, and SDPA with the pattern's mask.

  python benchmarks/layout_backends.py --device cuda --dtype bfloat16
  python benchmarks/layout_backends.py --grids 28 --rounds 3 --json FILE

Times the forward and backward pass of one attention call. SDPA is F.scaled_dot_product_attention
with the bool mask (L, L) of L tokens. All of them run in interleaved rounds, after a warm-up in
which they compile. Times are medians. For a backend that cannot run, the reason is printed.
"""

import argparse

import torch
from shared import add_json, make_parser, write_json

from vil.bench.baselines import make_candidate, masked_sdpa
from vil.ops import BACKENDS, Case, patterns
from vil.ops.layout import Layout
from vil.ops.testing import make_inputs
from vil.utils.interleaved_timer import time_interleaved
from vil.utils.machine import machine

PATTERNS = ("local:3", "local:7", "axial", "axial | local:5", "dilated:4", "gaussian:6,0.1")
NAMES = ("triton", "flex", "flex+triton", "blocked", "masked")
SDPA = "sdpa"


def measure(case: Case, names: list[str], rounds: int) -> dict[str, float | str]:
    """Return {backend: milliseconds, or the reason why it does not run}."""
    inputs, device = make_inputs(case), torch.device(case.device)
    reasons = {name: "; ".join(BACKENDS[name].unsupported(case)) for name in names}
    usable = [name for name in names if not reasons[name]]
    candidates = {name: make_candidate(name, case, inputs) for name in usable}
    candidates[SDPA] = masked_sdpa(case, inputs)
    times, failed = time_interleaved(candidates, rounds, device, exempt=[SDPA])
    found = {name: round(times[name].total_ms, 3) for name in candidates if name not in failed}
    return found | {name: text for name, text in (reasons | failed).items() if text}


def case_of(text: str, side: int, args: argparse.Namespace) -> Case:
    layout = Layout((side, side), args.chunk, patterns.parse_pattern(text))
    dtype = getattr(torch, args.dtype)
    return Case(layout, args.batch, args.heads, args.head_dim, 0, dtype, args.device)


def run(args: argparse.Namespace) -> None:
    about, rows = machine(torch.device(args.device)), []
    print(f"{about['name']}, torch {about['torch']}, {args.rounds} rounds, ms and ratio to SDPA")
    print(f"B{args.batch} N{args.heads} D{args.head_dim} {args.dtype}, chunks of {args.chunk}")
    for side in args.grids:
        for text in args.patterns:
            case = case_of(text, side, args)
            times = measure(case, args.backends, args.rounds)
            rows.append(dict(grid=side, pattern=text, density=case.window.density, ms=times))
            print(f"\n{side} x {side}, {text}: {case.window.density:.0%} of the pairs of chunks")
            for name, value in times.items():
                is_time = isinstance(value, float)
                ratio = f" {times[SDPA] / value:6.2f}x" if is_time and SDPA in times else ""
                print(f"  {name:12} " + (f"{value:9.3f}{ratio}" if is_time else value))
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    write_json(args.json, {"machine": about, "settings": settings, "rows": rows})


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=8, help="side of a chunk in tokens")
    parser.add_argument("--grids", type=int, nargs="+", default=[28, 56], help="sides in tokens")
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS))
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=9)
    add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(parse())
