"""Predict a test set image by image, for the run report."""

import numpy as np
from torch import Tensor, nn

from vil.data.batch import Batch
from vil.engine.distributed import unwrap
from vil.engine.evaluation import autocast, evaluating
from vil.tasks.classification.predictions import Predictions
from vil.tasks.classification.task import ClassificationTask
from vil.utils.errors import DataError


def collect_predictions(task: ClassificationTask, model: nn.Module, name: str) -> Predictions:
    """Predict the images of one test set and score them as `task.evaluate` does.

    Keeps a few bytes per image. Raises DataError if no image can be read.
    """
    with evaluating(unwrap(model)) as plain:
        parts = [
            [field.cpu().numpy() for field in _predict(task, plain, batch, name)]
            for batch in task.test_sets[name]
        ]
    if not parts:
        raise DataError("a test set without a readable image cannot be evaluated")
    return Predictions(*map(np.concatenate, zip(*parts)))


def _predict(
    task: ClassificationTask, model: nn.Module, batch: Batch, name: str
) -> tuple[Tensor, ...]:
    """Compute the fields of Predictions, (B,) each."""
    moved, mapping = batch.to(task.device, task.memory_format), task.class_mapping.get(name)
    with autocast(task.device, task.amp_dtype):
        logits = model(moved.images)
        scores = task.score(name, logits, moved.targets)
    logits = logits.float()
    if mapping is not None:  # unmapped classes are ignored
        logits = logits.masked_fill(~mapping.any(dim=1), -float("inf"))
    probability, predicted = logits.softmax(-1).max(-1)
    return (
        batch.indices, moved.targets, predicted, scores.top1, scores.top5, probability,
        scores.losses.float(), scores.has_loss,
    )  # fmt: skip
