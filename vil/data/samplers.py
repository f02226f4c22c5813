"""Sample order and random seeds, as pure functions of (seed, epoch, position).

So samples do not depend on the number of workers, and a run resumes without saved generator states.
`fork_rng` seeds the global generators of `random`, numpy and torch (CPU), which the transforms of
timm and torchvision use, and restores them afterwards.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

# SeedSequence pads a short key with zeros. Without a stream number, the order of an epoch, with the
# key (seed, epoch), and its first sample, with (seed, epoch, 0), would get the same random numbers.
STREAMS = {"order": 1, "augment": 2, "mix": 3}


def seed_sequence(stream: str, *key: int) -> np.random.SeedSequence:
    """Return a numpy SeedSequence for a key of non-negative integers. stream: a name in STREAMS.
    The same key gives different random numbers in different streams."""
    return np.random.SeedSequence((STREAMS[stream], *key))


@contextmanager
def fork_rng(stream: str, *key: int) -> Iterator[None]:
    """Seed the generators of `random`, numpy and torch (CPU) from a key, and restore them on exit.

    stream, key: see `seed_sequence`. Takes about 0.1 ms. Does not seed the generators of
    accelerators, unlike torch.manual_seed.
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
    """A position in the sample order of an epoch, and the dataset index at this position. All
    processes share the order."""

    epoch: int
    position: int
    index: int


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the dataset indices (n,) int64 of one epoch in random order. The order is the same
    in all numpy versions."""
    return order_generator(seed, epoch).permutation(n)


def order_generator(seed: int, epoch: int) -> np.random.RandomState:
    """Return the random generator that determines the sample order of an epoch."""
    return np.random.RandomState(np.random.MT19937(seed_sequence("order", seed, epoch)))


def balanced_order(classes: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return the dataset indices (n,) int64 of one epoch, in which every class is equally frequent.

    A class with more images than its share of the n positions is sampled without replacement. The
    images of a class with fewer are repeated equally often, up to a difference of one.

    classes: (n,) int64, the class of each image.
    """
    generator, parts = order_generator(seed, epoch), []
    present = generator.permutation(np.unique(classes))  # the first classes get one more position
    for number, name in enumerate(present):
        members = np.flatnonzero(classes == name)
        share = len(classes) // len(present) + (number < len(classes) % len(present))
        rounds = [generator.permutation(members) for _ in range(-(-share // len(members)))]
        parts.append(np.concatenate(rounds)[:share] if rounds else members[:0])
    return generator.permutation(np.concatenate(parts))


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
    balance: np.ndarray | None = None,
) -> Iterator[list[Position]]:
    """Yield a list of `batch_size` positions for each step in [start, stop), across epochs.

    All processes together see the same samples as one process with a batch of batch_size * world.
    The incomplete batch at the end of an epoch is dropped.

    Args:
        n: number of samples.
        repeats: copies of each sample in a row, with different augmentations (repeated
            augmentation, Hoffer et al., arXiv:1901.09335). An epoch keeps its length, so it has
            about n / repeats distinct samples.
        groups: (n,) group number of each sample. If given, `group_batches` reorders each epoch.
        balance: (n,) class number of each sample. If given, the order is that of `balanced_order`
            instead of `epoch_order`.
    """
    global_batch = batch_size * world
    order_epoch, order = None, np.arange(0)
    for step in range(start, stop):
        epoch, batch = divmod(step, n // global_batch)
        if epoch != order_epoch:
            order_epoch = epoch
            if balance is None:
                order = epoch_order(n, seed, epoch)
            else:
                order = balanced_order(balance, seed, epoch)
            order = order[: -(-n // repeats)].repeat(repeats)[:n]
            if groups is not None:
                order = group_batches(order, groups, global_batch)
        first = batch * global_batch + rank * batch_size
        yield [Position(epoch, p, int(order[p])) for p in range(first, first + batch_size)]


def group_batches(order: np.ndarray, groups: np.ndarray, global_batch: int) -> np.ndarray:
    """Reorder an epoch so that each batch holds samples of one group, as far as possible.

    The full batches of all groups come first, sorted by the position of their last sample in
    `order`. The samples that do not fill a batch of their group come last, in their original order.

    order (n,): dataset indices of the epoch. groups (n,): group of each dataset index.
    global_batch: samples per batch, over all processes.
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
    """Return this process's share of n samples, as batches of at most `batch_size` positions.

    Each batch has consecutive indices. Process `rank` gets the batches rank, rank + world, ... So
    every batch is the same for any number of processes.
    """
    firsts = range(rank * batch_size, n, world * batch_size)
    return [
        [Position(0, i, i) for i in range(first, min(first + batch_size, n))] for first in firsts
    ]
