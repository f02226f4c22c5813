"""Per-image predictions on a test set, for the run report.

Shapes: I images, C classes of the test set.
"""

from typing import NamedTuple

import numpy as np
from torch import nn

from vil.engine.distributed import unwrap
from vil.engine.evaluation import autocast, evaluating
from vil.tasks.classification.task import ClassificationTask
from vil.utils.errors import DataError

SHOWN = 12  # images per group of `extremes`


class Predictions(NamedTuple):
    """Predictions and scores of I images, as arrays (I,)."""

    indices: np.ndarray  # index of the image in the test set
    targets: np.ndarray  # class of the image
    predicted: np.ndarray  # the model's most probable class
    correct: np.ndarray  # bool: whether the top-1 prediction is correct
    top5: np.ndarray  # bool: whether one of the top-5 predictions is correct
    probability: np.ndarray  # probability of the predicted class
    loss: np.ndarray  # cross entropy
    has_loss: np.ndarray  # bool, see `score_by_mapping`

    def metrics(self) -> dict[str, float]:
        """Return {loss, top1, top5, count}: mean loss, accuracies in percent, number of images."""
        losses = self.loss[self.has_loss]
        return {
            "loss": float(losses.mean(dtype=np.float64)) if len(losses) else np.nan,
            "top1": 100 * float(self.correct.mean()),
            "top5": 100 * float(self.top5.mean()),
            "count": len(self.indices),
        }

    def per_class(self, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of correct predictions and of images of each class, (C,) each."""
        targets = self.targets, self.targets[self.correct]
        count, correct = (np.bincount(x, minlength=num_classes) for x in targets)
        return correct, count

    def confusion(self, num_classes: int) -> np.ndarray:
        """Return the confusion matrix (C, C): image counts by [true class, predicted class]."""
        pairs = self.targets * num_classes + self.predicted
        return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)

    def mistakes(self, most: int) -> list[tuple[int, int, int]]:
        """Return the `most` most frequent errors, most frequent first.

        An error is (true class, predicted class, number of images).
        """
        wrong = np.stack([self.targets[~self.correct], self.predicted[~self.correct]], axis=1)
        pairs, counts = np.unique(wrong, axis=0, return_counts=True)
        order = np.argsort(-counts, kind="stable")[:most]
        return [(*map(int, pairs[n]), int(counts[n])) for n in order]

    def extremes(self, most: int = SHOWN) -> dict[str, np.ndarray]:
        """Select the most confidently wrong, the most confidently correct and the costliest images.

        The costliest have the highest loss. Returns {group title: indices into the arrays}. A group
        has at most `most` images. No image is in two groups.
        """

        def first(candidates: np.ndarray, key: np.ndarray) -> np.ndarray:
            return candidates[np.argsort(key[candidates], kind="stable")[:most]]

        confident = first(np.flatnonzero(~self.correct), -self.probability)
        costly = first(np.setdiff1d(np.flatnonzero(self.has_loss), confident), -self.loss)
        correct = first(np.setdiff1d(np.flatnonzero(self.correct), costly), self.loss)
        return {
            "Most confidently wrong": confident,
            "Highest loss of the others": costly,
            "Most confidently correct": correct,
        }


def collect_predictions(task: ClassificationTask, model: nn.Module, name: str) -> Predictions:
    """Predict the images of the test set `name` and score them like `task.evaluate`.

    Raises DataError if no image can be read.
    """
    parts, mapping = [], task.class_mapping.get(name)
    with evaluating(unwrap(model)) as plain:
        for batch in task.test_sets[name]:
            moved = batch.to(task.device, task.memory_format)
            with autocast(task.device, task.amp_dtype):
                logits = plain(moved.images)
                scores = task.score(name, logits, moved.targets)
            logits = logits.float()
            if mapping is not None:  # unmapped classes are ignored
                logits = logits.masked_fill(~mapping.any(dim=1), -float("inf"))
            probability, predicted = logits.softmax(-1).max(-1)
            fields = (
                batch.indices, moved.targets, predicted, scores.top1, scores.top5, probability,
                scores.losses.float(), scores.has_loss,
            )  # fmt: skip
            parts.append([field.cpu().numpy() for field in fields])
    if not parts:
        raise DataError(f"the test set {name} has no readable image, so it cannot be evaluated")
    return Predictions(*map(np.concatenate, zip(*parts)))
