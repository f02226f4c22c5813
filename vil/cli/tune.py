"""Find the fastest backend of local attention for each stage of a config, by trying all.

  vil tune --config-file imagenet/vil_small_rpb.yaml DATALOADER.BSZ 128
  vil tune --config-file imagenet/vil_small_rpb.yaml --backends blocked,gathered AMP.ENABLED True
  vil tune --config-file mine.yaml --import my_backend.py

Every candidate's output and gradients are checked against the definition before it is timed. The
choices are kept for this machine and this version in $VIL_CACHE/attention.json (~/.cache/vil), and
`vil train`, `evaluate` and `predict` take them from there; `vil info` shows them.
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
    from vil.ops import BACKENDS, autotune, choices
    from vil.utils.table import lookup

    cfg = resolve(args)
    names = args.backends.split(",") if args.backends else None
    if args.rounds < 1 or (args.max_gib is not None and args.max_gib <= 0):
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
        timed = autotune.timed_batch(one.case)
        cut = "" if timed == one.case.batch else f", timed with {timed} of {one.case.batch} images"
        print(f"{one}{cut}", flush=True)
        trials = autotune.tune(one.case, names, rounds=args.rounds, most_bytes=most)
        found[one.case.bucket()] = trials
        print(listing(trials), flush=True)
        if one.backend != "auto":
            print(f"  BACKEND {one.backend} is pinned: the choice has no effect")
    if choices.save(device.type, found):
        print(f"{len(found)} choices kept in {choices.path()}")
    return 0


def listing(trials: list) -> str:
    """A line per candidate: milliseconds of each pass and MiB held, or the reason why not."""
    lines = [f"  {'candidate':16} {'ms forward':>11} {'ms backward':>12} {'MiB':>9}"]
    for place, trial in enumerate(trials):
        if trial.reason:
            lines.append(f"  {trial.name:16} {trial.reason}")
        else:
            forward, backward = 1e3 * trial.forward, 1e3 * trial.backward
            mark = "   <- chosen" if place == 0 else ""
            lines.append(
                f"  {trial.name:16} {forward:11.2f} {backward:12.2f} "
                f"{trial.bytes / 2**20:9.1f}{mark}"
            )
    return "\n".join(lines)
