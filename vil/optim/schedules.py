"""Learning rates as pure functions of the step, without state to save.

Formulas and order of operations are those of the original Vision Longformer code, which gives
identical floats. Its cosine is not shifted by the warm-up: it decays from step 0, so that the
learning rate jumps down slightly at the end of the warm-up.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vil.optim import SCHEDULES
from vil.utils.lookup import lookup


@dataclass(frozen=True)
class Schedule:
    """Settings with times in epochs. `lr_at(step)` is the learning rate of a step."""

    policy: str
    lr: float
    steps_per_epoch: int
    epochs: int
    warmup_epochs: float = 0.0
    warmup_factor: float = 1.0
    warmup_method: str = "linear"
    min_lr: float = 0.0
    drop_freq: int = 1
    drop_epochs: tuple[float, ...] = ()  # replaces drop_freq
    drop_factor: float = 10.0
    epoch_based: bool = False  # the learning rate changes at the start of an epoch only
    own: Mapping[str, Any] = field(default_factory=dict, hash=False)  # arguments of the policy

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
        """Ticks per epoch: a tick is a step, or an epoch if epoch_based."""
        return 1 if self.epoch_based else self.steps_per_epoch

    @property
    def warmup(self) -> float:
        """Length of the warm-up in ticks. As in the 2021 code, only steps are rounded down."""
        return self.warmup_epochs if self.epoch_based else int(self.warmup_epochs * self.unit)

    def warmup_at(self, time: int) -> float:
        """The warm-up factor at a tick; 1 after the warm-up."""
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
    """Divide by drop_factor at each of drop_epochs or, by default, every drop_freq epochs but not
    at the end of the run. The warm-up factor is applied on top."""
    epochs = s.drop_epochs or range(s.drop_freq, s.epochs, s.drop_freq)
    drops = sum(epoch * s.unit <= time for epoch in epochs)
    return s.lr * s.warmup_at(time) * (1 / s.drop_factor) ** drops


def constant(s: Schedule, time: int) -> float:
    """A constant learning rate. As in the 2021 code, there is no warm-up."""
    return s.lr


# (factor at the start of the warm-up, elapsed fraction of the warm-up) -> factor
WARMUPS = {
    "linear": lambda factor, passed: factor * (1 - passed) + passed,
    "constant": lambda factor, passed: factor,
}
