"""Measure time and memory of attention: all backends, full attention and bare GEMMs, in one run.

  vil benchmark attention                                          the paper's figure, in fp32
  vil benchmark attention --grids 14,28,56 --window 7,8 --dtype float32,bfloat16 --device cuda
  vil benchmark attention --masks chunks,cyclic --modes 0,1 --backends blocked,chunk_handgrad,sdpa
  vil benchmark attention --plot benchmarks/results/.../attention.json       plot again

Each combination of grid, window, number of heads, dtype, mask and mode is a case. All candidates
take turns on it: the backends that support it, sdpa (full attention, no bias), natten (if
installed; CUDA, exact window, no bias) and floor (only the GEMMs of the attended pairs, a lower
bound). The table has median times, tensor memory beyond inputs, output and gradients, and the ratio
of forward plus backward time to that of chunk_handgrad, sdpa and floor. A star marks the choice of
`auto`. Unsupported candidates give the reason. Writes attention.json, attention.csv and plots to
--out.
"""

import argparse
from dataclasses import fields

from vil.cli.arguments import import_argument, import_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    lists = [
        ("--grids", "14,28,56,112", "feature maps, 14 or 14x20"),
        ("--window", "7", "w, the side of a chunk and the radius of the exact window"),
        ("--heads", "3", "number of heads"),
        ("--dtype", "float32", "of float32, bfloat16, float16, float64"),
        ("--masks", "chunks", "of exact, chunks, cyclic"),
        ("--modes", "0", "0 all nine chunks, 1 to 8 self and a neighbor, -1 self: 0,1,-1"),
    ]
    for flag, default, meaning in lists:
        add(flag, default=default, metavar="A,B", help=f"{meaning} ({default})")
    add("--head-dim", default="32", metavar="D", help="channels of a head (32)")
    add("--batch", default="2", metavar="B", help="images (2)")
    add("--num-global", default="1", metavar="G", help="global tokens (1)")
    add("--bias", action=argparse.BooleanOptionalAction, default=True, help="learned biases")
    add("--backends", metavar="A,B", help="the candidates, sdpa and natten too, by default all")
    add("--rounds", default="9", metavar="N", help="measurements of each, one more warms up (9)")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--out", metavar="DIR", help="benchmarks/results/attention-<machine>-<time> by default")
    add("--max-bytes", metavar="N", help="most that one may hold, as 4e9 (0.8 of what is free)")
    import_argument(parser)
    add("--plot", metavar="FILE", help="plot a result again, in its folder or in --out")


def run(args: argparse.Namespace) -> int:
    from vil.workflows import benchmark_attention as workflow

    if args.plot:
        for file in workflow.draw_again(args.plot, args.out):
            print(file)
        return 0
    import_files(args)
    settings = {field.name: getattr(args, field.name) for field in fields(workflow.Settings)}
    benchmark = workflow.AttentionBenchmark(workflow.Settings(**settings))
    print(benchmark.title)
    for rows in benchmark.run():
        print(table(rows), flush=True)
    for file in benchmark.draw():
        print(file)
    return 0


def table(rows: list) -> str:
    """A case and a line per candidate."""
    spec = rows[0].spec
    across, mode = (
        "{} x {}".format(*spec["grid"]),
        f", mode {spec['mode']}" if spec["mode"] != 0 else "",
    )
    taken = [row.backend for row in rows if row.auto]
    shape = "B {batch}, N {heads}, D {head_dim}, G {num_global}, {dtype}".format(**spec)
    head = (
        f"\n{across} tokens, w {spec['window']}, {spec['mask']}{mode}, {shape}, "
        f"{'bias' if spec['bias'] else 'no bias'}; auto: {', '.join(taken) or 'not measured'}"
    )
    titles = ("forward ms", "backward ms", "MiB", "/ handgrad", "/ sdpa", "/ floor")
    lines = [head, f"  {'':20}" + "".join(f"{title:>12}" for title in titles)]
    return "\n".join([*lines, *map(line, rows)])


def line(row) -> str:
    """A candidate's numbers, or why it has none."""
    name = f"  {row.backend + (' *' if row.auto else ''):20}"
    if row.total_ms is None:
        return f"{name}  {row.reason}"
    columns = (
        (row.forward_ms, 2), (row.backward_ms, 2), (row.extra_mib, 1),
        (row.over_chunk_handgrad, 2), (row.over_sdpa, 2), (row.over_floor, 2),
    )  # fmt: skip
    cells = "".join(f"{'-' if x is None else f'{x:.{places}f}':>12}" for x, places in columns)
    return f"{name}{cells}" + (f"  ({row.note})" if row.note else "")
