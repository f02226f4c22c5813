"""Where a run stands at one step: what everything that changes with time may depend on.

The training loop makes one `Progress` per step and hands it to the model; random shift, redraws and
other schedules are pure functions of it. So a resumed run, a recomputed forward and another rank
all see the same draw.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Steps and epochs count from 0 and are those about to be run."""

    seed: int = 0
    step: int = 0
    epoch: int = 0
    epochs: int = 1
    steps_per_epoch: int = 1
