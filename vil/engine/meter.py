"""Average training metrics and times between two log lines, without waiting for the device.

Metrics are summed on the device. `read` is the only place where the host waits for an accelerator,
so the loop reads only when it logs.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from vil.engine.distributed import all_reduce_sum


def is_line_due(step: int, *, end: int, per_epoch: int, log_freq: int) -> bool:
    """Return whether a line with averages is logged after `step`.

    A line is logged every `log_freq` steps of an epoch and at its end. A line less than `log_freq`
    steps before the end is omitted, so that the last line averages over enough steps. end: the last
    step of the run. per_epoch: steps per epoch.
    """
    in_epoch = (step - 1) % per_epoch + 1
    last = min(per_epoch, end - step + in_epoch)
    return in_epoch == last or (in_epoch % log_freq == 0 and last - in_epoch >= log_freq)


class Meter:
    """Sums of metrics and times since the last `read`.

    The time from a `read` to the request of the next batch is not counted, because the loop may
    evaluate and save a checkpoint in between. A checkpoint that is saved without a `read` counts as
    training time.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps, self.good_steps = 0, torch.zeros(())
        self.began = self.waited = 0.0

    def watch(
        self, batches: Iterable[Any], waiting: Callable[[], AbstractContextManager]
    ) -> Iterator[Any]:
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
                self.waited += time.perf_counter() - requested
                yield batch
        finally:
            if hasattr(iterator, "close"):  # now, because a traceback may keep the iterator alive
                iterator.close()

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

        Metrics are averages over all ranks and over the steps that were not skipped. `time` and
        `data` are the seconds per step of this rank, in total and spent waiting for data.
        """
        total = all_reduce_sum(torch.stack([*self.sums.values(), self.good_steps.float()]))
        *sums, good = total.tolist()
        metrics = {name: value / good if good else math.nan for name, value in zip(self.sums, sums)}
        metrics["time"] = (time.perf_counter() - self.began) / self.steps
        metrics["data"] = self.waited / self.steps
        self.reset()
        return metrics
