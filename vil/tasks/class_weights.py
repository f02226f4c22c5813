"""Weights of classes in the loss, and logit adjustment, for training sets with rare classes.

Shapes: N training images, K classes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vil.utils.errors import ConfigError, DataError


def parse_class_weights(setting: Sequence[str], targets: np.ndarray, num_classes: int) -> Tensor:
    """Return the weights (K,) float32 of the classes that LOSS.CLASS_WEIGHTS selects.

    setting: ["balanced"], or K numbers as text. targets: classes (N,) int64, or labels (N, K) of 0
    and 1. Raises ConfigError unless there is one number per class.
    """
    if list(setting) == ["balanced"]:
        balance = balance_classes if targets.ndim == 1 else balance_labels
        return torch.from_numpy(balance(targets, num_classes).astype(np.float32))
    if len(setting) != num_classes:
        raise ConfigError(
            f"LOSS.CLASS_WEIGHTS has {len(setting)} numbers, and there are {num_classes} classes"
        )
    return torch.tensor([float(text) for text in setting])


def balance_classes(targets: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the weight N / (K n) of each class with n of the N images, as "balanced" weights in
    scikit-learn. Their mean over the images is 1. A class without images has the weight 0."""
    counts = np.bincount(targets, minlength=num_classes)
    return np.where(counts, len(targets) / (num_classes * np.maximum(counts, 1)), 0.0)


def balance_labels(targets: np.ndarray, num_labels: int) -> np.ndarray:
    """Return, for each label, the number of images without it divided by the number with it. For a
    label without images, return 1."""
    positive = targets.sum(axis=0)
    return np.where(positive, (len(targets) - positive) / np.maximum(positive, 1), 1.0)


def logit_shifts(targets: np.ndarray, classes: Sequence[str], factor: float) -> Tensor:
    """Return what is added to the logits (K,) in training: factor * log(frequency of the class).

    A softmax that is trained with these logits estimates p(class | image) / p(class) without them,
    whose maximum is best for balanced accuracy if factor is 1 (Menon et al., arXiv:2007.07314,
    section 5). Raises DataError if a class has no training image.
    """
    counts = np.bincount(targets, minlength=len(classes))
    if missing := [name for name, count in zip(classes, counts) if not count]:
        raise DataError(
            f"LOSS.LOGIT_ADJUSTMENT: {len(missing)} classes have no training image, the first: "
            f"{missing[0]}"
        )
    return torch.from_numpy(factor * np.log(counts / len(targets))).float()
