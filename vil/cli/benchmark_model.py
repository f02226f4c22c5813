"""Measure images per second and peak memory of models, in evaluation and in training.

  vil benchmark model                                     vil_tiny and two others, batch 16
  vil benchmark model --config-file imagenet/vil_small.yaml DATALOADER.BSZ 8 --ways fp32,bf16
  vil benchmark model --ways bf16,bf16+nhwc,bf16+compile --backends none --beside none DEVICE cuda
  vil benchmark model --ways bf16 --backends none --beside none --profile

--ways lists combinations of precision, memory format and other settings, such as bf16+nhwc. The
table has these rows:

  the config's model, in each of --ways
  the config's model with each attention backend of --backends, in the first of --ways
  each model of --beside (timm/<name> or torchvision's), in those --ways that are only a precision

A row has the median speeds, their ratios to the first row, and the peak memory of tensors, without
weights, optimizer state and images. If a model cannot run, its row has the reason instead. The
models run alternately, one step at a time. Writes model.json and model.csv to --out.

--profile also profiles a training step in each of --ways without compile. It prints the ten most
expensive operations, writes all operations to costs-<way>.csv, and writes a trace for Perfetto to
trace-<way>.json.gz.
"""

import argparse
from pathlib import Path

from vil.cli.arguments import at_least, config_arguments, listed, resolve
from vil.utils.text_table import align

DEFAULT = "imagenet/vil_tiny.yaml"
BATCH = 16
WAYS = "fp32, tf32, bf16, fp16, nchw, nhwc, compile, checkpoint, reversible"
BESIDE = "timm/swin_tiny_patch4_window7_224,timm/deit_tiny_patch16_224"
SHOWN = 10  # costliest operations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    add = parser.add_argument
    ways = "fp32,fp32+nhwc,bf16,bf16+nhwc,fp32+compile,bf16+compile"
    names = dict(type=listed(), metavar="A,B")
    add("--ways", default=ways, help=f"combinations of {WAYS}, joined by + ({ways})", **names)
    add("--backends", default="all", help="backends to measure: all, none or names", **names)
    add("--beside", default=BESIDE, help=f"other models, or none ({BESIDE})", **names)
    text = "measurements of each row, after a warm-up (9)"
    add("--rounds", type=at_least(1), default=9, metavar="N", help=text)
    add(
        "--out",
        metavar="DIR",
        help="output folder (default: benchmarks/results/model-<machine>-<time>)",
    )
    add("--profile", action="store_true", help="also profile a training step in each of --ways")


def run(args: argparse.Namespace) -> int:
    from vil.workflows.benchmark_model import ModelBenchmark

    if args.config_file is None:
        args.config_file = DEFAULT
        args.opts = [f"DATALOADER.BSZ={BATCH}", *(args.opts or ())]
    benchmark = ModelBenchmark(
        resolve(args),
        Path(args.config_file).stem,
        ways=args.ways,
        backends={("all",): None, ("none",): ()}.get(tuple(args.backends), args.backends),
        beside=() if args.beside == ["none"] else args.beside,
        rounds=args.rounds,
        out=args.out,
    )
    print(benchmark.title)
    print(table(benchmark.run()), flush=True)
    for way, trace, costs in benchmark.profile() if args.profile else ():
        print(f"\n  profile of a training step of {benchmark.name}, {way} (trace: {trace})")
        print(f"  {'module':36}{'pass':10}{'ms':>9}{'share':>8}{'calls':>7}  operator")
        for cost in costs[:SHOWN]:
            print(
                f"  {cost.module:36}{cost.way:10}{1e3 * cost.seconds:9.1f}{cost.share:8.1%}"
                f"{cost.calls:7}  {cost.operator}"
            )
    return 0


def table(rows: list) -> str:
    """Format the results of `ModelBenchmark.run` as a table, with one line per result: a model with
    its settings and attention backend."""
    heads = ["model", "way", "attention", "eval img/s", "train img/s", "eval ratio", "train ratio"]
    cells = [[*heads, "eval MiB", "train MiB"]]
    for row in rows:
        numbers = (
            (row.evaluation, ".1f"), (row.training, ".1f"), (row.over_evaluation, ".2f"),
            (row.over_training, ".2f"), (row.evaluation_mib, ".0f"), (row.training_mib, ".0f"),
        )  # fmt: skip
        shown = ["-" if number is None else f"{number:{form}}" for number, form in numbers]
        cells.append([row.model, row.way, row.attention, *shown])
    reasons = ["", *(f"  ({row.reason})" if row.reason else "" for row in rows)]
    lines = align(cells, num_left=3).splitlines()
    return "\n".join(["", *map(str.__add__, lines, reasons)])
