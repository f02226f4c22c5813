"""Random numbers as pure functions of a key, drawn behind the back of the program's generators.

timm's transforms draw from `random`, from numpy's global generator and from torch's CPU generator,
torchvision's from torch's. All three are seeded from the same key and put back afterwards, so that
nothing depends on the number of workers and a resumed run needs integers only.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# SeedSequence fills a short key up with zeros: without a number per use, the order of an epoch
# (seed, epoch) and its first sample (seed, epoch, 0) would get the same numbers.
STREAMS = {"order": 1, "augment": 2, "mix": 3}


def seed_sequence(stream: str, *key: int) -> np.random.SeedSequence:
    """The source of all numbers of one use; the key's integers must not be negative."""
    return np.random.SeedSequence((STREAMS[stream], *key))


@contextmanager
def fork_rng(stream: str, *key: int) -> Iterator[None]:
    """Inside, the three global generators start from the key; outside, nothing has happened.

    About 0.1 ms. torch.manual_seed is not used: it would also reseed the accelerators.
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
