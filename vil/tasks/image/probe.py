"""Evaluate a model's features with simple classifiers from scikit-learn.

The classifiers are k nearest neighbors by cosine similarity, and logistic regression on
standardized features (a linear probe). k and the inverse regularization strength C are chosen on
held-out training images. The test images are used once.

Shapes: N images, D features.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vil.utils.errors import DataError

log = logging.getLogger(__name__)

NEIGHBORS = (1, 5, 10, 20, 50, 100)
DEFAULT_NEIGHBORS = 20
STRENGTHS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)  # C, the inverse of the regularization
MAX_ITERATIONS = 1000
EVERY = 5  # every fifth training image of a class is held out, to choose k and C


class Labeled(NamedTuple):
    """Features (N, D) float32 and classes (N,) int64 of the images of a dataset."""

    features: np.ndarray
    classes: np.ndarray


class Probe(NamedTuple):
    """The accuracy of a simple classifier of features.

    name: name of the classifier. setting: its hyperparameter as text, such as "k=20". top1: {test
    set: top-1 accuracy in percent}.
    """

    name: str
    setting: str
    top1: dict[str, float]


def probe_features(train: Labeled, tests: dict[str, Labeled]) -> list[Probe]:
    """Fit classifiers of features on the training images, and evaluate them on each test set.

    Returns the results of k nearest neighbors with k = 20, k nearest neighbors with the best k, and
    logistic regression with the best C (inverse regularization strength). The best values have the
    highest accuracy on a held-out fifth of the training images. tests: {name of the test set:
    features and classes}. Raises DataError if all training images have the same class.
    """
    if len(np.unique(train.classes)) < 2:
        raise DataError(
            f"all {len(train.classes)} training images have the same class, but a classifier needs "
            "images of at least two classes: add images of another class"
        )
    is_held_out = split_off(train.classes)
    part, held_out = (Labeled(*(a[mask] for a in train)) for mask in (~is_held_out, is_held_out))
    if not is_held_out.any() or len(np.unique(part.classes)) < 2:
        part = held_out = train  # too few images to hold any out
    best_k = best_setting(build_neighbors, NEIGHBORS, part, held_out)
    best_c = best_setting(build_linear, STRENGTHS, part, held_out)
    classifiers = (
        ("nearest neighbors", f"k={DEFAULT_NEIGHBORS}", build_neighbors, DEFAULT_NEIGHBORS),
        ("nearest neighbors", f"k={best_k}, chosen", build_neighbors, best_k),
        ("linear probe", f"C={best_c:g}, chosen", build_linear, best_c),
    )
    return [
        Probe(name, setting, score(build(value, len(train.classes)), train, tests))
        for name, setting, build, value in classifiers
    ]


def split_off(classes: np.ndarray) -> np.ndarray:
    """Select a fifth of the training images as a held-out set, at random with a fixed seed.

    classes (N,): class of each image. Returns a mask (N,) bool, with a fifth of each class, rounded
    down.
    """
    mask = np.zeros(len(classes), bool)
    shuffled = np.random.RandomState(0).permutation(len(classes))
    for label in np.unique(classes):
        mask[shuffled[classes[shuffled] == label][EVERY - 1 :: EVERY]] = True
    return mask


def best_setting(
    build: Callable[[Any, int], Any], values: Sequence[Any], train: Labeled, test: Labeled
) -> Any:
    """Return the hyperparameter with the highest accuracy on `test` after fitting on `train`.

    build: function (hyperparameter, number of training images) that builds the classifier. values:
    the hyperparameters to try. If several have the same accuracy, the first is returned.
    """
    scores = [score(build(v, len(train.classes)), train, {"": test})[""] for v in values]
    return values[int(np.argmax(scores))]


def score(classifier: Any, train: Labeled, tests: dict[str, Labeled]) -> dict[str, float]:
    """Fit a scikit-learn classifier on `train`, and return {test set: accuracy in percent}."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        classifier.fit(*train)
    return {
        name: 100 * float(np.mean(classifier.predict(test.features) == test.classes))
        for name, test in tests.items()
    }


def build_neighbors(k: int, num_images: int) -> Any:
    """Build a k-nearest-neighbors classifier. k is reduced to `num_images` if it is larger.

    num_images: number of training images.
    """
    from sklearn.neighbors import KNeighborsClassifier

    return KNeighborsClassifier(min(k, num_images), metric="cosine", algorithm="brute")


def build_linear(strength: float, num_images: int) -> Any:
    """Build a logistic regression on standardized features.

    strength: inverse regularization strength C. num_images: not used.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=MAX_ITERATIONS))
