"""Means of training figures and times between two log lines, without waiting for the device.

Figures are added up where they are computed; reading them is the one moment at which the host waits
for an accelerator, so the loop reads only when it logs.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from vil.engine.distributed import DistInfo, all_reduce_sum

Batch = TypeVar("Batch")


class Meter:
    """Sums since the last `read`. The clock starts when the next batch is asked for, so whatever
    the loop does after reading (evaluation, a checkpoint) does not count as training time."""

    def __init__(self, dist: DistInfo):
        self.dist = dist
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps, self.good = 0, torch.zeros(())
        self.began = self.waited = 0.0

    def watch(
        self, batches: Iterable[Batch], waiting: Callable[[], AbstractContextManager] = nullcontext
    ) -> Iterator[Batch]:
        """The same batches, with the time spent waiting for them measured, inside of `waiting`."""
        iterator = iter(batches)
        try:
            while True:
                asked = time.perf_counter()
                if self.steps == 0:
                    self.began = asked
                with waiting():
                    batch = next(iterator, None)
                if batch is None:
                    return
                self.waited += time.perf_counter() - asked
                yield batch
        finally:
            if hasattr(iterator, "close"):  # now, not when the last traceback is dropped
                iterator.close()

    def add(self, figures: dict[str, Tensor], bad: Tensor) -> None:
        """Scalars of one step; the same names at every step. Those of a step that did not count
        (`bad` is 1) may be anything and are left out."""
        self.steps += 1
        good = 1 - bad.detach()
        self.good = self.good.to(good.device) + good
        for name, value in figures.items():
            value = torch.where(good > 0, value.detach().float(), 0.0)
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def read(self) -> dict[str, float]:
        """Mean figures over the steps that counted and the ranks, then seconds per step and those
        spent on data.

        Starts over. Every rank gets the same figures, and so decides alike what to do about them.
        """
        total = all_reduce_sum(torch.stack([*self.sums.values(), self.good.float()]))
        *sums, good = total.tolist()
        figures = {name: value / good if good else math.nan for name, value in zip(self.sums, sums)}
        figures["time"] = (time.perf_counter() - self.began) / self.steps
        figures["data"] = self.waited / self.steps
        self.reset()
        return figures
