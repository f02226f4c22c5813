"""The order of samples and their random numbers, as pure functions of (seed, epoch, position).

timm's transforms use `random`, numpy's global generator and torch's CPU generator; torchvision's
use torch's. All three are seeded from one key and restored afterwards. So nothing depends on the
number of workers, and a run resumes from integers alone.

Shapes: N samples, B batch size per process, W processes ("world"), rank 0 .. W-1.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

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


class Position(NamedTuple):
    """A position in the order of an epoch, over all processes, and the sample at it."""

    epoch: int
    position: int
    index: int


def epoch_order(n: int, seed: int, epoch: int, repeats: int = 1) -> np.ndarray:
    """The samples (N,) int64 of one epoch: a permutation.

    With repeats > 1 (repeated augmentation: Hoffer et al., arXiv:1901.09335; 3 in DeiT,
    arXiv:2012.12877) each sample comes `repeats` times in a row, and an epoch has about N / repeats
    distinct samples. RandomState keeps its numbers in all numpy versions, so that a run can resume
    under another version.
    """
    generator = np.random.RandomState(np.random.MT19937(seed_sequence("order", seed, epoch)))
    return generator.permutation(n)[: -(-n // repeats)].repeat(repeats)[:n]


def train_batches(
    n: int,
    *,
    batch_size: int,
    start: int,
    stop: int,
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    repeats: int = 1,
    groups: np.ndarray | None = None,
) -> Iterator[list[Position]]:
    """Yield this process's B positions of every step in [start, stop), across epochs.

    A step takes B * W consecutive positions, of which each process takes a slice: W processes see
    the same samples as one with batch size B * W. The remainder of an epoch is dropped. Repeated
    samples have different positions, and so augmentations. `group_batches` separates `groups` (N,).
    """
    global_batch = batch_size * world
    order_epoch = None
    for step in range(start, stop):
        epoch, batch = divmod(step, n // global_batch)
        if epoch != order_epoch:
            order, order_epoch = epoch_order(n, seed, epoch, repeats), epoch
            if groups is not None:
                order = group_batches(order, groups, global_batch)
        first = batch * global_batch + rank * batch_size
        yield [Position(epoch, p, int(order[p])) for p in range(first, first + batch_size)]


def group_batches(order: np.ndarray, groups: np.ndarray, global_batch: int) -> np.ndarray:
    """Reorder the samples (N,) so that each global batch holds one group, as far as possible.

    A batch is placed where its last sample was. The remainders of all groups come at the end, mixed
    and in their original order, so that an epoch has as many steps as without groups.
    """
    group_of, remainders, batches = groups[order], [], []
    for group in np.unique(group_of):
        positions = np.flatnonzero(group_of == group)
        full = len(positions) // global_batch * global_batch
        batches += list(positions[:full].reshape(-1, global_batch))
        remainders.append(positions[full:])
    batches.sort(key=lambda positions: positions[-1])
    return order[np.concatenate([*batches, np.sort(np.concatenate(remainders))])]


def eval_batches(n: int, *, batch_size: int, rank: int = 0, world: int = 1) -> list[list[Position]]:
    """This process's share of all indices, in batches of B without padding."""
    share = [Position(0, index, index) for index in range(rank, n, world)]
    return [share[first : first + batch_size] for first in range(0, len(share), batch_size)]
