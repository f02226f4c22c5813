"""The current training step, which schedules inside the model depend on.

An example is random shift, where queries attend to their chunk and one random neighbor chunk. The
training loop passes a `TrainStep` to the model in each step. A schedule depends on nothing else.
Its random numbers are therefore the same on all ranks, in a forward pass that activation
checkpointing recomputes, and in a resumed run.
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
