"""Class weights for the loss, and logit adjustment, for training sets with rare classes.

Shapes: N training images, K classes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vil.utils.errors import ConfigError, DataError


def parse_class_weights(
    setting: Sequence[str], targets: np.ndarray, num_classes: int
) -> Tensor | None:
    """Convert the value of LOSS.CLASS_WEIGHTS to the weights of the classes, (K,) float32.

    setting: ["none"], ["balanced"], or K numbers as strings. For "none", the result is None.
    targets: class of each training image, (N,) int64, or multilabel targets (N, K), 0 or 1. Raises
    ConfigError if there are not K numbers.
    """
    if list(setting) == ["none"]:
        return None
    if list(setting) == ["balanced"]:
        balance = balance_classes if targets.ndim == 1 else balance_labels
        return torch.from_numpy(balance(targets, num_classes).astype(np.float32))
    if len(setting) != num_classes:
        raise ConfigError(
            f"LOSS.CLASS_WEIGHTS has {len(setting)} numbers, but there are {num_classes} classes: "
            'set it to one number per class, or to "balanced"'
        )
    return torch.tensor([float(text) for text in setting])


def balance_classes(targets: np.ndarray, num_classes: int) -> np.ndarray:
    """Return scikit-learn's "balanced" class weights (K,): N / (K n) for a class with n images.

    A class without images has the weight 0. targets (N,): class of each image.
    """
    return balance_counts(np.bincount(targets, minlength=num_classes))


def balance_counts(counts: np.ndarray) -> np.ndarray:
    """Return the weights of `balance_classes` (K,) for numbers of images, or of pixels, (K,)."""
    return np.where(counts, counts.sum() / (len(counts) * np.maximum(counts, 1)), 0.0)


def balance_labels(targets: np.ndarray, num_labels: int) -> np.ndarray:
    """Return the weight of positive images in the loss of each label, (K,).

    The weight is the number of negative images divided by the number of positive ones, or 1 if
    either number is 0. targets (N, K): 0 or 1.
    """
    positive = targets.sum(axis=0)
    negative = len(targets) - positive
    return np.where(positive * negative > 0, negative / np.maximum(positive, 1), 1.0)


def logit_shifts(targets: np.ndarray, classes: Sequence[str], factor: float) -> Tensor:
    """Return the logit adjustment of each class (K,): factor * log(frequency of the class).

    It is added to the logits in training only (Menon et al., arXiv:2007.07314, section 5). With
    factor 1, the largest unadjusted logit is then the best prediction for balanced accuracy.
    targets (N,): class of each training image. Raises DataError if a class has no training image.
    """
    counts = np.bincount(targets, minlength=len(classes))
    if missing := [name for name, count in zip(classes, counts) if not count]:
        raise DataError(
            f"LOSS.LOGIT_ADJUSTMENT needs training images of every class, but {len(missing)} of "
            f"{len(classes)} classes have none, such as {missing[0]}: add images, or set "
            "LOSS.LOGIT_ADJUSTMENT to 0"
        )
    return torch.from_numpy(factor * np.log(counts / len(targets))).float()
