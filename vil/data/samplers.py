"""Which sample comes when: pure functions of (seed, epoch, position) and of nothing else.

Letters: N samples, B batch per process, R processes ("world"), r one of them ("rank").
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vil.data.seed_sequence import seed_sequence


class Position(NamedTuple):
    """A place in the order of an epoch, over all processes, and the sample that stands there."""

    epoch: int
    position: int
    index: int


def epoch_order(n: int, seed: int, epoch: int, repeats: int = 1) -> np.ndarray:
    """The samples (N,) int64 of one epoch: a permutation, or its beginning with every sample
    `repeats` times in a row (about N / repeats distinct ones).

    Repeated augmentation: Hoffer et al., arXiv:1901.09335; three repeats in DeiT, arXiv:2012.12877.
    RandomState, whose numbers numpy promises never to change: a run can resume under another numpy.
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
    """This process's B positions of every step in [start, stop), across epochs.

    A step takes B * R consecutive positions and each process a slice of them, so that R processes
    see together what one process with their common batch sees. The rest of an epoch is dropped.
    The copies that `repeats` makes stand at positions of their own and are augmented apart.
    `groups` (N,) are kept apart as group_batches does.
    """
    everyone = batch_size * world
    order, order_epoch = None, None
    for step in range(start, stop):
        epoch, batch = divmod(step, n // everyone)
        if epoch != order_epoch:
            order, order_epoch = epoch_order(n, seed, epoch, repeats), epoch
            if groups is not None:
                order = group_batches(order, groups, everyone)
        first = batch * everyone + rank * batch_size
        yield [Position(epoch, p, int(order[p])) for p in range(first, first + batch_size)]


def group_batches(order: np.ndarray, groups: np.ndarray, everyone: int) -> np.ndarray:
    """The same samples (N,), put so that the B * R of a step are of one group, as far as possible.

    A batch stands where its last sample stood. What a group has left over comes at the end, mixed
    with the others' and in the old order, so that an epoch has as many steps as without groups.
    """
    kinds, rest, batches = groups[order], [], []
    for kind in np.unique(kinds):
        places = np.flatnonzero(kinds == kind)
        whole = len(places) // everyone * everyone
        batches += list(places[:whole].reshape(-1, everyone))
        rest.append(places[whole:])
    batches.sort(key=lambda places: places[-1])
    return order[np.concatenate([*batches, np.sort(np.concatenate(rest))])]


def eval_indices(n: int, rank: int = 0, world: int = 1) -> range:
    """This process's share: over all processes every index once, none twice, no padding."""
    return range(rank, n, world)


def eval_batches(n: int, *, batch_size: int, rank: int = 0, world: int = 1) -> list[list[Position]]:
    """This process's share in batches of B, the last one shorter."""
    share = [Position(0, index, index) for index in eval_indices(n, rank, world)]
    return [share[first : first + batch_size] for first in range(0, len(share), batch_size)]
