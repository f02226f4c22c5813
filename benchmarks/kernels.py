"""Compile the Triton kernels for GPUs that this machine need not have, and print their resources.

  python benchmarks/kernels.py --targets sm_80,sm_90,sm_100,gfx942 --json FILE
  python benchmarks/kernels.py --targets sm_90 --head-dims 64 --dtypes bfloat16

Prints for each kernel, head dim, window and dtype: registers, spilled bytes, shared memory, thread
blocks that fit on a multiprocessor, and numbers of instructions. Compiling all kernels takes some
minutes on two cores.

Also prints lower bounds on the time for 8 images of 56 x 56 tokens and 6 heads, which are computed
from published rates of the GPUs, and the same bounds for an ideal fused attention on the same
query-key pairs. `ratio` is the first bound divided by the second, for both passes together. No time
is measured.

  python benchmarks/kernels.py --read FILE    print the table in a file without compiling
  python benchmarks/kernels.py --device       load the kernels on this machine's GPU; compare the
                                              driver's numbers with those in results/kernels.json
"""

import argparse
import time
from pathlib import Path

import torch
from shared import RESULTS, add_json, make_parser

from vil.bench.kernel_device import compare, load_kernels
from vil.bench.kernel_roofline import format_predictions, predict_rows
from vil.bench.kernel_table import (
    DTYPES,
    HEAD_DIMS,
    TARGETS,
    KernelRow,
    compile_rows,
    format_rows,
    list_jobs,
    read_table,
    write_table,
)


def describe() -> dict[str, str]:
    """Return the versions on which the results depend."""
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}


def run(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    if args.device:
        jobs = [job[1:] for job in list_jobs(["device"], args.head_dims, args.dtypes)]
        table, _ = read_table(args.read or RESULTS / "kernels.json")
        print(compare(list(load_kernels(jobs)), table))
        return
    if args.read:
        rows, _ = read_table(args.read)
        rows = [row for row in rows if is_wanted(row, args)]
    else:
        jobs = list_jobs(args.targets, args.head_dims, args.dtypes)
        rows = list(compile_rows(jobs, args.processes))
    print(format_rows(rows))
    print(f"\n{format_predictions(predict_rows(rows))}")
    print(f"\n{len(rows)} kernels in {time.perf_counter() - start:.0f} s")
    if args.json:
        write_table(args.json, rows, describe())


def is_wanted(row: KernelRow, args: argparse.Namespace) -> bool:
    """Return whether the command line selects a row."""
    selected = row.target in args.targets and row.head_dim in args.head_dims
    return selected and row.dtype in args.dtypes


def parse() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = make_parser(__doc__)
    parser.add_argument("--targets", type=words, default=list(TARGETS), help="comma-separated")
    parser.add_argument(
        "--head-dims", type=lambda text: [*map(int, words(text))], default=list(HEAD_DIMS)
    )
    parser.add_argument("--dtypes", type=words, default=list(DTYPES))
    parser.add_argument("--processes", type=int, default=2, help="compiling processes (2)")
    parser.add_argument("--read", metavar="FILE", type=Path, help="read a table, do not compile")
    parser.add_argument("--device", action="store_true", help="load the kernels on this GPU")
    add_json(parser)
    return parser.parse_args()


if __name__ == "__main__":
    run(parse())
