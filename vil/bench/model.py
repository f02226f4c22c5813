"""Images per second and peak memory of whole models, in evaluation and in training, in turns.

A training step is what the trainer does to a batch that is there: forward, cross entropy, backward,
the optimizer's update. Memory is counted in tensors, at the peak of one step or one evaluation,
beyond what there was before: weights, momenta and images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from vil.bench.interleaved_timer import MILLI, Candidate, race
from vil.utils.errors import one_line
from vil.utils.timing import peak_tensor_bytes

MIB = 2**20


@dataclass(frozen=True)
class Contender:
    """A model in one way of running it. images (B, 3, H, W) and targets (B,) are on its device, in
    its memory format; `switch` sets what torch has for all models alike, before each turn.

    amp_dtype: the precision of autocast, None for full.
    """

    network: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    images: Tensor
    targets: Tensor
    amp_dtype: torch.dtype | None
    switch: Callable[[], object]

    def evaluate(self) -> Tensor:
        """The logits (B, K)."""
        self.switch()
        self.network.eval()
        with torch.no_grad(), self.autocast():
            return self.network(self.images)

    def train(self) -> None:
        """One step."""
        self.switch()
        self.network.train()
        self.optimizer.zero_grad()
        with self.autocast():
            loss = F.cross_entropy(self.network(self.images), self.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def autocast(self) -> torch.autocast:
        kind = self.images.device.type
        return torch.autocast(kind, self.amp_dtype, enabled=self.amp_dtype is not None)


@dataclass(frozen=True)
class Row:
    """A model in a way: its figures, or the reason why it has none.

    attention: the backends that its stages take in training. Images per second by medians; over_*:
    these over those of the first row.
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
    """The rows with their figures; those without a contender have their reason already."""
    running = {number: one for number, (_, one) in enumerate(entries) if one is not None}
    candidates = {
        str(number): Candidate(one.evaluate, lambda _, one=one: one.train())
        for number, one in running.items()
    }
    device = next(iter(running.values())).images.device if running else torch.device("cpu")
    times, dropped = race(candidates, rounds, device)
    rows = [row for row, _ in entries]
    for number, one in running.items():
        name = str(number)
        if name in dropped:
            rows[number] = replace(rows[number], reason=dropped[name])
            continue
        images = len(one.images)
        rows[number] = replace(
            rows[number],
            batch=images,
            rounds=len(times[name].forward),
            evaluation=images * MILLI / times[name].forward_ms,
            training=images * MILLI / times[name].backward_ms,
            **weighed(one, device),
        )
    return compared(rows)


def weighed(one: Contender, device: torch.device) -> dict[str, float]:
    """Its memory, or why it cannot be told."""
    try:
        return {
            "evaluation_mib": peak_tensor_bytes(one.evaluate, device) / MIB,
            "training_mib": peak_tensor_bytes(one.train, device) / MIB,
        }
    except Exception as error:
        return {"reason": f"memory: {one_line(error)}"}


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with their images per second over the first row's, where both have some."""
    first = rows[0]
    return [
        replace(
            row,
            over_evaluation=row.evaluation / first.evaluation,
            over_training=row.training / first.training,
        )
        if row.training and first.training
        else row
        for row in rows
    ]


def plain(rows: Sequence[Row]) -> list[Mapping]:
    """For JSON and CSV."""
    return [asdict(row) for row in rows]
