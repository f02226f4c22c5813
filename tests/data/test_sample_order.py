"""The order of samples is a pure function of seed, epoch and position."""

import itertools
import random

import numpy as np
import pytest
import torch

from vil.data.samplers import epoch_order, fork_rng, train_batches

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_an_epoch_is_a_permutation(n):
    order = epoch_order(n, seed=3, epoch=5)
    assert sorted(order) == list(range(n))
    assert np.array_equal(order, epoch_order(n, seed=3, epoch=5))


def test_seed_and_epoch_change_the_order():
    orders = {tuple(epoch_order(50, s, e)) for s, e in itertools.product(range(5), range(5))}
    assert len(orders) == 25


def test_the_order_is_that_of_existing_runs():
    """A changed order would break resuming from existing checkpoints."""
    assert epoch_order(8, seed=0, epoch=0).tolist() == [1, 6, 0, 3, 7, 4, 2, 5]


def test_an_epoch_has_distinct_samples_and_drops_the_remainder():
    batches = list(train_batches(11, batch_size=4, start=0, stop=4))
    assert [{p.epoch for p in batch} for batch in batches] == [{0}, {0}, {1}, {1}]
    for epoch in (batches[:2], batches[2:]):
        positions = sum(epoch, [])
        assert [p.position for p in positions] == list(range(8))
        assert len({p.index for p in positions}) == 8


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("n", "repeats"), [(1, 3), (2, 3), (22, 3), (300, 2), (7, 7), (5, 1)])
def test_repeated_augmentation_copies_the_beginning_of_the_order(n, repeats, world):
    """The length of an epoch does not change, and positions stay consecutive over the ranks."""
    order = epoch_order(n, 7, 2)
    copies = [order[i // repeats] for i in range(n)]
    batch = max(n // 2 // world, 1)
    if batch * world <= n:
        steps = n // (batch * world)
        shares = [
            train_batches(
                n,
                batch_size=batch,
                rank=rank,
                world=world,
                seed=7,
                repeats=repeats,
                start=2 * steps,
                stop=3 * steps,
            )
            for rank in range(world)
        ]
        positions = [p for step in zip(*shares) for part in step for p in part]
        assert [p.position for p in positions] == list(range(steps * batch * world))
        assert [p.index for p in positions] == copies[: len(positions)]


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_fork_rng_seeds_all_three_generators_and_restores_them():
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    draws = [draw() for _ in range(3)]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    inside = []
    for key in ((0, 0), (0, 0), (0, 0, 0), (0, 1)):
        with fork_rng("augment", *key):
            inside.append(draw())
    with fork_rng("mix", 0, 0):
        inside.append(draw())
    with pytest.raises(KeyError), fork_rng("augment", 9):
        raise KeyError
    assert [draw() for _ in range(3)] == draws
    assert inside[0] == inside[1]
    for numbers in zip(*inside):
        assert len(set(numbers)) >= 3  # (0, 1) and the other stream differ from (0, 0)
