"""Learning rates as pure functions of the step: nothing to save, nothing to restore.

The formulas are those of the original Vision Longformer code, in its order of operations, so that
every rate is the same float. Its cosine is not shifted by the warm-up: it starts falling at step 0,
and the rate jumps down a little where the warm-up ends.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vil.optim import SCHEDULES
from vil.utils.lookup import lookup


@dataclass(frozen=True)
class Schedule:
    """`lr_at(step)` is the rate of step 0, 1, ..; settings as in the config, times in epochs."""

    policy: str
    lr: float
    steps_per_epoch: int
    epochs: int
    warmup_epochs: float = 0.0
    warmup_factor: float = 1.0
    warmup_method: str = "linear"
    min_lr: float = 0.0
    drop_freq: int = 1
    drop_epochs: tuple[float, ...] = ()  # instead of every drop_freq epochs
    drop_factor: float = 10.0
    epoch_based: bool = False  # the learning rate changes at the start of an epoch only
    own: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of a registered function

    def __post_init__(self):
        SCHEDULES.entry(self.policy)
        lookup(WARMUPS, self.warmup_method, "warm-up method")
        if self.policy == "multistep" and self.drop_freq < 1:
            raise ValueError(f"the multistep schedule needs drop_freq >= 1, given {self.drop_freq}")

    def lr_at(self, step: int) -> float:
        time = step // self.steps_per_epoch if self.epoch_based else step
        return SCHEDULES.load(self.policy)(self, time, **self.own)

    @property
    def unit(self) -> int:
        """Ticks of the schedule's clock in one epoch."""
        return 1 if self.epoch_based else self.steps_per_epoch

    @property
    def warmup(self) -> float:
        """Length of the warm-up in ticks; the original cuts it to whole steps, not to epochs."""
        return self.warmup_epochs if self.epoch_based else int(self.warmup_epochs * self.unit)

    def warmup_at(self, time: int) -> float:
        """The factor of the warm-up: 1 once it is over."""
        if time >= self.warmup:
            return 1.0
        return WARMUPS[self.warmup_method](self.warmup_factor, time / self.warmup)


def cosine(s: Schedule, time: int) -> float:
    if time < s.warmup:
        return s.lr * s.warmup_at(time)
    total = s.epochs * s.unit
    return s.min_lr + (s.lr - s.min_lr) * (1 + math.cos(math.pi * time / total)) / 2


def linear(s: Schedule, time: int) -> float:
    if time < s.warmup:
        return s.lr * s.warmup_at(time)
    total = s.epochs * s.unit
    return s.min_lr + (s.lr - s.min_lr) * (max(0, total - time) / max(1, total - s.warmup))


def multistep(s: Schedule, time: int) -> float:
    """Divided by drop_factor at drop_epochs or, without them, every drop_freq epochs, the last one
    excepted; warm-up on top."""
    epochs = s.drop_epochs or range(s.drop_freq, s.epochs, s.drop_freq)
    drops = sum(epoch * s.unit <= time for epoch in epochs)
    return s.lr * s.warmup_at(time) * (1 / s.drop_factor) ** drops


def constant(s: Schedule, time: int) -> float:
    """No policy at all: the original does not warm up either then."""
    return s.lr


# factor at the start of the warm-up, fraction of it that has passed -> factor
WARMUPS = {
    "linear": lambda factor, passed: factor * (1 - passed) + passed,
    "constant": lambda factor, passed: factor,
}
