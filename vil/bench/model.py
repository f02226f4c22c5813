"""Benchmark models: images per second and peak memory, in evaluation and training.

The measurements of different models are interleaved. The time of a training step includes cross
entropy and the optimizer update, but not the copy of the batch to the device. Peak memory does not
include weights, optimizer state and images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from vil.utils.errors import one_line
from vil.utils.interleaved_timer import MILLI, Candidate, time_interleaved
from vil.utils.timing import peak_tensor_bytes

MIB = 2**20


@dataclass(frozen=True)
class Contender:
    """A model to measure, with its batch and settings.

    images: (B, c, H, W), on the model's device and in its memory format. targets: classes (B,).
    amp_dtype: the autocast dtype; None for no autocast. switch: called before each pass to apply
    the global torch settings of this model, such as TF32.
    """

    network: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    images: Tensor
    targets: Tensor
    amp_dtype: torch.dtype | None = None
    switch: Callable[[], object] = lambda: None

    def evaluate(self) -> Tensor:
        """Return the logits (B, classes) of the images in eval mode, without gradients."""
        self.switch()
        self.network.eval()
        with torch.no_grad(), self.autocast():
            return self.network(self.images)

    def train(self) -> None:
        """Run one training step on the images."""
        self.switch()
        self.network.train()
        self.optimizer.zero_grad()
        with self.autocast():
            loss = F.cross_entropy(self.network(self.images), self.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def autocast(self) -> torch.autocast:
        device_type = self.images.device.type
        return torch.autocast(device_type, self.amp_dtype, enabled=self.amp_dtype is not None)


@dataclass
class Row:
    """Measurements of a model with one combination of settings.

    way: the settings, such as "bf16+nhwc". attention: the backends of the stages in training.
    evaluation, training: images per second. over_evaluation, over_training: these speeds divided by
    those of the first row. evaluation_mib, training_mib: peak memory. reason: why measurements are
    missing.
    """

    model: str
    way: str
    attention: str
    batch: int = 0
    rounds: int = 0
    evaluation: float | None = None
    training: float | None = None
    over_evaluation: float | None = None
    over_training: float | None = None
    evaluation_mib: float | None = None
    training_mib: float | None = None
    reason: str = ""


def measure(entries: Sequence[tuple[Row, Contender | None]], rounds: int) -> list[Row]:
    """Measure models in interleaved rounds, and store the results in their rows. Returns all rows.

    entries: (row, model to measure) pairs. The model is None if `row.reason` already states why
    there is nothing to measure.
    """
    contenders = {str(number): one for number, (_, one) in enumerate(entries) if one is not None}
    candidates = {
        name: Candidate(one.evaluate, lambda _, one=one: one.train())
        for name, one in contenders.items()
    }
    devices = [one.images.device for one in contenders.values()]
    times, dropped = time_interleaved(candidates, rounds, next(iter(devices), torch.device("cpu")))
    rows = [row for row, _ in entries]
    for name, one in contenders.items():
        row, batch = rows[int(name)], len(one.images)
        if name in dropped:
            row.reason = dropped[name]
            continue
        row.batch, row.rounds = batch, len(times[name].forward)
        row.evaluation = batch * MILLI / times[name].forward_ms
        row.training = batch * MILLI / times[name].backward_ms
        if rows[0].training:
            row.over_evaluation = row.evaluation / rows[0].evaluation
            row.over_training = row.training / rows[0].training
        try:
            row.evaluation_mib = peak_tensor_bytes(one.evaluate, devices[0]) / MIB
            row.training_mib = peak_tensor_bytes(one.train, devices[0]) / MIB
        except Exception as error:
            row.evaluation_mib, row.reason = None, f"memory: {one_line(error)}"
    return rows


def plain(rows: Sequence[Row]) -> list[dict]:
    """Convert rows to dicts for JSON and CSV."""
    return [vars(row) for row in rows]
