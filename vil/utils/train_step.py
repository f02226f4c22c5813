"""The current training step: all that a schedule inside the model may depend on.

The training loop makes one `TrainStep` per step and passes it to the model. Random shift, redraws
and other schedules are pure functions of it, so a resumed run, a recomputed forward and another
rank see the same draw.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainStep:
    """Steps and epochs count from 0 and are those about to run."""

    seed: int = 0
    step: int = 0
    epoch: int = 0
    epochs: int = 1
    steps_per_epoch: int = 1
