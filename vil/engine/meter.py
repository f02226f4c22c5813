"""Means of training figures and times between two log lines, without waiting for the device.

Figures are added up where they are computed; reading them is the one moment at which the host waits
for an accelerator, so the loop reads only when it logs.
"""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from vil.engine.distributed import Ranks, all_reduce_sum

Batch = TypeVar("Batch")


class Meter:
    """Sums since the last `read`. The clock starts when the next batch is asked for, so whatever
    the loop does after reading (evaluation, a checkpoint) does not count as training time."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps = 0
        self.began = self.waited = 0.0

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, with the time spent waiting for them measured."""
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            if self.steps == 0:
                self.began = asked
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.waited += time.perf_counter() - asked
            yield batch

    def add(self, figures: dict[str, Tensor]) -> None:
        """Scalars of one step; the same names at every step."""
        self.steps += 1
        for name, value in figures.items():
            value = value.detach().float()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def read(self) -> dict[str, float]:
        """Mean figures over steps and ranks, then seconds per step and those spent on data.

        Starts over. Every rank gets the same figures, and so decides alike what to do about them.
        """
        total = all_reduce_sum(torch.stack(list(self.sums.values())))
        means = (total / (self.steps * self.ranks.world)).tolist()
        figures = dict(zip(self.sums, means))
        figures["time"] = (time.perf_counter() - self.began) / self.steps
        figures["data"] = self.waited / self.steps
        self.reset()
        return figures
