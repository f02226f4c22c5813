"""The current training step, which random shift and other schedules inside the model depend on.

The training loop makes one `TrainStep` per step and passes it to the model. The schedules are pure
functions of it. A resumed run, a recomputed forward pass and all ranks get the same random numbers.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainStep:
    """The training step that is about to run. `step` and `epoch` count from 0; `epochs` is the
    planned number of epochs."""

    seed: int = 0
    step: int = 0
    epoch: int = 0
    epochs: int = 1
    steps_per_epoch: int = 1
