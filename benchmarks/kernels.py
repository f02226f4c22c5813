"""Compile the Triton kernels for GPUs that this machine need not have, and print what they take.

  python benchmarks/kernels.py --targets sm_80,sm_90,sm_100,gfx942 --json FILE
  python benchmarks/kernels.py --targets sm_90 --head-dims 64 --dtypes bfloat16

Per kernel, head dim, window and dtype: registers, spilled bytes, shared memory, blocks that fit on
a multiprocessor, and numbers of instructions. A table takes some minutes on two cores.
"""

import argparse
import time

import torch
from shared import add_json, make_parser

from vil.bench.kernel_table import (
    DTYPES,
    HEAD_DIMS,
    TARGETS,
    compile_rows,
    format_rows,
    list_jobs,
    write_table,
)


def describe() -> dict[str, str]:
    """The versions that the results depend on."""
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}


def run(args: argparse.Namespace) -> None:
    start, rows = time.perf_counter(), []
    for row in compile_rows(list_jobs(args.targets, args.head_dims, args.dtypes), args.processes):
        rows.append(row)
    print(format_rows(rows))
    print(f"\n{len(rows)} kernels in {time.perf_counter() - start:.0f} s")
    if args.json:
        write_table(args.json, rows, describe())


def parse() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = make_parser(__doc__)
    parser.add_argument("--targets", type=words, default=list(TARGETS), help="comma-separated")
    parser.add_argument(
        "--head-dims", type=lambda text: [*map(int, words(text))], default=list(HEAD_DIMS)
    )
    parser.add_argument("--dtypes", type=words, default=list(DTYPES))
    parser.add_argument("--processes", type=int, default=2)
    add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(parse())
