"""Calibration of predicted probabilities: a temperature of classes, and thresholds of labels."""

import logging
from typing import Any

import numpy as np

from vil.utils.errors import DivergedError

logger = logging.getLogger(__name__)

MAX_TEMPERATURE = 100.0
MIN_THRESHOLD = 1e-30


def fit_temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """Return the temperature T that minimizes the cross entropy of softmax(logits / T)
    (arXiv:1706.04599, section 4.2).

    logits: (N, K) for N images and K classes. targets (N,): class of each image. T is at most
    MAX_TEMPERATURE, and at least its inverse. If no image is predicted wrongly, the cross entropy
    has no minimum, and T is 1, with a warning. Raises DivergedError if a logit is NaN or infinite.
    """
    from scipy.optimize import minimize_scalar  # scipy is a dependency of scikit-learn
    from scipy.special import logsumexp

    logits = logits.astype(np.float64)
    if not np.isfinite(logits).all():
        raise DivergedError(
            "cannot calibrate: some outputs of the model are NaN or infinite; use another "
            "checkpoint"
        )
    correct = logits[np.arange(len(targets)), targets]
    if (correct == logits.max(axis=1)).all():
        logger.warning(
            "all images are predicted correctly, which does not determine a temperature: it stays "
            "1; calibrate on more images"
        )
        return 1.0
    mean = correct.mean()

    def cross_entropy(log_temperature: float) -> float:
        scale = np.exp(-log_temperature)
        return float(logsumexp(scale * logits, axis=1).mean() - scale * mean)

    limit = np.log(MAX_TEMPERATURE)
    # convex in 1 / T, so a local minimum is the global minimum
    found = minimize_scalar(cross_entropy, bounds=(-limit, limit), method="bounded")
    return float(np.exp(found.x))


def f1_score(hits: Any, wrong: Any) -> Any:
    """Return F1 = 2 TP / (2 TP + FP + FN), or 0 where the denominator is 0.

    hits: number of true positives TP. wrong: number of errors FP + FN.
    """
    return 2 * hits / np.maximum(2 * hits + wrong, 1)


def choose_thresholds(truth: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return, for each label, the threshold that maximizes the label's F1, (K,).

    truth (N, K) bool: whether each image has each label. probabilities (N, K): predicted
    probability of each label. If several thresholds have the same F1, the lowest is returned. The
    threshold of a label that no image has is 0.5. Raises DivergedError if a probability is NaN.
    """
    if np.isnan(probabilities).any():
        raise DivergedError(
            "cannot calibrate: some outputs of the model are NaN; use another checkpoint"
        )
    thresholds = np.full(truth.shape[1], 0.5)
    for label in np.flatnonzero(truth.any(axis=0)):
        order = np.argsort(-probabilities[:, label], kind="stable")
        sorted_p, sorted_truth = probabilities[order, label], truth[order, label]
        hits = np.cumsum(sorted_truth)
        wrong = np.arange(1, len(hits) + 1) - hits + hits[-1] - hits
        ends = np.append(sorted_p[1:] != sorted_p[:-1], True)  # not between equal probabilities
        f1 = np.where(ends, f1_score(hits, wrong), -1)
        last = len(f1) - 1 - int(np.argmax(f1[::-1]))
        below = sorted_p[last + 1] if last + 1 < len(sorted_p) else 0.0
        middle = (float(sorted_p[last]) + float(below)) / 2
        thresholds[label] = max(middle, MIN_THRESHOLD)  # a probability may be 0 by underflow
    return thresholds
