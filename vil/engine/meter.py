"""Average training metrics and times over the steps between two log lines.

Metrics are summed on the device, so that adding them does not wait for it. Only `read` waits for
the device, so the loop calls `read` only when it logs.
"""

import math
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from vil.engine.distributed import all_reduce_sum


def is_line_due(step: int, *, end: int, per_epoch: int, log_freq: int) -> bool:
    """Return whether a line with averages is logged after `step`.

    A line is logged every `log_freq` steps of an epoch, and after the epoch's last step. So that
    the latter line averages over enough steps, no line is logged in the `log_freq` - 1 steps before
    it. end: last step of the run, which may end an epoch early. per_epoch: steps per epoch.
    """
    in_epoch = (step - 1) % per_epoch + 1
    last = min(per_epoch, end - step + in_epoch)
    return in_epoch == last or (in_epoch % log_freq == 0 and last - in_epoch >= log_freq)


class Meter:
    """Sums of metrics and times since the last `read`.

    After a `read`, time is counted again only when the loop requests the next batch. An evaluation
    or a saved checkpoint between the two is therefore not counted. A checkpoint that is saved
    after a step without a `read` is counted.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps, self.good_steps = 0, torch.zeros(())
        self.began = self.waited = self.received = 0.0

    def watch(
        self, batches: Iterable[Any], waiting: Callable[[], AbstractContextManager]
    ) -> Generator[Any, None, None]:
        """Yield the batches, and measure the time spent waiting for them.

        waiting: function that returns a context manager, in which the next batch is awaited.
        """
        iterator = iter(batches)
        try:
            while True:
                requested = time.perf_counter()
                if self.steps == 0:
                    self.began = requested
                with waiting():
                    batch = next(iterator, None)
                if batch is None:
                    return
                self.received = time.perf_counter()
                self.waited += self.received - requested
                yield batch
        finally:
            if hasattr(iterator, "close"):  # now, because a traceback may keep the iterator alive
                iterator.close()

    def computed(self) -> float:
        """Return the seconds since the step received its batch."""
        return time.perf_counter() - self.received

    def add(self, metrics: dict[str, Tensor], bad: Tensor) -> None:
        """Add the metrics of a step, which are scalar tensors. A skipped step (`bad` is 1) does not
        change the averages."""
        self.steps += 1
        good = 1 - bad.detach()
        self.good_steps = self.good_steps.to(good.device) + good
        for name, value in metrics.items():
            value = torch.where(good > 0, value.detach().float(), 0.0)
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def read(self) -> dict[str, float]:
        """Return the means since the last call, and reset the sums.

        Metrics are averages over all ranks and over the steps that were not skipped. `time` is the
        seconds per step of this rank. `data` is the part of `time` spent waiting for data.
        """
        total = all_reduce_sum(torch.stack([*self.sums.values(), self.good_steps.float()]))
        *sums, good = total.tolist()
        metrics = {name: value / good if good else math.nan for name, value in zip(self.sums, sums)}
        metrics["time"] = (time.perf_counter() - self.began) / self.steps
        metrics["data"] = self.waited / self.steps
        self.reset()
        return metrics
