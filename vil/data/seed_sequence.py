"""Random numbers as pure functions of a key, without touching the program's global generators.

timm's transforms use `random`, numpy's global generator and torch's CPU generator; torchvision's
use torch's. All three are seeded from one key and restored afterwards. So nothing depends on the
number of workers, and a run resumes from integers alone.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# SeedSequence pads a short key with zeros. Without a stream number the order of an epoch
# (seed, epoch) and its first sample (seed, epoch, 0) would get the same random numbers.
STREAMS = {"order": 1, "augment": 2, "mix": 3}


def seed_sequence(stream: str, *key: int) -> np.random.SeedSequence:
    """The seed sequence of a stream and a key of non-negative integers."""
    return np.random.SeedSequence((STREAMS[stream], *key))


@contextmanager
def fork_rng(stream: str, *key: int) -> Iterator[None]:
    """Seed the three global generators from the key, and restore their states on exit.

    Takes about 0.1 ms. torch.manual_seed is not used: it would also seed the accelerators.
    """
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = seed_sequence(stream, *key).generate_state(4)
    random.seed(words.tobytes())
    np.random.seed(words)
    torch.default_generator.manual_seed(int.from_bytes(words[:2].tobytes(), "little"))
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        torch.set_rng_state(saved[2])
