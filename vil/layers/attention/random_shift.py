"""Random shift: in a training step, a query attends to its chunk and one random neighbor chunk.

After the fraction `mode_switch` of all epochs, and always in evaluation, a query attends to all
nine chunks.

Source: Vision Longformer, arXiv:2103.15358, section 3.3.
"""

import math
import random

from vil.utils.train_step import TrainStep


def sample_neighbor(progress: TrainStep, index: int) -> int:
    """Return the number of the neighbor chunk to attend to in a training step, from 1 to 8.

    index: position of the attention module among those of the model. Recomputing the step, as
    gradient checkpointing does, gives the same neighbor.
    """
    rng = random.Random(f"random shift {progress.seed} {progress.step} {index}")
    return rng.randint(1, 8)


def has_ended(progress: TrainStep, mode_switch: float) -> bool:
    """Return whether random shift has ended. It ends at epoch mode_switch * epochs."""
    return progress.epoch >= mode_switch * progress.epochs


def describe_end(progress: TrainStep, mode_switch: float) -> str | None:
    """Return a message to log at the first step after random shift has ended, otherwise None."""
    first = math.ceil(mode_switch * progress.epochs)
    if not has_ended(progress, mode_switch) or progress.step != first * progress.steps_per_epoch:
        return None
    return f"random shift is over: from epoch {first}, queries attend to all nine chunks"
