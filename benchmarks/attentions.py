"""Every attention on the digits: accuracy after the same recipe, step time and peak memory.

  python benchmarks/attentions.py                       train all, then measure steps, print a table
  python benchmarks/attentions.py --runs runs/attention  keep the runs; what is trained is not again
  python benchmarks/attentions.py --json benchmarks/results/attentions-cpu.json

Steps (forward, backward, update of one batch) of all models are timed in turns, so that a slow
moment of the machine meets them all; their memory is what one step holds in tensors at its peak,
beyond weights and optimizer. The recipe is vil_nano's, which was chosen for longformer attention.
"""

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path

import torch

import vil
from vil.builders.device import configure_device
from vil.builders.model import move_to_device
from vil.builders.optim import build_optimizer
from vil.cli import main
from vil.config import get_config
from vil.layers.attention import set_progress
from vil.report.curves import read_series
from vil.utils.timing import peak_tensor_bytes, seconds
from vil.utils.train_step import TrainStep

CONFIGS = {
    "longformer": "digits/vil_nano.yaml",
    **{
        name: f"digits/vil_nano_{name}.yaml"
        for name in ("full", "linformer", "performer", "srformer", "global")
    },
}
ROUNDS = 15
EPOCHS = 42  # of every run; the configs' own are more
MIB = 2**20


def accuracy(config: str, folder: Path) -> float:
    """Top-1 after the last epoch of the run in `folder`, which is trained if it is not."""
    status = folder / "status.json"
    if not status.exists() or json.loads(status.read_text())["state"] != "finished":
        words = ["--config-file", config, "--output_dir", str(folder), "--resume", "LOG_FREQ=1000"]
        words.append(f"OPTIM.EPOCHS={EPOCHS}")
        if main(["train", *words]):
            raise SystemExit(f"training of {config} failed")
    return read_series(folder / "metrics.jsonl")["val/digits", "top1"][-1][1]


class Step:
    """One training step of a config on one random batch; performer redraws at each, as at first."""

    def __init__(self, config: str):
        cfg = get_config(config)
        self.device = configure_device(cfg)
        self.model = move_to_device(cfg, vil.build_model(cfg), self.device).train()
        self.optimizer = build_optimizer(cfg, self.model)
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
    """{name: {step over longformer's, peak MiB, parameters, MACs}}."""
    steps = {name: Step(config) for name, config in CONFIGS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()  # the optimizer's state, and whatever is set up once
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(seconds(step, step.device))
    base = statistics.median(times["longformer"])
    return {
        name: {
            "step / longformer": statistics.median(times[name]) / base,
            "peak MiB": peak_tensor_bytes(step, step.device) / MIB,
            "parameters": sum(p.numel() for p in step.model.parameters()),
            "MACs": sum(step.model.macs(step.images.shape[2:])),
        }
        for name, step in steps.items()
    }


def run(args: argparse.Namespace, folder: Path) -> None:
    rows = {name: {"top1": accuracy(config, folder / name)} for name, config in CONFIGS.items()}
    for name, figures in measure().items():
        rows[name] |= figures
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    if torch.cuda.is_available():
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"\n{machine}; digits, {EPOCHS} epochs, seed 0\n")
    print(f"{'attention':12} {'top-1':>6} {'step / longformer':>18} {'peak MiB':>9} {'MACs':>7}")
    for name, (top1, ratio, mib, _, macs) in ((n, row.values()) for n, row in rows.items()):
        print(f"{name:12} {top1:6.2f} {ratio:18.2f} {mib:9.1f} {macs / 1e6:6.1f}M")
    if args.json:
        found = {"machine": machine, "command": "python benchmarks/attentions.py", "rows": rows}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", metavar="DIR", help="folder of the runs; default: one that goes")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(args.runs or folder))
