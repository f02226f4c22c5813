"""Compare DDP with FSDP2: the weights after some training steps, and the memory of each rank.

  python benchmarks/sharding.py [--config imagenet/vil_tiny.yaml] [--ranks 2] [--steps 10]

Both strategies train in float32, from the same weights and on the same random images, with one
process per rank (torchrun and gloo). Prints the largest difference of any weight, and the memory of
tensors on each rank in MiB: "held" is that of weights, gradients and optimizer state between two
steps, and "peak" is the peak during a step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from shared import CPU, MIB, make_parser

import vil
from vil.config import get_config
from vil.engine.build import process_group
from vil.engine.distributed import DistInfo, unwrap, wrap
from vil.engine.fsdp import full_tensor, local
from vil.optim.build import build_optimization
from vil.utils.machine import machine
from vil.utils.timing import peak_tensor_bytes
from vil.workflows.prepare import prepare_for_training

STRATEGIES = ("ddp", "fsdp")


def one_rank(args: argparse.Namespace) -> None:
    """Train with one strategy in a process of torchrun. Writes the memory of this rank to the
    folder `args.out` and, on the main rank, the weights."""
    keys = {"DISTRIBUTED.STRATEGY": args.strategy, "DEVICE": "cpu", "AMP.ENABLED": False}
    cfg = get_config(args.config, [f"{key}={value}" for key, value in keys.items()])
    torch.set_num_threads(1)
    with process_group(cfg.DISTRIBUTED_BACKEND, CPU) as dist:
        model = vil.build_model(cfg, pretrained=False)
        model = prepare_for_training(cfg, model, dist, CPU).model.train()
        optimizer = build_optimization(cfg, model, CPU).optimizer
        trained = wrap(model, dist, CPU)
        for number in range(args.steps):
            step = partial(train_step, trained, optimizer, cfg, dist, number)
            peak = peak_tensor_bytes(step, CPU) if number == args.steps - 1 else step()
        kept = sum(local(x.detach()).nbytes for x in kept_tensors(unwrap(trained), optimizer))
        memory = {"held": kept / MIB, "peak": (kept + peak) / MIB}
        Path(args.out, f"{args.strategy}-{dist.rank}.json").write_text(json.dumps(memory))
        weights = {name: full_tensor(p.detach()).clone() for name, p in model.named_parameters()}
        if dist.is_main:
            save_file(weights, Path(args.out, f"{args.strategy}.safetensors"))


def train_step(model, optimizer, cfg, dist: DistInfo, number: int) -> None:
    torch.manual_seed(number * dist.world + dist.rank)
    side = cfg.INPUT.IMAGE_SIZE
    images, targets = torch.randn(2, 3, side, side), torch.randint(cfg.DATA.NUM_CLASSES, (2,))
    optimizer.zero_grad()
    F.cross_entropy(model(images), targets).backward()
    optimizer.step()


def kept_tensors(model, optimizer):
    """Yield the tensors that are kept between steps: weights, gradients and optimizer state."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
        yield from (x for x in optimizer.state[parameter].values() if isinstance(x, torch.Tensor))


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for strategy in STRATEGIES:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
            words = ["--config", args.config, "--steps", str(args.steps), "--out", folder]
            words += ["--strategy", strategy]
            command = [sys.executable, *launcher, str(args.ranks), __file__, *words]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        ddp, fsdp = (load_file(Path(folder, f"{name}.safetensors")) for name in STRATEGIES)
        worst = max(
            (ddp[name] - fsdp[name]).abs().max().item() for name in ddp if ddp[name].numel()
        )
        about = machine(CPU)
        print(f"{about['name']}, torch {about['torch']}; {args.config}, {args.ranks} ranks")
        print(f"largest difference of a weight after {args.steps} steps: {worst:.2g}")
        print(f"{'rank':>4} {'strategy':8} {'held MiB':>9} {'peak MiB':>9}")
        for rank in range(args.ranks):
            for name in STRATEGIES:
                memory = json.loads(Path(folder, f"{name}-{rank}.json").read_text())
                print(f"{rank:4} {name:8} {memory['held']:9.1f} {memory['peak']:9.1f}")


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--config", default="imagenet/vil_tiny.yaml", help="config of the model")
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (2)")
    parser.add_argument("--steps", type=int, default=10, help="training steps (10)")
    parser.add_argument("--strategy", choices=STRATEGIES, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    one_rank(args) if args.strategy else run(args)
