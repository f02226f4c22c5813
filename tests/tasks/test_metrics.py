"""Metrics against scikit-learn's, with ties and absent classes, and bootstrap intervals."""

import math
import warnings

import numpy as np
import pytest
from sklearn import metrics as sklearn

from vil.tasks.metrics import (
    bootstrap,
    calibration_bins,
    confusion_matrix,
    count_classes,
    mean,
    rank,
    rank_metrics,
)

pytestmark = pytest.mark.smoke


def random_predictions(seed, num_images, num_classes, present):
    """Targets of the classes `present`, and scores (N, K) rounded so that many are equal."""
    rng = np.random.default_rng(seed)
    scores = np.round(rng.random((num_images, num_classes)), 1)
    return rng.choice(present, size=num_images), scores, scores.argmax(axis=1)


CASES = [(200, 5, [0, 1, 3]), (361, 2, [0, 1]), (50, 30, range(30)), (7, 4, [2]), (1, 3, [0])]


@pytest.mark.parametrize(("num_images", "num_classes", "present"), CASES)
def test_counts_equal_scikit_learns(num_images, num_classes, present):
    targets, _, predicted = random_predictions(0, num_images, num_classes, present)
    counts = count_classes(targets, predicted, num_classes)
    labels = np.unique(targets)
    wanted = sklearn.precision_recall_fscore_support(
        targets, predicted, labels=labels, zero_division=0
    )
    for ours, theirs in zip((counts.precision(), counts.recall(), counts.f1()), wanted):
        assert ours[labels] == pytest.approx(100 * theirs)
        assert np.isnan(np.delete(ours, labels)).all()
        assert mean(ours) == pytest.approx(100 * theirs.mean())
    assert counts.images[labels].tolist() == wanted[3].tolist()
    with warnings.catch_warnings():  # of predicted classes without images
        warnings.simplefilter("ignore")
        balanced = sklearn.balanced_accuracy_score(targets, predicted)
    assert mean(counts.recall()) == pytest.approx(100 * balanced)
    matrix = confusion_matrix(targets, predicted, num_classes)
    assert (matrix == sklearn.confusion_matrix(targets, predicted, labels=range(num_classes))).all()


@pytest.mark.parametrize(("num_images", "num_classes", "present"), CASES)
def test_rankings_equal_scikit_learns(num_images, num_classes, present):
    targets, scores, _ = random_predictions(1, num_images, num_classes, present)
    weights = np.random.default_rng(2).integers(3, size=num_images)
    for k in range(num_classes):
        is_class = targets == k
        for weight in (None, weights):
            counted = np.ones(num_images) if weight is None else weight
            auroc, precision = rank_metrics(rank(scores[:, k], is_class), weight)
            positives, negatives = counted[is_class].sum(), counted[~is_class].sum()
            keep = counted > 0
            args = is_class[keep], scores[keep, k]
            if positives:
                wanted = sklearn.average_precision_score(*args, sample_weight=counted[keep])
                assert precision == pytest.approx(100 * wanted)
            else:
                assert math.isnan(precision)
            if positives and negatives:
                wanted = sklearn.roc_auc_score(*args, sample_weight=counted[keep])
                assert auroc == pytest.approx(100 * wanted)
            else:
                assert math.isnan(auroc)


def test_the_order_of_images_changes_nothing():
    targets, scores, _ = random_predictions(3, 100, 3, range(3))
    order = np.random.default_rng(0).permutation(100)
    for k in range(3):
        straight = rank_metrics(rank(scores[:, k], targets == k))
        assert rank_metrics(rank(scores[order, k], targets[order] == k)) == straight


def test_scores_that_are_nan_give_nan():
    scores = np.array([0.5, np.nan, 0.1])
    assert np.isnan(rank_metrics(rank(scores, scores > 0.2))).all()
    assert calibration_bins(scores, scores > 0.2) is None


def test_the_calibration_error_by_hand():
    confidence = np.array([1.0, 0.95, 0.62, 0.61, 1 / 15])
    correct = np.array([True, False, True, True, False])
    bins = calibration_bins(confidence, correct)
    assert bins.images.tolist() == [1, *[0] * 8, 2, *[0] * 4, 2]
    wanted = (abs(1 - 1.95) + abs(2 - 1.23) + abs(0 - 1 / 15)) / 5
    assert bins.expected_error() == pytest.approx(100 * wanted)
    weighted = calibration_bins(confidence, correct, np.array([2, 1, 0, 0, 0]))
    assert weighted.expected_error() == pytest.approx(100 * 0.95 / 3)


def test_an_interval_contains_the_value_and_is_as_wide_as_theory_says():
    correct = np.random.default_rng(0).random(400) < 0.8
    share = 100 * correct.mean()
    statistic = lambda weights: {"top1": 100 * (weights * correct).sum() / weights.sum()}  # noqa: E731
    low, high = bootstrap(statistic, 400)["top1"]
    error = math.sqrt(share * (100 - share) / 400)
    assert (low, high) == pytest.approx((share - 1.96 * error, share + 1.96 * error), abs=0.5)
    assert bootstrap(statistic, 400) == {"top1": (low, high)}  # a fixed seed
