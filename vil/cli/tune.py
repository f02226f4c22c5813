"""Find the fastest backend of local attention for each stage of a config, by trying all.

  vil tune --config-file imagenet/vil_small_rpb.yaml DATALOADER.BSZ 128
  vil tune --config-file imagenet/vil_small_rpb.yaml --backends blocked,gathered AMP.ENABLED True
  vil tune --config-file mine.yaml --import my_backend.py

Every candidate's output and gradients are checked against the definition before it is timed. The
choices are kept for this machine and this version in $VIL_CACHE/attention.json (~/.cache/vil);
`vil train`, `evaluate` and `predict` take them from there (with the same --import), and `vil info`
shows them. DATALOADER.BSZ is that of one process here.
"""

import argparse

from vil.cli.arguments import config_arguments, resolve
from vil.config import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    add = parser.add_argument
    add("--backends", metavar="A,B", help="the candidates, by default all")
    add("--rounds", type=int, default=7, metavar="N", help="measurements of each (7)")
    add("--max-gib", type=float, metavar="X", help="most that one may hold (half of what is free)")


def run(args: argparse.Namespace) -> int:
    import torch

    from vil import build
    from vil.ops import BACKENDS
    from vil.ops.tuning import tuner, tuning_cache
    from vil.utils.lookup import lookup

    cfg = resolve(args)
    names = [name.strip() for name in args.backends.split(",")] if args.backends else None
    if args.rounds < 1 or not (args.max_gib is None or args.max_gib > 0):
        raise ConfigError("--rounds and --max-gib must be positive")
    for name in names or ():
        build.refuses(lookup)(BACKENDS, name, "backend")
    device = build.set_up(cfg)
    with torch.device("meta"):
        model = build.build_model(cfg, weights_follow=True)
    asked = build.attention_cases(model, cfg, device)
    if not asked:
        print("no stage has longformer attention: nothing to tune")
        return 0
    most = None if args.max_gib is None else args.max_gib * 2**30
    found = {}
    for one in asked:
        timed = tuner.timed_batch(one.case)
        cut = "" if timed == one.case.batch else f", timed with {timed} of {one.case.batch} images"
        pinned = "" if one.backend == "auto" else f" (without effect: {one.backend} is pinned)"
        print(f"{one}{cut}{pinned}", flush=True)
        tune = build.refuses(tuner.tune)
        trials = tune(one.case, names, rounds=args.rounds, max_bytes=most)
        print("\n".join(tuner.listing(trials)), flush=True)
        if any(not trial.reason for trial in trials):
            found[one.case.bucket()] = trials
    if not found:
        print("no candidate can run: nothing is kept")
    elif tuning_cache.save(device.type, found):
        print(f"{len(found)} choices kept in {tuning_cache.path()}")
    return 0
