"""Detect that training steps have become slow, for example because another program started."""

import statistics
from collections import deque

import torch

WINDOW = 9  # steps of a median
SLOW = 2.0  # times the best median
PATIENCE = 10.0  # seconds of slow steps, before advice is given


class SlowSteps:
    """Compares the time of each step with the best median of WINDOW consecutive steps so far."""

    def __init__(self):
        self.recent: deque[float] = deque(maxlen=WINDOW)  # seconds of the last steps
        self.steps, self.best = 0, float("inf")
        self.slow_seconds = 0.0  # of slow steps, less those of fast ones
        self.advised = False

    def add(self, seconds: float) -> str:
        """Return advice once steps have been slow for PATIENCE seconds, otherwise "".

        Advice may be given again after fast steps for as long as the slow ones took.
        seconds: time of a step, without waiting for data.
        """
        is_slow = seconds > SLOW * self.best
        self.slow_seconds = max(self.slow_seconds + (seconds if is_slow else -seconds), 0.0)
        self.advised = self.advised and self.slow_seconds > 0
        self.recent.append(seconds)
        self.steps += 1
        if self.steps % WINDOW == 0:
            self.best = min(self.best, statistics.median(self.recent))
        slow = [each for each in self.recent if each > SLOW * self.best]
        if self.advised or self.slow_seconds < PATIENCE or len(slow) < 2:
            return ""
        self.advised = True
        return self._advice(statistics.median(slow))

    def _advice(self, now: float) -> str:
        threads = torch.get_num_threads()
        fewer = f" On a CPU, resume with OMP_NUM_THREADS={threads // 2}." if threads > 1 else ""
        return (
            f"computing a step takes {now:.2g} s without the wait for data, {now / self.best:.1f} "
            f"times as long as at best: another program may be using the processors.{fewer}"
        )
