"""Counts of pixels and their metrics, against torchmetrics and against brute force."""

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vil.tasks.segmentation import IGNORE, METRICS
from vil.tasks.segmentation.metrics import Counts, count, per_class, values

torchmetrics = pytest.importorskip("torchmetrics.classification")
K = 6
NAMES = [f"class {k}" for k in range(K)]


def random_maps(seed, count=6, num_classes=K):
    """Maps of different sizes with ignored pixels, as (truth, prediction). The last class is not in
    the truth, and the one before it is nowhere."""
    rng = np.random.default_rng(seed)
    maps = []
    for _ in range(count):
        height, width = rng.integers(1, 40, 2)
        truth = rng.integers(IGNORE, num_classes - 2, (height, width), np.int16)
        guess = rng.integers(0, num_classes - 1, (height, width))
        guess[guess == num_classes - 2] = num_classes - 1
        maps.append((truth, np.where(rng.random(truth.shape) < 0.4, guess, truth.clip(0))))
    return maps


def total(maps, tolerance=2):
    return sum((count(*pair, K, tolerance) for pair in maps), Counts.zeros(K))


def flat(maps):
    """All predictions and truths, as torchmetrics takes them."""
    truth, guess = (np.concatenate([pair[n].ravel() for pair in maps]) for n in (0, 1))
    return torch.from_numpy(guess).long(), torch.from_numpy(truth).long()


@pytest.mark.parametrize("seed", range(3))
def test_counts_and_metrics_equal_those_of_torchmetrics(seed):
    maps = random_maps(seed)
    counts, pixels = total(maps), flat(maps)
    options = dict(num_classes=K, ignore_index=IGNORE)
    confusion = torchmetrics.MulticlassConfusionMatrix(**options)(*pixels)
    assert counts.confusion.tolist() == confusion.tolist()

    metrics, table = values(counts), per_class(counts, NAMES)
    iou = torchmetrics.MulticlassJaccardIndex(average="none", **options)(*pixels)
    accuracy = torchmetrics.MulticlassAccuracy(average="none", **options)(*pixels)
    precision = torchmetrics.MulticlassPrecision(average="none", **options)(*pixels)
    truth, guess = confusion.sum(1), confusion.sum(0)
    for column, reference, exists in (
        ("iou", iou, truth + guess > 0),
        ("accuracy", accuracy, truth > 0),
        ("precision", precision, truth > 0),
    ):
        expected = torch.where(exists, 100 * reference, torch.nan)
        actual = torch.tensor([table[column][name] for name in NAMES])
        torch.testing.assert_close(actual, expected, equal_nan=True)
    miou = torchmetrics.MulticlassJaccardIndex(average="macro", **options)(*pixels)
    assert metrics["miou"] == pytest.approx(100 * miou.item())
    micro = torchmetrics.MulticlassAccuracy(average="micro", **options)(*pixels)
    assert metrics["pixel_accuracy"] == pytest.approx(100 * micro.item())
    assert metrics["mean_accuracy"] == pytest.approx(100 * accuracy[truth > 0].mean().item())
    weighted = torchmetrics.MulticlassJaccardIndex(average="weighted", **options)(*pixels)
    assert metrics["fw_iou"] == pytest.approx(100 * weighted.item())


@pytest.mark.parametrize("seed", range(3))
def test_confusion_is_a_count_of_pixels(seed):
    (truth, guess), *_ = random_maps(seed)
    expected = np.zeros((K, K), int)
    for t, p in zip(truth.ravel(), guess.ravel()):
        if t != IGNORE:
            expected[t, p] += 1
    for cast in (np.asarray, torch.from_numpy):
        assert count(cast(truth), cast(guess), K, 2).confusion.tolist() == expected.tolist()


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_counts_add_up_over_parts(parts):
    maps = random_maps(7, count=7)
    whole = total(maps)
    split = sum((total(maps[n::parts]) for n in range(parts)), Counts.zeros(K))
    assert split.confusion.dtype == split.boundary.dtype == np.int64
    assert split.confusion.tolist() == whole.confusion.tolist()
    assert split.boundary.tolist() == whole.boundary.tolist()
    assert list(values(whole)) == list(METRICS)
    assert values(split) == values(whole)


def find_boundary(classes):
    """{class: [(row, column) of its boundary pixels]}."""
    found = {}
    for (i, j), own in np.ndenumerate(classes):
        near = [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]
        inside = [
            classes[y, x] for y, x in near if 0 <= y < len(classes) and 0 <= x < len(classes.T)
        ]
        if own != IGNORE and any(other not in (own, IGNORE) for other in inside):
            found.setdefault(own, []).append((i, j))
    return found


def brute_boundary(truth, guess, num_classes, tolerance):
    """Boundary counts from the distance of each pair of boundary pixels of a class."""
    sides = find_boundary(truth), find_boundary(np.where(truth == IGNORE, IGNORE, guess))
    rows = np.zeros((4, num_classes), int)
    for k in range(num_classes):
        a, b = (np.array(side.get(k, [])).reshape(-1, 2) for side in sides)
        is_near = np.hypot(*(a[:, None] - b).transpose(2, 0, 1)) <= tolerance
        rows[:, k] = len(a), len(b), is_near.any(1).sum(), is_near.any(0).sum()
    return rows


@st.composite
def small_maps(draw):
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    truth = draw(arrays.arrays(np.int16, shape, elements=st.integers(IGNORE, 2)))
    guess = draw(arrays.arrays(np.int64, shape, elements=st.integers(0, 2)))
    return truth, guess


@given(small_maps(), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_boundary_counts_equal_brute_force_distances(maps, tolerance):
    expected = brute_boundary(*maps, 3, tolerance)
    assert count(*maps, 3, tolerance).boundary.tolist() == expected.tolist()


@pytest.mark.parametrize("tolerance", [1, 2, 7])
def test_boundary_f1_is_the_harmonic_mean_of_precision_and_recall(tolerance):
    maps = random_maps(3)
    counts = total(maps, tolerance)
    rows = sum(brute_boundary(*pair, K, tolerance) for pair in maps)
    assert counts.boundary.tolist() == rows.tolist()
    f1 = []
    for truth, guess, found, confirmed in rows.T:
        if truth and guess and found:
            recall, precision = found / truth, confirmed / guess
            f1.append(200 * precision * recall / (precision + recall))
        elif truth or guess:
            f1.append(0.0)
    assert values(counts)["boundary_f1"] == pytest.approx(np.mean(f1))


def test_a_shifted_boundary_matches_up_to_the_tolerance():
    truth, guess = (np.repeat(np.arange(20)[None] >= edge, 6, axis=0) for edge in (8, 11))
    f1 = [values(count(truth * 1, guess * 1, 2, distance))["boundary_f1"] for distance in (2, 3)]
    assert f1 == [0, 100]


def test_classes_that_do_not_occur_are_absent():
    truth = np.array([[0, 0, 1, IGNORE]])
    guess = np.array([[0, 2, 2, 3]])  # of class 3 only where the truth is ignored
    counts = count(truth, guess, K, 1)
    table = per_class(counts, NAMES)
    assert [table["iou"][name] for name in NAMES] == pytest.approx(
        [50, 0, 0, *[np.nan] * 3], nan_ok=True
    )
    assert [table["accuracy"][name] for name in NAMES] == pytest.approx(
        [50, 0, *[np.nan] * 4], nan_ok=True
    )
    metrics = values(counts)
    assert metrics["miou"] == pytest.approx(50 / 3)
    assert metrics["mean_accuracy"] == 25
    assert metrics["fw_iou"] == pytest.approx(2 / 3 * 50)
    assert table["boundary_f1"][NAMES[2]] == 0
    assert np.isnan(table["boundary_f1"][NAMES[3]])


def test_an_image_without_labels_has_no_metrics():
    counts = count(np.full((5, 3), IGNORE), np.zeros((5, 3), int), K, 2)
    assert not counts.confusion.any()
    assert not counts.boundary.any()
    assert np.isnan(list(values(counts).values())).all()


def test_perfect_predictions_have_100_percent():
    maps = [(truth, truth.clip(0)) for truth, _ in random_maps(1)]
    assert list(values(total(maps)).values()) == [100] * len(METRICS)
