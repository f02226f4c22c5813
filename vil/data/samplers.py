"""The order of samples, as pure functions of (seed, epoch, position).

Shapes: N samples, B batch size per process, W processes ("world"), rank 0 .. W-1.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vil.data.seed_sequence import seed_sequence


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
    random = np.random.RandomState(np.random.MT19937(seed_sequence("order", seed, epoch)))
    return random.permutation(n)[: -(-n // repeats)].repeat(repeats)[:n]


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
    the same samples as one process with batch size B * W. The remainder of an epoch is dropped.
    Repeated samples have different positions, and so different augmentations. `groups` (N,) are
    separated by `group_batches`.
    """
    global_batch = batch_size * world
    order, order_epoch = None, None
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
    """This process's share in batches of B; the last one may be smaller. Over all processes every
    index comes once, without padding."""
    share = [Position(0, index, index) for index in range(rank, n, world)]
    return [share[first : first + batch_size] for first in range(0, len(share), batch_size)]
