"""Detection batches of the loaders: aspect groups, workers, ranks, broken images."""

import numpy as np
import pytest
import torch

from vil.data.loader import TrainLoader
from vil.data.samplers import epoch_order, group_batches, train_batches
from vil.tasks.detection.data.batch import DetectionBatch
from vil.tasks.detection.data.datasets import build_detection_set
from vil.tasks.detection.data.transforms import train_transform

TRANSFORM = train_transform(sizes=[40, 56], max_size=90, flip=0.5)


def groups_of(n, seed=0, share=0.7):
    return (np.random.RandomState(seed).random_sample(n) < share).astype(np.int64)


@pytest.mark.parametrize("n", [1, 2, 9, 100, 1001])
@pytest.mark.parametrize("everyone", [1, 2, 7, 16])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.7, 1.0])
def test_a_step_has_one_group_as_far_as_possible(n, everyone, share):
    groups, order = groups_of(n, share=share), epoch_order(n, 5, 2)
    found = group_batches(order, groups, everyone)
    assert sorted(found) == list(range(n))
    steps = n // everyone
    kinds = groups[found[: steps * everyone]].reshape(steps, everyone)
    pure = (kinds == kinds[:, :1]).all(axis=1)
    wanted = sum(np.bincount(groups, minlength=2) // everyone)
    assert pure[:wanted].all()
    assert wanted >= steps - 1
    assert np.array_equal(found, group_batches(order, groups, everyone))


def test_groups_are_mixed_over_the_epoch():
    """Batches are not sorted by aspect: each is emitted when the sample order has filled it."""
    groups = groups_of(2000, share=0.5)
    kinds = groups[group_batches(epoch_order(2000, 0, 0), groups, 8)][:1900:8]
    assert (kinds[1:] != kinds[:-1]).sum() > 60


@pytest.mark.parametrize("start", [0, 4, 11])
@pytest.mark.parametrize("repeats", [1, 3])
def test_ranks_share_a_step_and_any_step_can_be_the_first(start, repeats):
    options = dict(seed=7, groups=groups_of(43), repeats=repeats, stop=20)
    alone = list(train_batches(43, batch_size=6, start=0, **options))[start:]
    shares = [
        list(train_batches(43, batch_size=3, rank=r, world=2, start=start, **options))
        for r in range(2)
    ]
    assert [sum(step, []) for step in zip(*shares)] == alone
    for epoch in range(20 // 7):
        seen = [p.index for batch in alone for p in batch if p.epoch == epoch]
        assert max(np.bincount(seen), default=0) <= repeats


def training(root, own, workers=0, masks=True, start=0, **options):
    dataset = build_detection_set("scenes", root, "train", TRANSFORM, masks=masks, **own)
    loader = TrainLoader(dataset, batch_size=2, seed=4, workers=workers, **options)
    return list(loader.batches(start, 6))


def same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other):
        assert (a.epoch, a.step) == (b.epoch, b.step)
        assert torch.equal(a.indices, b.indices)
        assert all(torch.equal(x, y) for x, y in zip(a.images, b.images, strict=True))
        for x, y in zip(a.targets, b.targets, strict=True):
            assert x.keys() == y.keys()
            assert x["image_id"] == y["image_id"]
            assert all(torch.equal(x[k], y[k]) for k in ("boxes", "labels", "masks"))
    return True


def test_workers_and_resuming_change_nothing(scenes_root, small):
    reference = training(scenes_root, small)
    assert [b.epoch for b in reference] == [0, 0, 0, 0, 1, 1]
    assert same(training(scenes_root, small, workers=2), reference)
    assert same(training(scenes_root, small, workers=2, start=3), reference[3:])
    dist = [training(scenes_root, small, rank=r, world=2) for r in range(2)]
    assert dist[0][0].indices.tolist() != dist[1][0].indices.tolist()


def test_batches_are_what_the_loop_needs(scenes_root, small):
    (batch, *_) = training(scenes_root, small)
    assert isinstance(batch, DetectionBatch)
    assert len(batch) == 2
    assert all(image.dtype == torch.uint8 for image in batch.images)
    moved = batch.to("cpu", torch.channels_last)
    assert all(image.dtype == torch.float32 for image in moved.images)
    assert all(image.min() >= 0 and 0.4 < image.max() <= 1 for image in moved.images)
    assert torch.equal((moved.images[0] * 255).round().byte(), batch.images[0])
    assert [t["image_id"] for t in moved.targets] == [t["image_id"] for t in batch.targets]
    assert torch.equal(moved.to("cpu").images[0], moved.images[0])
