"""Rank attention backends by measured times, to choose the order in which `auto` prefers them.

  vil benchmark attention --device cuda --dtype bfloat16 --grids 14,28,56 --out runs/attention
  python benchmarks/preference.py runs/attention/attention.json

A backend's time in a case (an attention call, forward and backward together) is divided by the time
of the fastest backend in this case. The score of a backend is the geometric mean of these ratios
over all cases that it supports. `auto` selects the first backend in its list that supports a case,
so a backend that supports few cases can still be the first in the list.
"""

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path

from shared import make_parser

from vil.ops import BACKENDS
from vil.ops.dispatch import PREFERENCE
from vil.utils.text_table import align

CASE = ("grid", "window", "mask", "mode", "batch", "heads", "head_dim", "num_global", "dtype")
CASE += ("bias",)


def score(rows: Iterable[dict]) -> dict[str, list[float]]:
    """Return {backend: ratios}, lowest geometric mean first. The ratios are the backend's time,
    divided by that of the fastest backend, in each case that it supports."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["backend"] in BACKENDS and not row["reason"]:
            case = json.dumps([row[name] for name in CASE])
            total = row["forward_ms"] + row["backward_ms"]
            times.setdefault(case, {})[row["backend"]] = total
    found: dict[str, list[float]] = {}
    for by_backend in times.values():
        best = min(by_backend.values())
        for name, value in by_backend.items():
            found.setdefault(name, []).append(value / best)
    return dict(sorted(found.items(), key=lambda item: mean(item[1])))


def mean(ratios: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def run(args: argparse.Namespace) -> None:
    files = [json.loads(file.read_text()) for file in args.files]
    rows = [row for file in files for row in file["rows"]]
    ratios = score(rows)
    lines = [["backend", "cases", "x the fastest, mean", "worst"]]
    for name, values in ratios.items():
        lines.append([name, str(len(values)), f"{mean(values):.2f}", f"{max(values):.2f}"])
    print(align(lines))
    device = rows[0]["device"] if rows else "cpu"
    print(f"\npreferred on {device} now: {', '.join(PREFERENCE[device])}")
    print(f"by these times:         {', '.join(ratios)}")


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="attention.json files")
    return parser.parse_args()


if __name__ == "__main__":
    run(parse())
