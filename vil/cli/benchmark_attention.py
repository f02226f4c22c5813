"""Time and memory of attention: every backend, full attention and the bare products, in one run.

  vil benchmark attention                                          the figure of the paper, fp32
  vil benchmark attention --grids 14,28,56 --window 7,8 --dtype float32,bfloat16 --device cuda
  vil benchmark attention --masks chunks,cyclic --modes 0,1 --backends blocked,chunk_handgrad,sdpa
  vil benchmark attention --plot benchmarks/results/.../attention.json       draw anew

Every grid, window, number of heads, dtype, mask and mode is a case. On each, all candidates take
turns: the backends that can run it, sdpa (full attention, without bias), natten (where installed,
on CUDA, exact window, without bias) and floor (only the products of the pairs visited). Shown are
medians, tensor memory beyond inputs, output and gradients, and forward plus backward over that of
chunk_handgrad, sdpa and floor. A star marks what `auto` takes. What cannot run says why.
attention.json, attention.csv and pictures come to lie in --out.
"""

import argparse
import itertools
import json
from pathlib import Path

from vil.cli.arguments import import_argument, import_file
from vil.cli.benchmark import number, result_folder, split, write_results
from vil.config import ConfigError

DTYPES = ("float32", "bfloat16", "float16", "float64")
MASKS = {"exact": 1, "chunks": 0, "cyclic": -1}
WHAT = "attention"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    lists = [
        ("--grids", "14,28,56,112", "feature maps, 14 or 14x20"),
        ("--window", "7", "w, the side of a chunk and the reach of the exact window"),
        ("--heads", "3", "number of heads"),
        ("--dtype", "float32", f"of {', '.join(DTYPES)}"),
        ("--masks", "chunks", f"of {', '.join(MASKS)}"),
        ("--modes", "0", "0 all nine chunks, 1 to 8 the own and a neighbour, -1 the own: 0,1,-1"),
    ]
    for flag, default, meaning in lists:
        add(flag, default=default, metavar="A,B", help=f"{meaning} ({default})")
    add("--head-dim", default="32", metavar="D", help="channels of a head (32)")
    add("--batch", default="2", metavar="B", help="images (2)")
    add("--num-global", default="1", metavar="G", help="global tokens (1)")
    add("--bias", action=argparse.BooleanOptionalAction, default=True, help="both kinds, learned")
    add("--backends", metavar="A,B", help="the candidates, sdpa and natten too, by default all")
    add("--rounds", default="9", metavar="N", help="measurements of each, one more warms up (9)")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--out", metavar="DIR", help="benchmarks/results/attention-<machine>-<time> by default")
    add("--max-bytes", metavar="N", help="most that one may hold, as 4e9 (0.8 of what is free)")
    import_argument(parser)
    add("--plot", metavar="FILE", help="draw a result's pictures anew, beside it or in --out")


def run(args: argparse.Namespace) -> int:
    if args.plot:
        return redraw(args)
    for file in args.imports:
        import_file(file)
    try:
        rounds, limit = number(args.rounds, "--rounds"), max_bytes(args.max_bytes)
        device = device_of(args.device)
        cases, names = cases_of(args, device.type), names_of(args.backends)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    from vil.ops.tuning import tuning_cache
    from vil.utils.machine import machine

    tuning_cache.load(device.type)
    about = machine(device)
    folder = result_folder(args.out, about, WHAT)
    print(
        f"{about['name']}, {about['threads']} threads, torch {about['torch']}; "
        f"{len(cases)} cases, {rounds} rounds -> {folder}"
    )
    return measure_all(cases, names, rounds, limit, about, folder)


def measure_all(
    cases: list, names: list[str], rounds: int, limit, about: dict, folder: Path
) -> int:
    """Measure and show case by case; what is done is on the disk after each."""
    from vil.bench.attention import measure, plain
    from vil.report.attention_plots import draw

    found: list[dict] = []
    for case in cases:
        rows = measure(case, names, rounds, limit)
        print(table(rows), flush=True)
        found += plain(rows)
        write_results(folder, WHAT, found, about)
    for file in draw(found, about, folder):
        print(file)
    return 0


def cases_of(args: argparse.Namespace, device: str) -> list:
    """The product of all that was asked for; ValueError for what there cannot be."""
    import torch

    from vil.ops import Case, Window
    from vil.utils.lookup import lookup

    dtypes = {name: getattr(torch, name) for name in DTYPES}
    batch, dim = number(args.batch, "--batch"), number(args.head_dim, "--head-dim")
    num_global = number(args.num_global, "--num-global", least=0)
    product = itertools.product(
        [lookup(dtypes, name, "dtype") for name in split(args.dtype, "--dtype")],
        [lookup(MASKS, name, "mask") for name in split(args.masks, "--masks")],
        [number(text, "--modes", least=-1) for text in split(args.modes, "--modes")],
        [number(text, "--window") for text in split(args.window, "--window")],
        [number(text, "--heads") for text in split(args.heads, "--heads")],
        [grid(text) for text in split(args.grids, "--grids")],
    )
    return [
        Case(
            Window.from_mode(place, size, exact, mode),
            batch,
            heads,
            dim,
            num_global,
            dtype,
            device,
            table_bias=args.bias,
            global_bias=args.bias and num_global > 0,
        )
        for dtype, exact, mode, size, heads, place in product
    ]


def names_of(backends: str | None) -> list[str]:
    """The candidates asked for, or all."""
    from vil.bench.baselines import BESIDE
    from vil.ops import BACKENDS
    from vil.utils.lookup import lookup

    names = list({**BACKENDS, **BESIDE}) if backends is None else split(backends, "--backends")
    for name in names:
        lookup({**BACKENDS, **BESIDE}, name, "backend")
    return names


def grid(text: str) -> tuple[int, int]:
    """'14' -> (14, 14), '14x20' -> (14, 20)."""
    sides = [number(side, "--grids") for side in text.lower().split("x")]
    if len(sides) > 2:
        raise ValueError(f"--grids: expected a side or rows x columns, got {text!r}")
    return sides[0], sides[-1]


def max_bytes(text: str | None) -> float | None:
    """A positive number of bytes, or None."""
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise ValueError(f"--max-bytes: expected a number above 0, got {text!r}")
    return found


def device_of(name: str):
    """The torch device; ValueError for one that is not there."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: expected auto, cpu or cuda, got {name!r}")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ValueError("--device cuda: there is no CUDA device (choices: auto, cpu)")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def table(rows: list) -> str:
    """A case and a line per candidate."""
    first = rows[0]
    across, mode = "{} x {}".format(*first.grid), "" if first.mode == 0 else f", mode {first.mode}"
    taken = [row.backend for row in rows if row.auto]
    head = (
        f"\n{across} tokens, w {first.window}, {first.mask}{mode}, B {first.batch}, "
        f"N {first.heads}, D {first.head_dim}, G {first.num_global}, {first.dtype}, "
        f"{'bias' if first.bias else 'no bias'}; auto: {', '.join(taken) or 'not measured'}"
    )
    titles = ("forward ms", "backward ms", "MiB", "/ handgrad", "/ sdpa", "/ floor")
    lines = [head, f"  {'':20}" + "".join(f"{title:>12}" for title in titles)]
    return "\n".join([*lines, *map(line, rows)])


def line(row) -> str:
    """A candidate's figures, or why there are none."""
    name = f"  {row.backend + (' *' if row.auto else ''):20}"
    if row.total_ms is None:
        return f"{name}  {row.reason}"
    figures = (
        (row.forward_ms, 2), (row.backward_ms, 2), (row.extra_mib, 1),
        (row.over_chunk_handgrad, 2), (row.over_sdpa, 2), (row.over_floor, 2),
    )  # fmt: skip
    cells = "".join(f"{'-' if x is None else f'{x:.{places}f}':>12}" for x, places in figures)
    return f"{name}{cells}" + (f"  ({row.note})" if row.note else "")


def redraw(args: argparse.Namespace) -> int:
    """The pictures of a result that was written before."""
    from vil.report.attention_plots import draw

    file = Path(args.plot)
    try:
        found = json.loads(file.read_text())
        rows, about = found["rows"], found["machine"]
    except OSError as error:
        raise ConfigError(f"--plot {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--plot {file}: not a result of vil benchmark attention") from error
    folder = result_folder(args.out or str(file.parent), about, WHAT)
    for picture in draw(rows, about, folder):
        print(picture)
    return 0
