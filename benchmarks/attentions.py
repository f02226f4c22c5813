"""Compare all attention types on the digits: accuracy, time of a training step, and peak memory.

  python benchmarks/attentions.py                        train all, measure steps, print a table
  python benchmarks/attentions.py --runs runs/attention  keep the runs and skip finished ones
  python benchmarks/attentions.py --json benchmarks/results/attentions-cpu.json

All models are trained with the recipe of vil_nano, which was tuned for longformer attention. A step
is the forward pass, the backward pass and the update on one batch. The steps of all models are
timed in interleaved rounds. Memory is the peak of the tensors of one step, without weights and
optimizer state.
"""

import argparse
import platform
import statistics
import tempfile
from pathlib import Path

import torch
from shared import MIB, add_json, finish, make_parser, time_in_turns, write_json

import vil
from vil.config import get_config
from vil.engine.build import configure_device
from vil.layers.attention import set_progress
from vil.optim.build import build_optimization
from vil.utils.timing import peak_tensor_bytes
from vil.utils.train_step import TrainStep
from vil.workflows.prepare import move_to_device

OTHERS = ("full", "linformer", "performer", "srformer", "global")
CONFIGS = {"longformer": "digits/vil_nano.yaml"}
CONFIGS |= {name: f"digits/vil_nano_{name}.yaml" for name in OTHERS}
ROUNDS = 15
EPOCHS = 42  # of every run, fewer than in the configs


class Step:
    """A training step of a config on a random batch. Each call is the next training step, so that
    performer samples new features as in training."""

    def __init__(self, config: str):
        cfg = get_config(config)
        self.device = configure_device(cfg)
        self.model = move_to_device(cfg, vil.build_model(cfg), self.device).train()
        self.optimizer = build_optimization(cfg, self.model, self.device).optimizer
        size = cfg.INPUT.IMAGE_SIZE
        self.images = torch.randn(cfg.DATALOADER.BSZ, 3, size, size, device=self.device)
        self.targets = torch.arange(cfg.DATALOADER.BSZ, device=self.device) % cfg.DATA.NUM_CLASSES
        self.step = 0

    def __call__(self) -> None:
        set_progress(self.model, TrainStep(step=self.step, steps_per_epoch=10**6))
        self.step += 1
        loss = torch.nn.functional.cross_entropy(self.model(self.images), self.targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


def measure() -> dict[str, dict[str, float]]:
    """Return {attention: {name: number}}: step time divided by longformer's, peak memory in MiB,
    parameters, and multiply-accumulates of one image."""
    steps = {name: Step(config) for name, config in CONFIGS.items()}
    device = steps["longformer"].device
    times = time_in_turns(steps, ROUNDS, device)
    base = statistics.median(times["longformer"])
    return {
        name: {
            "step / longformer": statistics.median(times[name]) / base,
            "peak MiB": peak_tensor_bytes(step, device) / MIB,
            "parameters": sum(p.numel() for p in step.model.parameters()),
            "MACs": sum(step.model.macs(step.images.shape[2:])),
        }
        for name, step in steps.items()
    }


def run(args: argparse.Namespace, folder: Path) -> None:
    options = f"OPTIM.EPOCHS={EPOCHS}"
    rows = {
        name: {"top1": finish(config, folder / name, options)} for name, config in CONFIGS.items()
    }
    for name, costs in measure().items():
        rows[name] |= costs
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    if torch.cuda.is_available():
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"\n{machine}; digits, {EPOCHS} epochs, seed 0\n")
    print(f"{'attention':12} {'top-1':>6} {'step / longformer':>18} {'peak MiB':>9} {'MACs':>7}")
    for name, row in rows.items():
        top1, ratio, mib, _, macs = row.values()
        print(f"{name:12} {top1:6.2f} {ratio:18.2f} {mib:9.1f} {macs / 1e6:6.1f}M")
    command = "python benchmarks/attentions.py"
    write_json(args.json, {"machine": machine, "command": command, "rows": rows})


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_json(parser)
    parser.add_argument("--runs", metavar="DIR", help="keep the runs here; default: temporary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(args.runs or folder))
