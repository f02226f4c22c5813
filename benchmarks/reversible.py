"""Compare reversible with ordinary blocks: memory and time of a step, and accuracy on the digits.

  python benchmarks/reversible.py               writes benchmarks/results/reversible-cpu.json
  python benchmarks/reversible.py --accuracy    writes .../reversible-digits-cpu.json
  python benchmarks/reversible.py --accuracy --runs DIR    keeps the runs, skips finished ones

Memory and time: a step is the forward and backward pass of one stage with 14 x 14 tokens, 96
channels, batch 8, float32 and drop path 0.1, for 4, 8 and 12 blocks. Times are medians of
interleaved rounds. Memory is the peak of the tensors that a step allocates, including the gradients
of the parameters. The memory per added block is the slope between the smallest and the largest
number of blocks.

Accuracy: trains digits/vil_nano_deep.yaml and digits/vil_nano_reversible.yaml with three seeds.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from shared import CPU, MIB, RESULTS, add_json, finish, make_parser, time_in_turns, write_json

from vil.models.arch import parse_arch
from vil.models.vision_longformer import MsViT
from vil.utils.machine import machine
from vil.utils.timing import peak_tensor_bytes

ROUNDS, BATCH, PIXELS, BLOCKS = 9, 8, 224, (4, 8, 12)
ARCH = "l1,h3,d96,n{},s1,g1,p16,f7,a0"
SIDES = {"ordinary": False, "reversible": True}
BOUND = 0.10  # upper bound: memory of an added reversible block, divided by an ordinary block's
CONFIGS = {"ordinary": "digits/vil_nano_deep.yaml", "reversible": "digits/vil_nano_reversible.yaml"}
SEEDS = (0, 1, 2)
POINTS = 1.0  # percentage points by which the mean accuracy of reversible blocks may be lower


class Step:
    """A forward and backward pass of one stage on random images."""

    def __init__(self, blocks: int, reversible: bool, batch: int):
        torch.manual_seed(0)
        stages = parse_arch(ARCH.format(blocks))
        settings = dict(img_size=PIXELS, num_classes=0, drop_path_rate=0.1)
        self.model = MsViT(stages, reversible=reversible, **settings).train()
        self.images = torch.randn(batch, 3, PIXELS, PIXELS)

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(self.images).square().mean().backward()


def measure(args: argparse.Namespace) -> dict:
    """Measure ordinary and reversible stages. Prints and returns the median seconds and the peak
    MiB for each number of blocks."""
    steps = {
        f"{side} {blocks}": Step(blocks, reversible, args.batch)
        for blocks in args.blocks
        for side, reversible in SIDES.items()
    }
    times = time_in_turns(steps, args.rounds, CPU)
    rows = {
        name: {"seconds": statistics.median(times[name]), "MiB": peak_tensor_bytes(step, CPU) / MIB}
        for name, step in steps.items()
    }
    print(f"{'blocks':>6} {'ordinary':>20} {'reversible':>20} {'time':>6} {'memory':>7}")
    for blocks in args.blocks:
        a, b = (rows[f"{side} {blocks}"] for side in SIDES)
        cells = " ".join(f"{row['seconds']:8.3f} s {row['MiB']:6.0f} MiB" for row in (a, b))
        ratios = (b[key] / a[key] for key in ("seconds", "MiB"))
        print(f"{blocks:6} {cells} {next(ratios):6.2f} {next(ratios):7.2f}")
    first, last = min(args.blocks), max(args.blocks)
    added = {
        side: (rows[f"{side} {last}"]["MiB"] - rows[f"{side} {first}"]["MiB"]) / (last - first)
        for side in SIDES
    }
    share = added["reversible"] / added["ordinary"]
    missed = "" if share <= BOUND else "  <- missed"
    print("MiB per added block:", ", ".join(f"{side} {mib:.2f}" for side, mib in added.items()))
    print(f"reversible over ordinary: {share:.3f} (wanted <= {BOUND:g}){missed}")
    return {"rows": rows, "MiB per added block": added, "ratio": share}


def compare_accuracy(root: Path) -> dict:
    """Train with both kinds of blocks. Prints and returns top-1 for each kind and seed."""
    top1 = {side: [] for side in CONFIGS}
    for seed in SEEDS:
        for side, config in CONFIGS.items():
            top1[side].append(finish(config, root / f"{side}-{seed}", f"SEED={seed}"))
    means = {side: statistics.mean(values) for side, values in top1.items()}
    for side, values in top1.items():
        print(f"{side:10} {' '.join(f'{v:6.2f}' for v in values)}  mean {means[side]:.2f}")
    ahead = means["reversible"] - means["ordinary"]
    missed = "" if ahead >= -POINTS else "  <- missed"
    print(f"reversible minus ordinary: {ahead:+.2f} points (wanted >= {-POINTS:g}){missed}")
    return {"top1": top1, "means": means, "reversible minus ordinary": ahead}


def run(args: argparse.Namespace) -> None:
    about = machine(CPU)
    print(f"{about['name']}, {about['threads']} threads, torch {about['torch']}\n")
    if args.accuracy:
        with tempfile.TemporaryDirectory() as folder:
            result = compare_accuracy(Path(args.runs or folder))
    else:
        result = measure(args)
    file = args.json or RESULTS / f"reversible-{'digits-' if args.accuracy else ''}cpu.json"
    write_json(file, {"machine": about, **result})


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_json(parser)
    parser.add_argument("--accuracy", action="store_true", help="compare accuracy on the digits")
    parser.add_argument("--runs", metavar="DIR", help="keep the runs here; default: temporary")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed steps ({ROUNDS})")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"images per step ({BATCH})")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, help="numbers of blocks")
    run(parser.parse_args())
