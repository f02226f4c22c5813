"""Parts of a dataset: stratified, by group, and the same for ever."""

import hashlib

import numpy as np
import pytest

from vil.data.splits import assign_parts, join_groups, number_keys

pytestmark = pytest.mark.smoke

FIFTHS = [0.2] * 5


def counts(targets, parts, num_parts):
    return np.array([np.bincount(targets[parts == p], minlength=10) for p in range(num_parts)])


def test_folds_have_equal_sizes_and_equal_classes():
    targets = np.random.RandomState(0).randint(0, 10, 1003)
    parts = assign_parts(targets, FIFTHS)
    assert np.ptp(np.bincount(parts)) <= 1
    assert np.ptp(counts(targets, parts, 5), axis=0).max() <= 1


def test_a_fraction_is_met_in_every_class():
    targets = np.repeat(np.arange(10), np.arange(10, 110, 10))
    parts = assign_parts(targets, [0.7, 0.3])
    assert np.array_equal(counts(targets, parts, 2)[1], np.arange(3, 33, 3))


def test_a_class_with_two_images_is_in_both_parts():
    targets = np.array([0] * 98 + [1] * 2)
    assert sorted(assign_parts(targets, [0.9, 0.1])[98:]) == [0, 1]
    big = np.repeat([0, 1], [98, 2])  # groups of many images, too
    groups = np.concatenate([np.arange(98), [98, 99]]).repeat(4)
    parts = assign_parts(big.repeat(4), [0.95, 0.05], groups=groups)
    assert set(parts[98 * 4 :]) == {0, 1}


def test_groups_are_never_separated():
    random = np.random.RandomState(1)
    groups = random.randint(0, 60, 500)
    targets = random.randint(0, 10, 500)
    parts = assign_parts(targets, FIFTHS, groups=groups, seed=3)
    assert all(len(set(parts[groups == group])) == 1 for group in range(60))
    assert np.bincount(parts).min() > 60


def test_labels_are_spread_over_the_parts():
    random = np.random.RandomState(0)
    targets = (random.rand(500, 5) < [0.5, 0.3, 0.1, 0.05, 0.02]).astype(np.float32)
    parts = assign_parts(targets, FIFTHS, target_type="labels")
    positives = np.array([targets[parts == part].sum(0) for part in range(5)])
    assert np.ptp(positives, axis=0).max() <= 1
    assert np.ptp(np.bincount(parts)) <= 2


def test_numbers_are_spread_over_the_parts():
    numbers = np.random.RandomState(0).gamma(1, size=(1000, 2)).astype(np.float32)
    parts = assign_parts(numbers, [0.8, 0.2], target_type="numbers")
    for column in numbers.T:
        edges = np.sort(column)[::100][1:]
        held_out = np.bincount(np.searchsorted(edges, column[parts == 1]), minlength=10)
        assert held_out.min() >= 16
        assert held_out.max() <= 24


def test_large_numbers_are_spread_over_the_parts():
    """Such as times in seconds, which float32 rounds to multiples of 128."""
    numbers = np.arange(100.0)[:, None]
    parts = [
        assign_parts(numbers + offset, [0.8, 0.2], target_type="numbers") for offset in (0, 1.7e9)
    ]
    assert np.array_equal(*parts)


@pytest.mark.parametrize("count", [2, 3, 5, 10, 20, 24, 45])
def test_no_part_of_few_numbers_is_empty(count):
    numbers = np.arange(count, dtype=np.float32)[:, None]
    for fraction in (0.05, 0.2, 0.5):
        parts = assign_parts(numbers, [1 - fraction, fraction], target_type="numbers")
        assert set(parts) == {0, 1}
        assert abs(parts.sum() - fraction * count) <= 1
    groups = np.arange(count).repeat(20)  # each with one number
    parts = assign_parts(numbers.repeat(20, 0), [0.8, 0.2], target_type="numbers", groups=groups)
    assert set(parts) == {0, 1}


def test_a_split_is_the_same_in_every_version():
    targets = np.random.RandomState(0).randint(0, 7, 400)
    groups = np.random.RandomState(1).randint(0, 150, 400)
    parts = assign_parts(targets, FIFTHS, groups=groups, seed=5)
    # a changed split would mix the training and test images of an existing run
    digest = hashlib.sha256(parts.astype(np.int64).tobytes()).hexdigest()[:16]
    assert digest == "3250313214790d2b"
    assert not np.array_equal(parts, assign_parts(targets, FIFTHS, groups=groups, seed=6))
    numbers = np.random.RandomState(2).randint(0, 30, (400, 2)).astype(np.float32)
    of_numbers = assign_parts(numbers, [0.9, 0.1], target_type="numbers", groups=groups)
    assert hashlib.sha256(of_numbers.tobytes()).hexdigest()[:16] == "4dbaeb54796a9706"
    # the numbers of the groups do not matter, only their order
    assert np.array_equal(parts, assign_parts(targets, FIFTHS, groups=groups * 3 + 5, seed=5))


def test_groups_join_through_any_key():
    people = number_keys(["ann", None, "ann", "bob", None, None])
    content = number_keys([b"1", b"2", b"3", b"2", None, b"5"])
    assert join_groups(people, content).tolist() == [0, 1, 0, 1, 4, 5]
