"""The current training step, on which schedules inside the model depend, such as random shift:
each query attends to its chunk of the image and one random neighbor chunk.

The training loop makes one `TrainStep` per step and passes it to the model. The schedules are pure
functions of it. So all ranks, a recomputed forward pass and a resumed run get the same random
numbers in the same step.
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
