"""A toy world for the engine's tests: random images, a two-layer model and one call that trains it.

Also run as a program, once per rank, by test_ranks.py: folder, options as JSON.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vil.engine import distributed
from vil.engine.run import Run
from vil.engine.state import State, resume
from vil.engine.task import ClassificationTask
from vil.engine.train import train
from vil.optim import Ema, Schedule, build_optimizer, decay_groups

CPU = torch.device("cpu")
CLASSES = 7
DTYPE = torch.float64


@dataclass(frozen=True)
class Batch:
    images: Tensor
    targets: Tensor
    indices: Tensor
    epoch: int = 0
    step: int = 0

    def to(self, device, memory_format):
        images = self.images.to(device, memory_format=memory_format)
        return dataclasses.replace(self, images=images, targets=self.targets.to(device))


def samples(count, classes=CLASSES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 2, 2, generator=generator, dtype=DTYPE)
    targets = torch.randint(classes, (count,), generator=generator)
    return Batch(images, targets, torch.arange(count))


def pick(data, indices, **where):
    return Batch(data.images[indices], data.targets[indices], indices, **where)


@dataclass
class ToyLoader:
    """Batches of 12 of 60 images, shuffled by the epoch; each rank takes every world-th image."""

    rank: int = 0
    world: int = 1
    steps_per_epoch: int = 5
    batch_size: int = 12

    def batches(self, start, stop):
        data = samples(self.steps_per_epoch * self.batch_size)
        for step in range(start, stop):
            epoch, position = divmod(step, self.steps_per_epoch)
            order = torch.randperm(
                len(data.targets), generator=torch.Generator().manual_seed(epoch)
            )
            mine = order.split(self.batch_size)[position][self.rank :: self.world]
            yield pick(data, mine, epoch=epoch, step=step)


def held_out(count, rank=0, world=1, size=32):
    """This rank's part of a test set of `count` images, in batches of `size` and a rest."""
    mine = torch.arange(count)[rank::world]
    return [pick(samples(count, seed=1), part) for part in mine.split(size)] if len(mine) else []


def toy_model(dropout=0.0):
    torch.manual_seed(3)
    layers = nn.Flatten(), nn.Linear(12, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, CLASSES)
    return nn.Sequential(*layers).to(DTYPE)


def toy_optimizer(model, name="adamw"):
    spare = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    groups = decay_groups(model.named_parameters(), 0.05, 0.0, spare)
    return build_optimizer(name, groups, lr=0.01)


def toy_train(
    folder,
    *,
    ranks=None,
    dropout=0.5,
    epochs=2,
    seed=0,
    task=None,
    batch_size=12,
    optimizer="adamw",
    ema=0.0,
    **options,
) -> State:
    """`epochs` epochs of 5 steps on one rank of `ranks`; options go to `train`."""
    ranks = ranks or distributed.Ranks()
    loader = ToyLoader(ranks.rank, ranks.world, batch_size=batch_size)
    test_sets = {"odd": held_out(361, ranks.rank, ranks.world),
                 "two": held_out(2, ranks.rank, ranks.world)}  # fmt: skip
    task = task or ClassificationTask(
        device=CPU, test_loaders=test_sets, classes=CLASSES, per_class=True
    )
    model = toy_model(dropout)
    optimizer, average = toy_optimizer(model, optimizer), Ema(model, ema) if ema else None
    schedule = Schedule("cosine", 0.01, loader.steps_per_epoch, epochs, warmup_epochs=0.5)
    settings = {"set_progress": lambda model, progress: None, "log_freq": 3, **options}
    scaler = torch.amp.GradScaler("cpu", enabled=task.amp_dtype is torch.float16)
    start = State(seed, ranks.world, batch_size, loader.steps_per_epoch, type(optimizer).__name__)
    with Run(folder, ranks, CPU) as run:
        state = resume(
            run.checkpoints, start, model, optimizer, scaler, ranks=ranks, say=run.log.say,
            ema=average,
        )  # fmt: skip
        return train(
            task, distributed.wrap(model, ranks, CPU), loader, optimizer, schedule, scaler, state,
            run=run, ranks=ranks, device=CPU, epochs=epochs, ema=average, **settings,
        )  # fmt: skip


def metrics(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = distributed.start(None, CPU)
    toy_train(sys.argv[1], ranks=place, dropout=0.0, **json.loads(sys.argv[2]))
    distributed.stop()
