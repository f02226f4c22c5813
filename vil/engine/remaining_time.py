"""Estimate the remaining time of a run from the times of its steps, evaluations and checkpoints."""

MEMORY = 5  # log lines over which the time per step is averaged


class RemainingTime:
    """An estimate of the remaining seconds of a run.

    The time per step is an exponential average over the log lines. The second line replaces the
    first one, whose time includes one-time costs such as compilation. The time of evaluations,
    checkpoints and other work is averaged over all steps, and added to the time per step.
    """

    def __init__(self, step: int, end: int, now: float):
        """Start the estimate at `step`. end: the last step of the run. now: current time in
        seconds of a monotonic clock."""
        self.start, self.end, self.began = step, end, now
        self.lines, self.step, self.in_steps, self.per_step = 0, step, 0.0, 0.0

    def update(self, step: int, per_step: float, now: float) -> float:
        """Update the estimate with a log line at `step`, and return the remaining seconds.

        per_step: seconds per step since the previous line, without evaluations and checkpoints.
        now: current time in seconds, of the clock that `__init__` used.
        """
        self.in_steps += per_step * (step - self.step)
        self.lines, self.step = self.lines + 1, step
        weight = 1.0 if self.lines <= 2 else 1 / min(self.lines - 1, MEMORY)
        self.per_step += weight * (per_step - self.per_step)
        done = step - self.start
        pauses = max(now - self.began - self.in_steps, 0.0) / done if done else 0.0
        return (self.end - step) * (self.per_step + pauses)
