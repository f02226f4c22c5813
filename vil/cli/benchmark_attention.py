"""Measure time and memory of all attention backends, of full attention, and of the GEMMs alone.

  vil benchmark attention                              grids of 14x14 to 112x112 tokens, in fp32
  vil benchmark attention --grids 14,28,56 --window 7,8 --dtype float32,bfloat16 --device cuda
  vil benchmark attention --masks chunks,cyclic --modes 0,1 --backends blocked,chunk_handgrad,sdpa
  vil benchmark attention --grids 28,56 --window 8 --pattern "axial | local:5" "random:0.2"

Every combination of the values of --grids, --window, --heads, --dtype, --masks and --modes is
measured. With --pattern, the patterns replace masks and modes. The rows of the table are the
backends and four baselines. All of them run alternately. The baselines have no bias:

  sdpa         full attention
  sdpa_masked  full attention with the pattern as mask
  natten       exact window, on CUDA, if natten is installed
  floor        only the GEMMs of the attended query-key pairs, a lower bound on the time

The columns are the median times of the forward and the backward pass, the peak tensor memory in MiB
without inputs, output and gradients, and the total time relative to the backend chunk_handgrad, to
sdpa and to floor. A star marks the backend that `auto` selects. A row without numbers has the
reason why the combination is not supported. Writes attention.json and attention.csv to --out.
"""

import argparse

from vil.cli.arguments import at_least, height_width, import_argument, listed
from vil.config.plugins import run_imports
from vil.utils.text_table import align

# flag: (default, parser of an item or a number, help)
LISTS = {
    "grids": ("14,28,56,112", height_width, "sizes of the token grid, such as 14 or 14x20"),
    "window": ("7", at_least(1), "window sizes w: side of a chunk, and radius of the exact window"),
    "heads": ("3", at_least(1), "numbers of heads"),
    "dtype": ("float32", str, "dtypes: float32, bfloat16, float16, float64"),
    "masks": ("chunks", str, "masks: exact, chunks, cyclic"),
    "modes": (
        "0",
        at_least(-1),
        "modes: 0 all 9 chunks, -1 the query's chunk, 1 to 8 this chunk and a neighbor",
    ),
}
NUMBERS = {
    "head-dim": (32, at_least(1), "channels per head"),
    "batch": (2, at_least(1), "images per batch"),
    "num-global": (1, at_least(0), "number of global tokens"),
    "rounds": (9, at_least(1), "measurements of each backend, after a warm-up"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for flag, (default, item, meaning) in LISTS.items():
        text = f"{meaning} ({default})"
        add(f"--{flag}", type=listed(item), default=default, metavar="A,B", help=text)
    for flag, (default, number, meaning) in NUMBERS.items():
        text = f"{meaning} ({default})"
        add(f"--{flag}", type=number, default=default, metavar="N", help=text)
    text = "patterns to measure instead of windows"
    add("--pattern", nargs="+", default=[], metavar="TEXT", help=text)
    add(
        "--bias",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="add learned biases to the logits",
    )
    text = "backends to measure, or sdpa, natten (default: all)"
    add("--backends", type=listed(), metavar="A,B", help=text)
    add("--device", default="auto", help="auto, cpu or cuda")
    text = "output folder (default: benchmarks/results/attention-<machine>-<time>)"
    add("--out", metavar="DIR", help=text)
    import_argument(parser)


def run(args: argparse.Namespace) -> int:
    from vil.workflows import benchmark_attention as workflow
    from vil.workflows.benchmark_results import ResultFolder

    run_imports(args.imports, ())
    device = workflow.find_device(args.device)
    lists = {name: getattr(args, name) for name in LISTS}
    numbers = {name: getattr(args, name) for name in ("batch", "head_dim", "num_global")}
    cases = workflow.list_cases(
        **lists, **numbers, patterns=args.pattern, bias=args.bias, device=device
    )
    names = workflow.check_names(args.backends)
    results = ResultFolder(args.out, "attention", device)
    print(results.title(f"{len(cases)} cases", args.rounds))
    for rows in workflow.measure_cases(cases, names, args.rounds, results):
        print(table(rows), flush=True)
    return 0


def table(rows: list) -> str:
    """Format the results for one attention setting as a table, with one line per backend. rows:
    result of `vil.workflows.benchmark_attention.measure`."""
    spec = rows[0].spec
    across = "{} x {}".format(*spec["grid"])
    mode = f", mode {spec['mode']}" if spec["mode"] else ""
    taken = [row.backend for row in rows if row.auto]
    shape = "B {batch}, N {heads}, D {head_dim}, G {num_global}, {dtype}".format(**spec)
    head = (
        f"\n{across} tokens, w {spec['window']}, {spec['mask']}{mode}, {shape}, "
        f"{'bias' if spec['bias'] else 'no bias'}; auto: {', '.join(taken) or 'not measured'}"
    )
    cells = [["", "forward ms", "backward ms", "MiB", "/ handgrad", "/ sdpa", "/ floor"]]
    for row in rows:
        numbers = (
            (row.forward_ms, 2), (row.backward_ms, 2), (row.extra_mib, 1),
            (row.over_chunk_handgrad, 2), (row.over_sdpa, 2), (row.over_floor, 2),
        )  # fmt: skip
        shown = ["-" if number is None else f"{number:.{places}f}" for number, places in numbers]
        cells.append([f"  {row.backend}{' *' * row.auto}", *shown])
    reasons = [row.reason if row.total_ms is None else row.note for row in rows]
    notes = ["", *(f"  ({reason})" if reason else "" for reason in reasons)]
    return "\n".join([head, *map(str.__add__, align(cells).splitlines(), notes)])
