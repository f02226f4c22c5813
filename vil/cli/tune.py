"""Find the fastest backend of local attention for each stage of a config, by trying all.

  vil tune --config-file imagenet/vil_small_rpb.yaml DATALOADER.BSZ 128
  vil tune --config-file imagenet/vil_small_rpb.yaml --backends blocked,gathered AMP.ENABLED True
  vil tune --config-file mine.yaml --import my_backend.py

Every candidate's output and gradients are compared with the reference before it is timed. The
choices are kept for this machine and this version in $VIL_CACHE/attention.json (~/.cache/vil);
`vil train`, `evaluate` and `predict` take them from there (with the same --import), and `vil info`
shows them. DATALOADER.BSZ is that of one process here.
"""

import argparse

from vil.cli.arguments import config_arguments, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    add = parser.add_argument
    add("--backends", metavar="A,B", help="the candidates, by default all")
    add("--rounds", type=int, default=7, metavar="N", help="measurements of each (7)")
    add("--max-gib", type=float, metavar="X", help="most that one may hold (half of what is free)")


def run(args: argparse.Namespace) -> int:
    from vil.workflows.backends import Tuning

    names = [name.strip() for name in args.backends.split(",")] if args.backends else None
    tuning = Tuning(resolve(args), names, rounds=args.rounds, max_gib=args.max_gib)
    if not tuning.requests:
        print("no stage has longformer attention: nothing to tune")
        return 0
    for request in tuning.requests:
        print(tuning.describe(request), flush=True)
        print("\n".join(tuning.run(request)), flush=True)
    if not tuning.found:
        print("no candidate can run: nothing is kept")
    elif file := tuning.save():
        print(f"{len(tuning.found)} choices kept in {file}")
    return 0
