"""Loaders: the same batches for any number of workers and processes, from any step."""

import random

import numpy as np
import pytest
import torch

from vil.data import build_dataset
from vil.data.loader import EvalLoader, TrainLoader
from vil.data.transforms import eval_transform, train_transform
from vil.utils.errors import DataError

AUGMENTED = train_transform(16, use_timm=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.5)


def training_set(n=22):
    return build_dataset("fake", "", "train", AUGMENTED, n=n, size=24)


def validation_set(n):
    return build_dataset("fake", "", "val", eval_transform(8), n=n, size=8)


def take(start, stop, batch_size=4, **options):
    loader = TrainLoader(training_set(), batch_size=batch_size, **options)
    return list(loader.batches(start, stop))


def same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other):
        assert (a.epoch, a.step) == (b.epoch, b.step)
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.targets, b.targets)
        assert torch.equal(a.images, b.images)
    return True


@pytest.fixture(scope="module")
def reference():
    """Twelve steps over three epochs of five, one process, no workers."""
    return take(0, 12)


def test_batches_have_the_documented_fields(reference):
    assert [b.step for b in reference] == list(range(12))
    assert [b.epoch for b in reference] == [0] * 5 + [1] * 5 + [2] * 2
    batch = reference[0]
    assert (batch.images.shape, batch.images.dtype) == ((4, 3, 16, 16), torch.float32)
    assert batch.targets.dtype == batch.indices.dtype == torch.int64
    assert torch.equal(batch.targets, batch.indices % 10)
    moved = batch.to("cpu", torch.channels_last)
    assert moved.images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved.images, batch.images)


def test_a_sample_looks_different_in_every_epoch(reference):
    looks = {}
    for batch in reference[:10]:
        for index, image in zip(batch.indices.tolist(), batch.images):
            looks.setdefault(index, []).append(image)
    twice = [pair for pair in looks.values() if len(pair) == 2]
    assert len(twice) >= 18
    assert not any(torch.equal(a, b) for a, b in twice)


@pytest.mark.parametrize(("start", "workers"), [(0, 2), (3, 0), (5, 2), (11, 0)])
def test_resuming_at_any_step_changes_nothing(reference, start, workers):
    assert same(take(start, 12, workers=workers), reference[start:])


def test_two_ranks_see_the_samples_of_one_process(reference):
    ranks = [take(0, 12, batch_size=2, rank=rank, world=2) for rank in range(2)]
    for full, *halves in zip(reference, *ranks):
        assert torch.equal(torch.cat([half.images for half in halves]), full.images)
        assert torch.equal(torch.cat([half.indices for half in halves]), full.indices)


@pytest.mark.parametrize("world", [1, 2])
def test_repeated_samples_are_augmented_differently(world):
    """22 samples, 3 repeats: an epoch of 5 steps of 4 has 7 samples and 20 different images."""
    ranks = [take(0, 5, 4 // world, rank=r, world=world, repeats=3) for r in range(world)]
    batches = [b for step in zip(*ranks) for b in step]
    indices = torch.cat([batch.indices for batch in batches])
    images = torch.cat([batch.images for batch in batches])
    assert indices.bincount().sort(descending=True).values[:7].tolist() == [3] * 6 + [2]
    assert len(images.unique(dim=0)) == 20


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_global_generators_alone(workers):
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    take(0, 3, workers=workers)
    list(EvalLoader(validation_set(5), batch_size=2, workers=workers))
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_seed_alone_decides_order_and_pixels(reference):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    assert same(take(0, 3), reference[:3])
    assert not torch.equal(take(0, 1, seed=1)[0].indices, reference[0].indices)


def test_a_batch_larger_than_the_dataset_and_no_repeat_are_errors_with_numbers():
    with pytest.raises(ValueError, match="`repeats` must be at least 1, got 0"):
        TrainLoader(training_set(), batch_size=4, repeats=0)
    with pytest.raises(DataError, match=r"32 samples x 2 processes needs 64 samples.*has 22"):
        TrainLoader(training_set(), batch_size=32, world=2)
    assert TrainLoader(training_set(), batch_size=11, world=2).steps_per_epoch == 1


@pytest.mark.defect("B21")
@pytest.mark.parametrize(
    ("n", "world", "workers"), [(361, 1, 0), (361, 2, 2), (361, 3, 0), (2, 1, 2), (2, 3, 0)]
)
def test_evaluation_is_exact(n, world, workers):
    dataset, indices, total = validation_set(n), [], 0.0
    for rank in range(world):
        loader = EvalLoader(dataset, batch_size=32, rank=rank, world=world, workers=workers)
        batches = list(loader)
        assert loader.num_samples == n
        assert len(loader) == len(batches)
        for batch in batches:
            assert torch.equal(batch.targets, batch.indices % 10)
            indices += batch.indices.tolist()
            total += batch.images.double().sum().item()
    assert sorted(indices) == list(range(n))
    assert total == pytest.approx(sum(dataset[i][0].double().sum().item() for i in range(n)))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_can_be_repeated_and_interrupted(workers):
    loader = EvalLoader(validation_set(11), batch_size=3, workers=workers)
    first = list(loader)
    next(iter(loader))
    assert same(list(loader), first)
