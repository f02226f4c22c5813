"""Learning-rate schedules as pure functions of the step, without state to save.

The learning rates are exactly those of the original Vision Longformer code (2021). The cosine
starts at step 0, not after the warm-up, so the learning rate drops slightly at the end of the
warm-up.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vil.optim import SCHEDULES
from vil.utils.lookup import lookup


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule. The method `lr_at` returns the learning rate of a step.

    policy: a key of SCHEDULES. lr: base learning rate, at the end of the warm-up. epochs,
    warmup_epochs, drop_freq and drop_epochs are in epochs. epoch_based: whether the learning rate
    changes only at the start of an epoch.
    """

    policy: str
    lr: float
    steps_per_epoch: int
    epochs: int
    warmup_epochs: float = 0.0
    warmup_factor: float = 1.0
    warmup_method: str = "linear"
    min_lr: float = 0.0
    drop_freq: int = 1
    drop_epochs: tuple[float, ...] = ()  # if not empty, used instead of drop_freq
    drop_factor: float = 10.0
    epoch_based: bool = False
    own: Mapping[str, Any] = field(default_factory=dict, hash=False)  # arguments of the policy

    def __post_init__(self):
        SCHEDULES.entry(self.policy)
        lookup(WARMUPS, self.warmup_method, "warm-up method")
        if self.policy == "multistep" and self.drop_freq < 1:
            raise ValueError(f"the multistep schedule needs drop_freq >= 1, got {self.drop_freq}")

    def lr_at(self, step: int) -> float:
        time = step // self.steps_per_epoch if self.epoch_based else step
        return SCHEDULES.load(self.policy)(self, time, **self.own)

    @property
    def unit(self) -> int:
        """Length of an epoch in units of time: 1 if `epoch_based`, else the steps per epoch."""
        return 1 if self.epoch_based else self.steps_per_epoch

    @property
    def warmup(self) -> float:
        """Length of the warm-up, in epochs if epoch_based, else in steps.

        A length in steps is rounded down, as in the original Vision Longformer code (2021).
        """
        return self.warmup_epochs if self.epoch_based else int(self.warmup_epochs * self.unit)

    def warmup_at(self, time: int) -> float:
        """Return the factor by which the warm-up scales the learning rate: 1 after the warm-up.

        time: the epoch if epoch_based, else the step.
        """
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
    """Return the base learning rate, divided by `drop_factor` for each drop epoch reached so far.

    The drop epochs are `drop_epochs` or, if that is empty, the multiples of `drop_freq` below
    `epochs`. The warm-up is applied too. time: the epoch if `epoch_based`, else the step.
    """
    epochs = s.drop_epochs or range(s.drop_freq, s.epochs, s.drop_freq)
    drops = sum(epoch * s.unit <= time for epoch in epochs)
    return s.lr * s.warmup_at(time) * (1 / s.drop_factor) ** drops


def constant(s: Schedule, time: int) -> float:
    """Return the base learning rate at all times.

    The warm-up settings are ignored, as in the original Vision Longformer code (2021).
    """
    return s.lr


# (factor at the start of the warm-up, elapsed fraction of the warm-up) -> factor
WARMUPS = {
    "linear": lambda factor, passed: factor * (1 - passed) + passed,
    "constant": lambda factor, passed: factor,
}
