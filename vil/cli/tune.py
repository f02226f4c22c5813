"""Find the fastest attention backend for each stage of a config's model, by measuring them.

On a CPU, the model's linear layers and MLPs are measured too: with PyTorch's operators, and with
compiled kernels.

  vil tune --config-file imagenet/vil_small_rpb.yaml DATALOADER.BSZ 128
  vil tune --config-file imagenet/vil_small_rpb.yaml --backends blocked,gathered AMP.ENABLED True
  vil tune --config-file mine.yaml --import my_backend.py

Before a backend is timed, its output and gradients are compared with the reference implementation.
The fastest backends, for this machine and version, are saved in $VIL_CACHE/attention.json (by
default in ~/.cache/vil). `vil train`, `vil evaluate` and `vil predict` use them, and `vil info`
shows them. A backend from a file of your own also needs the flag --import in these commands. For
vil tune, DATALOADER.BSZ is the batch size of one process.
"""

import argparse

from vil.cli.arguments import config_arguments, listed, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    config_arguments(parser)
    add = parser.add_argument
    names = listed()
    add(
        "--backends",
        type=lambda text: names(text) if text else None,
        metavar="A,B",
        help="backends to measure (default: all)",
    )
    add("--rounds", type=int, default=7, metavar="N", help="measurements of each backend (7)")
    add("--max-gib", type=float, metavar="X", help="memory limit in GiB (half of the free memory)")


def run(args: argparse.Namespace) -> int:
    from vil.workflows.backends import Tuning, find_calls

    options = dict(rounds=args.rounds, max_gib=args.max_gib)
    tuning = Tuning(find_calls(resolve(args)), args.backends, **options)
    if not tuning.requests and not tuning.linears:
        print("no stage has longformer attention: nothing to tune")
        return 0
    for request in tuning.requests:
        print(tuning.describe(request), flush=True)
        print("\n".join(tuning.run(request)), flush=True)
    for request in tuning.linears:
        print(request, flush=True)
        print("\n".join(tuning.run_linear(request)), flush=True)
    if not tuning.found:
        print("no backend can run: nothing is saved")
    elif file := tuning.save():
        print(f"{len(tuning.found)} selected backends saved in {file}")
    return 0
