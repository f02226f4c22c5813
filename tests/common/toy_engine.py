"""A toy world for the engine's tests: random images, a two-layer model and one call that trains it.

Also a program, started once per rank by `launch`: folder, options and faults as JSON.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.common.class_task import ClassificationTask
from vil.engine import distributed
from vil.engine.checkpoint.manager import CheckpointPolicy
from vil.engine.checkpoint.save_load import TrainObjects, TrainState, resolve_link, resume
from vil.engine.fsdp import shard
from vil.engine.loop import Loss, train
from vil.engine.preemption import PreemptionGuard
from vil.engine.run_dir import RunDir
from vil.optim import Ema, Schedule, build_optimizer, decay_groups
from vil.utils.errors import StoppedError

TOY = Path(__file__)
FAULTS = ("poisoned_rank", "poisoned_steps", "sleep_step")
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


def samples(count, num_classes=CLASSES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 2, 2, generator=generator, dtype=DTYPE)
    targets = torch.randint(num_classes, (count,), generator=generator)
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
    dist=None,
    dropout=0.5,
    epochs=2,
    seed=0,
    task=None,
    batch_size=12,
    optimizer="adamw",
    ema=0.0,
    loader=None,
    fsdp=False,
    metric="",
    test_set="",
    **options,
) -> TrainState:
    """`epochs` epochs of 5 steps on one rank of `ranks`; options go to `train` and to Guard."""
    dist = dist or distributed.DistInfo()
    loader = loader or ToyLoader(dist.rank, dist.world, batch_size=batch_size)
    test_sets = {"odd": held_out(361, dist.rank, dist.world),
                 "two": held_out(2, dist.rank, dist.world)}  # fmt: skip
    task = task or ClassificationTask(
        device=CPU, test_sets=test_sets, num_classes=CLASSES, per_class=True
    )
    model = toy_model(dropout)
    average = Ema(model, ema) if ema else None
    if fsdp:
        for whole in (model, *([average.model] if average else [])):
            shard(whole, [whole[1]], dist, CPU)
    optimizer = toy_optimizer(model, optimizer)
    schedule = Schedule("cosine", 0.01, loader.steps_per_epoch, epochs, warmup_epochs=0.5)
    settings = {"set_progress": lambda model, progress: None, "log_freq": 3, **options}
    scaler = torch.amp.GradScaler("cpu", enabled=task.amp_dtype is torch.float16)
    start = TrainState(
        seed, dist.world, batch_size, loader.steps_per_epoch, type(optimizer).__name__,
        metric=metric, test_set=test_set,
    )  # fmt: skip
    fields = [field.name for field in dataclasses.fields(CheckpointPolicy)]
    policy = {name: settings.pop(name) for name in fields if name in settings}
    patience = {name: settings.pop(name)
                for name in ("hang_seconds", "grace_seconds") if name in settings}  # fmt: skip
    objects = TrainObjects(model, optimizer, scaler, average)
    with PreemptionGuard(dist, **patience) as guard, RunDir(folder, dist, CPU) as run:
        state = resume(run.checkpoints, start, objects, dist=dist, say=run.log.say)
        return train(
            task, loader, objects, schedule.lr_at, state, run=run, guard=guard, epochs=epochs,
            policy=CheckpointPolicy(**policy), **settings,
        )  # fmt: skip


def metrics(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def weights(folder, file="model.safetensors"):
    """The tensors of a file of the last checkpoint."""
    return load_file(resolve_link(Path(folder, "checkpoints"), "last") / file)


def saved_state(folder):
    """What state.pt of the last checkpoint holds."""
    last = resolve_link(Path(folder, "checkpoints"), "last")
    return torch.load(last / "state.pt", weights_only=True)


def start(*runs, **environment):
    """Runs of the toy, [(folder, options)], one after the other in a process of their own; output
    and errors in one pipe."""
    return subprocess.Popen(
        [sys.executable, TOY, json.dumps(runs, default=str)], env={**os.environ, **environment},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def meeting():
    """Where processes find each other, of torchrun's environment; for one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def launch(world, *runs, codes=None):
    """`world` processes as torchrun would start them, joined by gloo; what each said."""
    runs = [(folder, {**options, "meeting": meeting()}) for folder, options in runs]
    processes = [
        start(*runs, RANK=str(n), LOCAL_RANK=str(n), WORLD_SIZE=str(world)) for n in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=100 * len(runs))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == (codes or [0] * world), outputs
    return outputs


class Troubled(ClassificationTask):
    """A task with NaN losses on one rank, or a step that hangs."""

    def __init__(self, rank, folder, faults, test_sets):
        super().__init__(device=CPU, test_sets=test_sets, num_classes=CLASSES, per_class=True)
        self.folder, self.hangs_at = folder, faults.get("sleep_step")
        is_poisoned = faults.get("poisoned_rank", 0) == rank
        self.poisoned_steps = faults.get("poisoned_steps", ()) if is_poisoned else ()

    def loss(self, model, batch):
        loss, *rest = super().loss(model, batch)
        if batch.step in self.poisoned_steps:
            loss = loss * float("nan")
        if batch.step == self.hangs_at:
            fall_asleep(self.folder)
        return Loss(loss, *rest)


def fall_asleep(folder):
    Path(folder, "asleep").touch()
    while True:
        time.sleep(60)


def run(folder, options):
    torch.set_num_threads(1)
    os.environ |= options.pop("meeting", {})
    place = distributed.start(None, CPU)
    faults = {name: options.pop(name) for name in list(options) if name in FAULTS}
    sets = {"odd": held_out(361, place.rank, place.world),
            "two": held_out(2, place.rank, place.world)}  # fmt: skip
    task = Troubled(place.rank, folder, faults, sets)
    try:
        toy_train(folder, dist=place, dropout=0.0, task=task, **options)
    except StoppedError as stop:
        print(stop)
        return stop.exit_code
    finally:
        distributed.stop()
    return 0


if __name__ == "__main__":
    for folder, options in json.loads(sys.argv[1]):
        if code := run(folder, options):
            sys.exit(code)
